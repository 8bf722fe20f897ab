"""`perdure chat`: a conversation in the terminal, or with a pipe, a line a message."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perdure.atomic import TEXT_BYTES, read_lines
from perdure.cli.options import shared
from perdure.cli.options.groups import (
    ChatEngine,
    ConversationOptions,
    EngineOptions,
    SamplingOptions,
    unfolded,
)
from perdure.cli.options.shared import first_word
from perdure.cli.output import terminal
from perdure.cli.prompt import read_text, split_model, system_text
from perdure.cli.runtime import usual_store
from perdure.config import Overflow, settings
from perdure.engine_config import N_CTX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perdure.cli.conversation import Conversation
    from perdure.cli.line_editor import LineEditor


@unfolded
def chat(
    words: list[str] | None = typer.Argument(
        None,
        metavar="MESSAGE",
        show_default=False,
        autocompletion=first_word,
        help="The model first, if you name one: a .gguf file, owner/repo on the Hugging Face hub, "
        "hf.co/owner/repo, a URL, or a name that `perdure ls` shows. Then a first message, if you like.",
    ),
    model: shared.Model = None,
    *,
    conversation: ConversationOptions,
    overflow: Overflow = shared.talk_option(
        "error",
        "--overflow",
        help="When the context is full. error: refuse the message; drop_oldest: leave out the oldest "
        "turns; shift: go on without the oldest tokens; fold: go on from a summary.",
    ),
    sampling: SamplingOptions,
    engine: ChatEngine,
) -> None:
    """Chat with a model in the terminal. /help there lists what can be typed besides messages.

    A chat without --session is not kept, unless you type /keep NAME. From a pipe, each line is a message and
    each is answered.
    """
    # Errors in the request are reported before a model is fetched or loaded.
    name, first = split_model(words, model)
    converse(name, first, conversation, overflow, sampling, engine)


def converse(
    model: str | None,
    first: Sequence[str],
    conversation: ConversationOptions,
    overflow: Overflow,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> None:
    """A conversation from its first words until its user leaves it."""
    from perdure.cli.conversation import Conversation
    from perdure.cli.line_editor import LineEditor
    from perdure.cli.slash_commands import NAMES

    settings_now = settings()
    config = engine.config

    session = conversation.session
    if conversation.store is not None and session is None:
        raise typer.BadParameter("a store keeps sessions: give --session NAME too", param_hint="--store")
    limit = sampling.max_tokens
    if limit is None and overflow == "shift":
        # It would go on for ever.
        limit = config.n_ctx if isinstance(config.n_ctx, int) else N_CTX
    asked = _settings(conversation.schema, overflow, limit) | sampling.given()
    folder = _folder(conversation.store, in_use=session is not None)
    watched = sys.stdin is not None and sys.stdin.isatty()
    good = True
    with (
        terminal.leaving_in_order(),
        Conversation(
            model,
            session,
            system=system_text(conversation.system),
            settings=asked,
            folder=folder,
            config=config,
            template=engine.template,
            watched=watched,
        ) as talk,
    ):
        try:
            if watched:
                talk.greet()
                editor = LineEditor(settings_now.home / "chat.history", NAMES)
                talk.offer_pending(editor.answer)
            if first:
                good = talk.say(" ".join(first))
            if watched:
                _answer_lines(talk, editor)
            else:
                for message in _piped():
                    good = talk.say(message) and good
        except BrokenPipeError:
            terminal.discard_output()
            good = False
    if not good:
        raise typer.Exit(1)


def _answer_lines(talk: Conversation, editor: LineEditor) -> None:
    from perdure.cli.slash_commands import is_pasted_image, run_slash_command

    for message in editor.messages(lambda: talk.prompt):
        try:
            if is_pasted_image(message):
                run_slash_command(talk, f"/image {message.strip()}")
            elif message.startswith("//"):
                talk.say(message[1:])
            elif not message.startswith("/"):
                talk.say(message)
            elif not run_slash_command(talk, message):
                break
        except KeyboardInterrupt:
            terminal.tell("\nStopped. Ctrl-D or /quit leaves.")
    talk.offer_to_keep(editor.answer)


def _piped() -> Iterator[str]:
    if sys.stdin is None or sys.stdin.closed:
        return
    for line in read_lines(sys.stdin.buffer, TEXT_BYTES, "the input"):
        text = line.decode("utf-8", "replace").strip()
        if text:
            yield text


def _settings(schema: Path | None, overflow: Overflow, max_tokens: int | None) -> dict[str, Any]:
    from perdure import Grammar

    settings: dict[str, Any] = {"overflow": overflow, "max_tokens": max_tokens}
    if schema is not None:
        text = read_text(schema)
        Grammar.json_schema(text)
        # As a value, so that each turn can say what it was held to.
        settings["schema"] = json.loads(text)
    return {key: value for key, value in settings.items() if value is not None}


def _folder(store: Path | None, *, in_use: bool) -> Path:
    """The folder of the sessions. If it is needed and unusable, an error comes before a model is loaded."""
    from perdure.sessions.store.registry import has_sessions, open_store

    folder = store or usual_store()
    if in_use and has_sessions(folder):
        open_store(folder).close()
    return folder
