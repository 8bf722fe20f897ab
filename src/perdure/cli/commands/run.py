"""`perdure run`: one question, one answer, to read or to pipe on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli import options
from perdure.cli.offload import Devices, GpuLayers, KvOffload, TensorSplit, loading

if TYPE_CHECKING:
    from perdure import ChatReply, Grammar, Job, Reply, Runtime, Session, TurnJob

LAST = "last-run"
"""The session that a run without a name is kept in, until the next one."""
_SLOTS = 4
"""Samples that are written at once; the others follow them."""

_Talk = "The conversation"
_Shape = "Shape of the reply"
_Output = "Output"


def run(
    words: options.Words = None,
    model: options.Model = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", metavar="FILE", help="Attach a text file; may be given several times."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the text as it is, without the chat template.")
    ] = False,
    ctx: options.Ctx = None,
    gpu_layers: GpuLayers = None,
    device: Devices = None,
    tensor_split: TensorSplit = None,
    kv_offload: KvOffload = True,
    max_tokens: options.MaxTokens = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End the reply before TEXT; may be given several times."),
    ] = None,
    samples: Annotated[
        int,
        typer.Option("--samples", min=1, metavar="N", help="Write N replies to one reading of the prompt."),
    ] = 1,
    exact: Annotated[
        bool, typer.Option("--exact", help="Decode each reply alone, so that it never depends on others.")
    ] = False,
    system: options.SystemText = None,
    go_on: Annotated[
        bool,
        typer.Option(
            "--continue",
            "-c",
            help="Continue the last conversation: the last run, or the session that was used since.",
            rich_help_panel=_Talk,
        ),
    ] = False,
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            metavar="NAME",
            help="Keep the conversation under this name, or continue it.",
            rich_help_panel=_Talk,
        ),
    ] = None,
    store: options.Store = None,
    keep: Annotated[
        bool,
        typer.Option("--keep/--no-keep", help="Keep the conversation for --continue.", rich_help_panel=_Talk),
    ] = True,
    template: options.Template = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repeat_penalty: options.RepeatPenalty = None,
    seed: options.Seed = None,
    schema: options.Schema = None,
    regex: Annotated[
        str | None,
        typer.Option(
            "--regex",
            metavar="PATTERN",
            help="Regular expression that the reply must match.",
            rich_help_panel=_Shape,
        ),
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option(
            "--grammar",
            metavar="FILE",
            help="Grammar (.lark or .gbnf) that the reply must match.",
            rich_help_panel=_Shape,
        ),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream/--no-stream",
            help="Print the reply as it comes or at its end.",
            rich_help_panel=_Output,
        ),
    ] = True,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object with everything.", rich_help_panel=_Output),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            min=0,
            metavar="K",
            help="Log probabilities, with the K likeliest tokens beside each: in the JSON, or after the text "
            "on standard error.",
            rich_help_panel=_Output,
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Show counts and speeds on standard error.", rich_help_panel=_Output
        ),
    ] = False,
) -> None:
    """Ask a model one question and print its answer.

    Standard input, if something is piped in, follows the prompt: `cat notes.txt | perdure run "Summarise:"`.
    With a model and no prompt, in a terminal, it is `perdure chat`.
    """
    from perdure import InvalidInputError
    from perdure.cli import prompt as prompts
    from perdure.cli.commands.chat import chat
    from perdure.cli.output import terminal
    from perdure.cli.runtime import opened
    from perdure.config import settings

    # Whatever is wrong with the request is told before a model is fetched or loaded.
    sampling = options.given(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        seed=seed,
    )
    if go_on and session is not None:
        raise typer.BadParameter("--continue and --session both choose a conversation: give one of them")
    if samples > 1 and (go_on or session is not None):
        raise typer.BadParameter("a conversation goes on from one reply: leave --samples out")
    if raw and (go_on or session is not None or system is not None):
        raise typer.BadParameter("--raw completes a text: it takes no --system, --session or --continue")
    if stop and not all(stop):
        raise InvalidInputError("--stop needs a text that is not empty")
    name, asked = prompts.split_model(words, model)
    piped = prompts.standard_input_is_piped()
    if not asked and not files and not piped:
        if name is None or raw:
            raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
        chat(
            None,
            model=name,
            session=session,
            store=store,
            system=system,
            ctx=ctx,
            gpu_layers=gpu_layers,
            device=device,
            tensor_split=tensor_split,
            kv_offload=kv_offload,
            template=template,
            schema=schema,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            seed=seed,
        )
        return
    request = {
        "max_tokens": max_tokens,
        "stop": stop or (),
        "grammar": _shape(schema, regex, grammar),
        "n": samples,
        "logprobs": logprobs,
        **sampling,
    }
    text = prompts.prompt_text(asked, files or (), piped=piped)
    system = prompts.system_text(system)
    if go_on:
        session = _latest(store)
    output = Output(samples, stream=stream, as_json=as_json, verbose=verbose, limited=max_tokens is not None)
    folder = store or settings().store
    try:
        with (
            terminal.leaving_in_order(),
            opened(
                name,
                ctx=ctx,
                store=folder if session else None,
                template=template,
                loading=loading(gpu_layers, device, tensor_split, kv_offload),
                slots=min(samples, _SLOTS),
                exact=exact,
                # Without a conversation there is one prompt, and nothing to keep for later.
                cache=None if session else 0,
            ) as runtime,
        ):
            raw = raw or (template is None and _has_no_template(runtime, needed=bool(session or system)))
            asking = Asking(runtime, text, request, output, system)
            if raw or samples > 1:
                stopped = asking.once(raw=raw)
            else:
                stopped = asking.in_session(session, folder, keep=keep)
    except BrokenPipeError:
        # Whoever read has gone. Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    if stopped:
        raise typer.Exit(130)


@dataclass(frozen=True, slots=True)
class Output:
    """How replies are shown."""

    samples: int
    stream: bool
    as_json: bool
    verbose: bool
    limited: bool
    """Whether the reply was to end by a number of tokens."""

    def follow(self, job: Job | TurnJob) -> tuple[list[Reply] | list[ChatReply], bool]:
        """Show a job until it ends, or until Ctrl-C ends it: its replies, and whether that was so."""
        from perdure import Job
        from perdure.cli.output.reply_view import ReplyView
        from perdure.cli.output.sample_view import SampleView
        from perdure.cli.output.terminal import stopped_by_ctrl_c

        shown = ReplyView(think=False) if not isinstance(job, Job) and self.samples == 1 else None
        view = None if self.as_json else shown or SampleView(self.samples)
        with stopped_by_ctrl_c(job) as stopped:
            held = []
            for delta in job:
                if view is not None and self.stream:
                    view.add(delta)  # type: ignore[arg-type]
                else:
                    held.append(delta)
            replies = job.replies()
        if view is not None:
            for delta in held:
                view.add(delta)  # type: ignore[arg-type]
            view.end()
        return replies, stopped.is_set()

    def tell(
        self, runtime: Runtime, replies: list[Reply] | list[ChatReply], session: Session | None = None
    ) -> None:
        """What else is to be known about the replies."""
        from perdure import ChatReply
        from perdure.cli.output import terminal
        from perdure.cli.output.reply_json import logprob_line, reply_json, timing_line

        model = runtime.model
        if self.as_json:
            shown = [reply_json(reply, model) for reply in replies]
            if session is not None:
                shown[0]["session"] = session.name
            typer.echo(json.dumps(shown[0] if len(shown) == 1 else {"samples": shown}, ensure_ascii=False))
        for reply in replies:
            raw = reply.raw if isinstance(reply, ChatReply) else reply
            if raw.finish_reason == "length" and not self.limited:
                terminal.note(
                    f"the context of {runtime.n_ctx} tokens is full, so the text ends here; "
                    "a larger --ctx makes room"
                )
            if raw.logprobs is not None and not self.as_json:
                for entry in raw.logprobs:
                    terminal.tell(logprob_line(entry, model))
            if self.verbose:
                terminal.tell(timing_line(raw))


@dataclass(frozen=True, slots=True)
class Asking:
    """One prompt to one model."""

    runtime: Runtime
    text: str
    request: dict[str, Any]
    output: Output
    system: str | None

    def once(self, *, raw: bool) -> bool:
        """Ask outside of any conversation. Whether Ctrl-C ended it."""
        messages = [{"role": "user", "content": self.text}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        with _advised(self.runtime.n_ctx):
            job: Job | TurnJob = (
                self.runtime.submit(self.text, **self.request)
                if raw
                else self.runtime.submit_chat(messages, **self.request)
            )
        replies, stopped = self.output.follow(job)
        self.output.tell(self.runtime, replies)
        return stopped

    def in_session(self, name: str | None, folder: Path, *, keep: bool) -> bool:
        """Ask in a conversation: the one of that name, or one that the next run may continue."""
        from perdure import ChatReply
        from perdure.cli.output import terminal

        session = self.runtime.session(name or LAST, system=self.system)
        with _advised(self.runtime.n_ctx):
            job = session.submit(self.text, keep_partial=True, **self.request)
        replies, stopped = self.output.follow(job)
        self.output.tell(self.runtime, replies, session if name else None)
        [reply] = replies
        assert isinstance(reply, ChatReply)
        if name is not None:
            if not reply.kept:
                terminal.note(f"this turn is not kept: {reply.not_kept}")
        elif keep and reply.kept:
            _keep(session, folder)
        return stopped


def _has_no_template(runtime: Runtime, *, needed: bool) -> bool:
    """Whether a model can only complete text; that is told, and an error where more is `needed`."""
    from perdure import InvalidInputError
    from perdure.cli.output import terminal
    from perdure.cli.runtime import model_path

    if runtime.model.metadata.get("tokenizer.chat_template", "").strip():
        return False
    name = model_path(runtime).name
    if needed:
        raise InvalidInputError(
            f"{name} has no chat template, so it takes no system prompt and no conversation; "
            "give one with --template (such as chatml), or leave these options out to complete the text"
        )
    terminal.note(f"{name} has no chat template, so it completes the text as it is (--raw)")
    return True


def _keep(session: Session, folder: Path) -> None:
    """Have the next run find this one. Its words alone: state takes long to write for a single question."""
    from perdure import PerdureError
    from perdure.cli.output import terminal
    from perdure.cli.store import sessions_in

    try:
        with sessions_in(folder, readonly=False, create=True) as sessions:
            sessions.copy(session, LAST, replace=True)
    except PerdureError as error:
        terminal.note(f"this is not kept for --continue: {error}")


def _latest(store: Path | None) -> str:
    """The session that was used last."""
    from perdure import SessionNotFoundError
    from perdure.cli.store import session_folder, sessions_in

    folder = session_folder(store, create=True)
    if (folder / "sessions.sqlite").is_file():
        with sessions_in(folder, readonly=True) as sessions:
            for info in sessions.list(limit=1):
                return info.name
    raise SessionNotFoundError(
        f"there is no conversation to continue in {folder}: `perdure run PROMPT` starts one"
    )


def _shape(schema: Path | None, regex: str | None, grammar: Path | None) -> Grammar | None:
    from perdure import Grammar, InvalidInputError
    from perdure.cli.prompt import read_text

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


@contextmanager
def _advised(ctx: int) -> Iterator[None]:
    """While this is open, a prompt that is too long is told with the option that makes room."""
    from perdure import ContextOverflow
    from perdure.cli.output import words

    try:
        yield
    except ContextOverflow as error:
        raise ContextOverflow(
            f"the prompt has {words.needed(error)}, and {error.fits} fit into the context of {ctx}; a larger "
            "--ctx makes room",
            needed=error.needed,
            fits=error.fits,
            at_least=error.at_least,
        ) from None
