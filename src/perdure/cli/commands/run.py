"""`perdure run`: one question, one answer, to read or to pipe on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from perdure.cli.options import shared
from perdure.cli.options.groups import ConversationOptions, RunEngine, SamplingOptions, unfolded
from perdure.cli.output import terminal
from perdure.cli.prompt import read_text
from perdure.cli.runtime import opened, session_folder, sessions_in, usual_store
from perdure.errors import InvalidInputError, SessionNotFoundError

if TYPE_CHECKING:
    from perdure import Grammar

_SLOTS = 4
"""Samples that are written at once; the others follow them."""

_output_option = partial(typer.Option, rich_help_panel="Output")


@unfolded
def run(
    words: shared.Words = None,
    model: shared.Model = None,
    files: list[Path] | None = typer.Option(
        None, "--file", "-f", metavar="FILE", help="Attach a text file; may be given several times."
    ),
    images: list[Path] | None = typer.Option(
        None,
        "--image",
        metavar="FILE",
        help="Show the model an image or a WAV file; may be given several times.",
    ),
    raw: bool = typer.Option(False, "--raw", help="Complete the text as it is, without the chat template."),
    go_on: bool = shared.talk_option(
        False,
        "--continue",
        "-c",
        help="Continue the last conversation: the last run, or the session that was used since.",
    ),
    *,
    conversation: ConversationOptions,
    keep: bool = shared.talk_option(True, "--keep/--no-keep", help="Keep this run for --continue."),
    regex: str | None = shared.shape_option(
        None, "--regex", metavar="PATTERN", help="Regular expression that the reply must match."
    ),
    grammar: Path | None = shared.shape_option(
        None, "--grammar", metavar="FILE", help="Grammar (.lark or .gbnf) that the reply must match."
    ),
    stop: list[str] | None = shared.shape_option(
        None, "--stop", metavar="TEXT", help="End the reply before TEXT; may be given several times."
    ),
    sampling: SamplingOptions,
    samples: int = _output_option(
        1, "--samples", min=1, metavar="N", help="Write N replies; the prompt is read once."
    ),
    stream: bool = _output_option(
        True, "--stream/--no-stream", help="Print the reply as it comes or at its end."
    ),
    as_json: bool = _output_option(False, "--json", help="Print one JSON object with everything."),
    logprobs: int | None = _output_option(
        None,
        "--logprobs",
        min=0,
        metavar="K",
        help="Log probabilities, with the K likeliest tokens beside each: in the JSON, or after the text "
        "on standard error.",
    ),
    verbose: bool = _output_option(
        False, "--verbose", "-v", help="Show counts and speeds on standard error."
    ),
    engine: RunEngine,
) -> None:
    """Ask a model one question and print its answer.

    Standard input, if something is piped in, follows the prompt: `cat notes.txt | perdure run "Summarise:"`.
    With a model and no prompt, in a terminal, it is `perdure chat`.
    """
    from perdure.cli import prompt as prompts
    from perdure.cli.asking import Asking, Output, has_no_template
    from perdure.cli.commands.chat import converse
    from perdure.cli.image_files import image_of

    # Errors in the request are reported before a model is fetched or loaded.
    session, store = conversation.session, conversation.store
    if go_on and session is not None:
        raise typer.BadParameter("--continue and --session both choose a conversation: give one of them")
    if samples > 1 and (go_on or session is not None):
        raise typer.BadParameter("a conversation goes on from one reply: leave --samples out")
    if raw and (go_on or session is not None or conversation.system is not None):
        raise typer.BadParameter("--raw completes a text: it takes no --system, --session or --continue")
    if images and (raw or samples > 1):
        raise typer.BadParameter("--image asks in a conversation: leave --raw and --samples out")
    if stop and not all(stop):
        raise InvalidInputError("--stop needs a text that is not empty")
    name, prompt_words = prompts.split_model(words, model)
    piped = prompts.standard_input_is_piped()
    if not prompt_words and not files and not images and not piped:
        if name is None or raw:
            raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
        converse(name, (), conversation, "error", sampling, engine)
        return
    request = {
        "max_tokens": sampling.max_tokens,
        "stop": stop or (),
        "grammar": _shape(conversation.schema, regex, grammar),
        "n": samples,
        "logprobs": logprobs,
        **sampling.given(),
    }
    shown = list(map(image_of, images or ()))
    text = prompts.prompt_text(prompt_words, files or (), piped=piped)
    system = prompts.system_text(conversation.system)
    if go_on:
        session = _latest(store)
    output = Output(
        samples, stream=stream, as_json=as_json, verbose=verbose, limited=sampling.max_tokens is not None
    )
    folder = store or usual_store()
    try:
        with (
            terminal.leaving_in_order(),
            opened(
                name,
                # Without a conversation there is one prompt, and nothing to keep for later.
                replace(engine.config, slots=min(samples, _SLOTS), cache=None if session or shown else 0),
                store=folder if session or shown else None,
                template=engine.template,
            ) as runtime,
        ):
            if engine.template is None and not raw:
                raw = has_no_template(runtime, needed=bool(session or system))
            asking = Asking(runtime, text, request, output, system, shown)
            if raw or samples > 1:
                stopped = asking.once(raw=raw)
            else:
                stopped = asking.in_session(session, folder, keep=keep)
    except BrokenPipeError:
        terminal.discard_output()
        raise typer.Exit(1) from None
    if stopped:
        raise typer.Exit(stopped)


def _latest(store: Path | None) -> str:
    """The session that was used last."""
    from perdure.sessions.store.registry import has_sessions

    folder = session_folder(store, create=True)
    if has_sessions(folder):
        with sessions_in(folder, readonly=True) as sessions:
            for info in sessions.list(limit=1):
                return info.name
    raise SessionNotFoundError(
        f"there is no conversation to continue in {folder}: `perdure run PROMPT` starts one"
    )


def _shape(schema: Path | None, regex: str | None, grammar: Path | None) -> Grammar | None:
    from perdure import Grammar

    if sum(choice is not None for choice in (schema, regex, grammar)) > 1:
        raise InvalidInputError("give one of --schema, --regex and --grammar")
    if schema is not None:
        return Grammar.json_schema(read_text(schema))
    if regex is not None:
        return Grammar.regex(regex)
    if grammar is None:
        return None
    kinds = {".lark": Grammar.lark, ".gbnf": Grammar.gbnf}
    if grammar.suffix.lower() not in kinds:
        raise InvalidInputError(f"{grammar} should end in .lark or .gbnf, which says how to read it")
    return kinds[grammar.suffix.lower()](read_text(grammar))
