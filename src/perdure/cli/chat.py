"""`perdure chat`: a conversation in the terminal, or with a pipe, a line a message."""

from __future__ import annotations

import enum
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perdure.cli.conversation import Conversation

_Talk = "The conversation"
_Sampling = "Sampling"


class Overflow(enum.StrEnum):
    """What happens when a conversation no longer fits."""

    ERROR = "error"
    DROP_OLDEST = "drop_oldest"
    SHIFT = "shift"
    FOLD = "fold"


def chat(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A .gguf file, or any name that `models pull` takes."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The same, for those who like to name it.")
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            metavar="NAME",
            help="Keep the conversation on disk under this name, or go on with it. Without a name it ends "
            "with the command.",
            rich_help_panel=_Talk,
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            metavar="DIR",
            help="Where sessions are kept; else under PERDURE_HOME.",
            rich_help_panel=_Talk,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", "-s", help="What the model is to be.", rich_help_panel=_Talk)
    ] = None,
    ctx: Annotated[
        int,
        typer.Option(
            "--ctx",
            min=1,
            metavar="N",
            help="Tokens that the conversation may have.",
            rich_help_panel=_Talk,
        ),
    ] = 4096,
    overflow: Annotated[
        Overflow,
        typer.Option(
            "--overflow",
            help="When it no longer fits: say so; leave out the oldest turns; go on without the oldest "
            "tokens; or go on from a summary.",
            rich_help_panel=_Talk,
        ),
    ] = Overflow.ERROR,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            metavar="NAME|FILE",
            help="A chat template to use instead of the model's own.",
            rich_help_panel=_Talk,
        ),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            "--schema", metavar="FILE", help="A JSON schema that replies keep to.", rich_help_panel=_Talk
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", min=1, metavar="N", help="The most that one reply has.", rich_help_panel=_Talk
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", "-t", help="0 always takes the likeliest token.", rich_help_panel=_Sampling
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="The same seed gives the same replies.", rich_help_panel=_Sampling),
    ] = None,
) -> None:
    """Chat with a model. From a pipe, each line is a message and each is answered.

    In a terminal, /help tells what else can be typed.
    """
    import perdure
    from perdure.cli import terminal
    from perdure.cli.conversation import Conversation

    # Whatever is wrong with the request is told before a model is fetched or loaded.
    if name is not None and model is not None:
        raise typer.BadParameter("name the model once", param_hint="MODEL")
    if store is not None and session is None:
        raise typer.BadParameter("a store keeps sessions: give --session NAME too", param_hint="--store")
    settings = _settings(schema, overflow, max_tokens if max_tokens or overflow != "shift" else ctx)
    settings |= _sampling(temperature=temperature, seed=seed)
    folder = _folder(store) if session is not None else None
    watched = sys.stdin is not None and sys.stdin.isatty()
    loaded = terminal.load(name or model)
    good = True
    with (
        terminal.leaving_in_order(),
        perdure.open(loaded, n_ctx=ctx, slots=1, store=folder, template=template) as runtime,
    ):
        # A model without a template is told now, not after the first message.
        _ = runtime.chat_format
        conversation = Conversation.begin(
            runtime, session, system=system, settings=settings, store=folder, watched=watched
        )
        try:
            if watched:
                terminal.tell(f"{loaded.path.name}. /help tells what else can be typed, Ctrl-D leaves.")
                _converse(conversation)
            else:
                for message in _piped():
                    good = conversation.say(message) and good
        except BrokenPipeError:
            # Whoever read has gone. Python would complain once more when it closes the stream.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            good = False
    if not good:
        raise typer.Exit(1)


def _converse(conversation: Conversation) -> None:
    from perdure.cli import terminal, words
    from perdure.cli.conversation import NAME
    from perdure.cli.line_editor import LineEditor
    from perdure.cli.slash_commands import WORDS, obey
    from perdure.config import settings

    def prompt() -> str:
        name = conversation.session.name
        return "> " if name == NAME else f"{words.quoted(name)}> "

    for message in LineEditor(settings().home / "chat.history", WORDS).messages(prompt):
        try:
            if message.startswith("//"):
                conversation.say(message[1:])
            elif not message.startswith("/"):
                conversation.say(message)
            elif not obey(conversation, message):
                return
        except KeyboardInterrupt:
            terminal.tell("\nStopped. Ctrl-D or /quit leaves.")


def _piped() -> Iterator[str]:
    if sys.stdin is None or sys.stdin.closed:
        return
    for line in sys.stdin.buffer:
        text = line.decode("utf-8", "replace").strip()
        if text:
            yield text


def _settings(schema: Path | None, overflow: Overflow, max_tokens: int | None) -> dict[str, Any]:
    import json

    from perdure import Grammar, InvalidInputError

    found: dict[str, Any] = {"overflow": overflow.value, "max_tokens": max_tokens}
    if schema is not None:
        try:
            text = schema.read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidInputError(f"{schema} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidInputError(f"{schema} is not UTF-8 text") from None
        Grammar.json_schema(text)
        # As a value, so that each turn can say what it was held to.
        found["schema"] = json.loads(text)
    return {key: value for key, value in found.items() if value is not None}


def _sampling(**given: Any) -> dict[str, Any]:
    from perdure import Sampling

    found = {key: value for key, value in given.items() if value is not None}
    Sampling(**found)
    return found


def _folder(store: Path | None) -> Path:
    """The store, which somebody else may be writing to: better told before a model is loaded."""
    from perdure.config import settings
    from perdure.sessions.session_store import SessionStore

    folder = store or settings().store
    if (folder / "sessions.sqlite").exists():
        SessionStore(folder).close()
    return folder
