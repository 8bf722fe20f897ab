"""One prompt to one model: in a conversation or outside of any, and how the answer is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perdure import ChatReply, ContextOverflow, InvalidInputError, PerdureError
from perdure.cli.output import progress, terminal, words
from perdure.cli.output.reply_json import logprob_line, reply_json, timing_line
from perdure.cli.output.reply_view import ReplyView
from perdure.cli.output.sample_view import SampleView
from perdure.cli.runtime import model_path
from perdure.cli.store import sessions_in

if TYPE_CHECKING:
    from perdure import ChatDelta, Delta, Reply, Runtime, Session, Stream

    AnyStream = Stream[Delta, Reply] | Stream[ChatDelta, ChatReply]

LAST = "last-run"
"""The session that a run without a name is kept in, until the next one."""


@dataclass(frozen=True, slots=True)
class Output:
    """How replies are shown."""

    samples: int
    stream: bool
    as_json: bool
    verbose: bool
    limited: bool
    """Whether the reply was to end by a number of tokens."""

    def follow(self, stream: AnyStream, *, raw: bool = False) -> tuple[list[Reply] | list[ChatReply], bool]:
        """Show a stream until it ends, or until Ctrl-C ends it: its replies, and whether that was so."""
        shown = ReplyView(think=False) if not raw and self.samples == 1 else None
        view = None if self.as_json else shown or SampleView(self.samples)
        with terminal.stopped_by_ctrl_c(stream) as stopped, progress.reading(stream) as begun:
            held = []
            for delta in stream:
                begun()
                if view is not None and self.stream:
                    view.add(delta)  # type: ignore[arg-type]
                else:
                    held.append(delta)
            replies = stream.replies()
        if view is not None:
            for delta in held:
                view.add(delta)  # type: ignore[arg-type]
            view.end()
        return replies, stopped.is_set()

    def tell(
        self, runtime: Runtime, replies: list[Reply] | list[ChatReply], session: Session | None = None
    ) -> None:
        """What else is to be known about the replies."""
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
            stream: AnyStream = (
                self.runtime.submit(self.text, **self.request)
                if raw
                else self.runtime.submit_chat(messages, **self.request)
            )
        replies, stopped = self.output.follow(stream, raw=raw)
        self.output.tell(self.runtime, replies)
        return stopped

    def in_session(self, name: str | None, folder: Path, *, keep: bool) -> bool:
        """Ask in a conversation: the one of that name, or one that the next run may continue."""
        session = self.runtime.session(name or LAST, system=self.system)
        with _advised(self.runtime.n_ctx):
            stream = session.submit(self.text, keep_partial=True, **self.request)
        replies, stopped = self.output.follow(stream)
        self.output.tell(self.runtime, replies, session if name else None)
        [reply] = replies
        assert isinstance(reply, ChatReply)
        if name is not None:
            if not reply.kept:
                terminal.note(f"this turn is not kept: {reply.not_kept}")
        elif keep and reply.kept:
            _keep(session, folder)
        return stopped


def has_no_template(runtime: Runtime, *, needed: bool) -> bool:
    """Whether a model can only complete text; that is told, and an error where more is `needed`."""
    if runtime.model.info.template.strip():
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
    try:
        with sessions_in(folder, readonly=False, create=True) as sessions:
            sessions.copy(session, LAST, replace=True)
    except PerdureError as error:
        terminal.note(f"this is not kept for --continue: {error}")


@contextmanager
def _advised(ctx: int) -> Iterator[None]:
    """While this is open, a prompt that is too long is told with the option that makes room."""
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
