"""One prompt to one model: in a conversation or outside of any, and how the answer is shown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perdure import (
    ChatDelta,
    ChatReply,
    ContextOverflow,
    Delta,
    InvalidInputError,
    PerdureError,
    SessionNotFoundError,
)
from perdure.cli.output import progress, terminal, words
from perdure.cli.output.reply_view import ReplyView
from perdure.cli.runtime import model_path, note_demo, sessions_in

if TYPE_CHECKING:
    from perdure import Image, Reply, TokenLogprob
    from perdure.engine.contract import Tokenizer


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

    def follow(
        self, stream: AnyStream, *, raw: bool = False
    ) -> tuple[list[Reply] | list[ChatReply], terminal.Stop]:
        """Show a stream until it ends, or until Ctrl-C or a signal ends it: its replies, and whether one
        did."""
        shown = ReplyView(think=False) if not raw and self.samples == 1 else None
        view = None if self.as_json else shown or SampleView(self.samples)
        deltas: list[Any] = []
        with terminal.stopped_by_signal(stream) as stop, progress.reading(stream) as begun:

            def add(delta: Any) -> None:
                begun()
                if view is not None and self.stream:
                    view.add(delta)
                else:
                    deltas.append(delta)

            lost = terminal.show(stream, add)
            replies = stream.replies()
        if lost is not None and not stop.ends_process:
            raise lost
        if stop.ends_process:
            return replies, stop
        if view is not None:
            for delta in deltas:
                view.add(delta)
            view.end()
        return replies, stop

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
            if raw.finish_reason == "repetition":
                terminal.note("the text repeated itself, so it was ended")
            if raw.logprobs is not None and not self.as_json:
                for entry in raw.logprobs:
                    terminal.tell(logprob_line(entry, model))
            if self.verbose:
                terminal.tell(timing_line(raw))
        note_demo(runtime)


@dataclass(frozen=True, slots=True)
class Asking:
    """One prompt to one model."""

    runtime: Runtime
    text: str
    request: dict[str, Any]
    output: Output
    system: str | None
    images: Sequence[Image] = ()

    def once(self, *, raw: bool) -> int:
        """Ask outside of any conversation. The exit code of what has ended it early, or 0."""
        messages = [{"role": "user", "content": self.text}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        with _advised(self.runtime.n_ctx):
            stream: AnyStream = (
                self.runtime.submit(self.text, **self.request)
                if raw
                else self.runtime.submit_chat(messages, **self.request)
            )
        replies, stop = self.output.follow(stream, raw=raw)
        if not stop.ends_process:
            self.output.tell(self.runtime, replies)
        return stop.code

    def in_session(self, name: str | None, folder: Path, *, keep: bool) -> int:
        """Ask in a conversation: the one of that name, or one that the next run may continue. The exit code
        of what has ended it early, or 0."""
        if name is None and self.images:
            # The store has the images, and with them this session: the last one makes room.
            with suppress(SessionNotFoundError):
                self.runtime.sessions.delete(LAST)
        session = self.runtime.session(name or LAST, system=self.system)
        said = {"role": "user", "content": [*self.images, self.text]} if self.images else self.text
        with _advised(self.runtime.n_ctx):
            stream = session.submit(said, keep_partial=True, **self.request)
        replies, stop = self.output.follow(stream)
        if not stop.ends_process:
            self.output.tell(self.runtime, replies, session if name else None)
        [reply] = replies
        assert isinstance(reply, ChatReply)
        if name is not None:
            if not reply.kept:
                terminal.note(f"this turn is not kept: {reply.not_kept}")
        elif self.images:
            if not keep:
                session.delete()
        elif keep and reply.kept:
            _keep(session, folder)
        return stop.code


def has_no_template(runtime: Runtime, *, needed: bool) -> bool:
    """Whether a model can only complete text. A note says so, or an error where a template is `needed`."""
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
    """While this is open, the error of a prompt that is too long names the option that makes room."""
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


# Several samples of one prompt on their way to a reader.


class SampleView:
    """Samples one below the other: the first unfinished one shows as it comes, later ones wait for it."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._shown = 0
        self._kept = [""] * samples
        self._ended = [False] * samples
        self._at_line_start = True
        self._head()

    def add(self, delta: Delta | ChatDelta) -> None:
        self._kept[delta.index] += delta.text
        self._ended[delta.index] = delta.finish_reason is not None
        while self._shown < self._samples:
            text, self._kept[self._shown] = self._kept[self._shown], ""
            self._write(text)
            if not self._ended[self._shown]:
                break
            if not self._at_line_start:
                self._write("\n")
            self._shown += 1
            self._head()

    def end(self) -> None:
        """Nothing is held back: what is shown has ended its line."""

    def _head(self) -> None:
        if 1 < self._samples > self._shown:
            self._write(f"[{self._shown + 1} of {self._samples}]\n")

    def _write(self, text: str) -> None:
        if text:
            terminal.write(text)
            self._at_line_start = text.endswith("\n")


# A reply as JSON, and its log probabilities and speeds as lines.


def reply_json(reply: Reply | ChatReply, model: Tokenizer) -> dict[str, Any]:
    """Everything about a reply: of a chat also its reasoning and tool calls."""
    from perdure import ChatReply

    if not isinstance(reply, ChatReply):
        return _raw(reply, model)
    calls = [{"name": call.name, "arguments": call.arguments} for call in reply.tool_calls]
    return {
        **_raw(reply.raw, model),
        "text": reply.text,
        "reasoning": reply.reasoning,
        "tool_calls": calls,
        "finish_reason": reply.finish_reason,
    }


def logprob_line(entry: TokenLogprob, model: Tokenizer) -> str:
    chances = [(entry.token, entry.logprob), *((each.token, each.logprob) for each in entry.top)]
    first, *rest = (f"{_piece(token, model)!r} {logprob:.3f}" for token, logprob in chances)
    return first + (f"  of  {', '.join(rest)}" if rest else "")


def timing_line(reply: Reply) -> str:
    timings = reply.timings
    return (
        f"{timings.prefilled_tokens} tokens read in {timings.prefill:.2f} s ({timings.prefill_speed:.0f}/s), "
        f"{timings.decoded_tokens} written in {timings.decode:.2f} s ({timings.decode_speed:.1f}/s), "
        f"seed {reply.seed}, ended by {reply.finish_reason}{words.guesses(timings)}"
    )


def _raw(reply: Reply, model: Tokenizer) -> dict[str, Any]:
    usage, timings = reply.usage, reply.timings
    return {
        "text": reply.text,
        "tokens": list(reply.tokens),
        "finish_reason": reply.finish_reason,
        "stop": reply.stop,
        "seed": reply.seed,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings": {
            "queued": timings.queued,
            "prefill": timings.prefill,
            "decode": timings.decode,
            "prefill_speed": timings.prefill_speed,
            "decode_speed": timings.decode_speed,
            "forced_tokens": timings.forced_tokens,
            "drafted_tokens": timings.drafted_tokens,
            "accepted_tokens": timings.accepted_tokens,
            "gain": timings.gain,
        },
        "logprobs": None
        if reply.logprobs is None
        else [
            _chance(entry.token, entry.logprob, model)
            | {"top": [_chance(each.token, each.logprob, model) for each in entry.top]}
            for entry in reply.logprobs
        ],
    }


def _chance(token: int, logprob: float, model: Tokenizer) -> dict[str, Any]:
    # JSON has no word for infinity.
    known = logprob if math.isfinite(logprob) else None
    return {"token": token, "text": _piece(token, model), "logprob": known}


def _piece(token: int, model: Tokenizer) -> str:
    return model.piece(token, special=True).decode("utf-8", "replace")
