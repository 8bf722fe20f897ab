"""One request on its way, over all its tries."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from perdure.decode.output_queue import OutputQueue
from perdure.decode.request import Delta, FinishReason, Reply, Request, Timings, TokenLogprob, Usage
from perdure.decode.slots import ReuseReport
from perdure.errors import EngineDiedError
from perdure.worker.process import Death
from perdure.worker.protocol import PlainDelta, RequestId, Submit

_NAP = 0.2


@dataclass(slots=True)
class Sample:
    """What has been delivered of one sample."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class PendingRequest:
    """A request, its reader's output queue, and what has come of it.

    Always holds: it is finished once; what was put into the output queue is in the replies, whoever finishes
    it; once a reader could have seen a part of it, it is not tried again. Only the thread that reads from the
    engine's process delivers and ends it, so nobody holds a lock while a reader's queue is touched. Text
    that was held back in a process that died, such as half a character, is lost with it; its tokens are not.
    """

    def __init__(self, id_: RequestId, request: Request) -> None:
        self.id = id_
        # Settled here, so that a second try draws as the first did, and a reply cut short can tell.
        self.request = replace(request, sampling=request.sampling.seeded())
        self.output = OutputQueue()
        self.tries = 0
        self.cancelled = False
        self.submitted = time.monotonic()
        self.deadline = request.ends_at(self.submitted)
        self._first: float | None = None
        self._delivered: list[PlainDelta] = []
        self._settling = threading.Lock()
        self._settled = threading.Event()
        self.refusal: Exception | None = None

    @property
    def delivered(self) -> bool:
        return self._first is not None

    @property
    def finished(self) -> bool:
        return self.output.finished

    def overdue(self, slack: float = 0.0) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline + slack

    def message(self) -> Submit:
        """What is sent for it, with what is left of its time."""
        if self.deadline is None:
            return Submit(self.id, self.request)
        left = max(1e-3, self.deadline - time.monotonic())
        return Submit(self.id, replace(self.request, timeout=left, deadline=None))

    # Whether it was taken.

    def settle(self, refusal: Exception | None = None) -> None:
        """The engine has taken or refused it, or nobody can say for now; after the first word of this,
        a refusal ends the request."""
        with self._settling:
            late = self._settled.is_set()
            if not late:
                self.refusal = refusal
                self._settled.set()
        if late and refusal is not None:
            self.fail(refusal)

    def await_settled(self, patience: float) -> None:
        """Wait until `settle`, or so long. In short naps: Python may miss a Ctrl-C as a wait begins."""
        end = time.monotonic() + patience
        while not self._settled.wait(_NAP) and time.monotonic() < end:
            pass
        self.settle()

    # What comes of it.

    def deliver(self, deltas: Sequence[PlainDelta]) -> bool:
        """Hand deltas to whoever takes them here and now. False: they are in the output queue, and whoever
        delivers for all then notifies."""
        if self._first is None:
            self._first = time.monotonic()
        # At every token, which mostly brings one: they are sorted only where a process dies of them.
        self._delivered += deltas
        return self.output.hand(
            [Delta(*deltas[0])] if len(deltas) == 1 else [Delta(*plain) for plain in deltas]
        )

    def finish(self, replies: Sequence[Reply]) -> None:
        if not self.finished:
            self.output.finish(list(replies))

    def cancel(self) -> None:
        """End it here, as cancelled."""
        self._end("cancelled", None)

    def fail(self, error: Exception) -> None:
        self._end("error", error)

    def die(self, death: Death, *, again: bool) -> None:
        """End it by the death of the process that worked on it."""
        kept = sum(len(tokens) for _, tokens, _, _, _ in self._delivered)
        if kept:
            what = f"{kept} tokens of the reply had come, the rest is lost"
        elif again:
            what = (
                f"nothing of this request had come, in {self.tries} tries: it may be what the engine dies of"
            )
        else:
            what = "nothing of this request had come"
        message = f"{death.reason}; {what}"
        self.fail(EngineDiedError(message, signal=death.signal, code=death.code, kept=kept))

    def _end(self, reason: FinishReason, error: Exception | None) -> None:
        if self.finished:
            return
        samples = self._samples()
        for index, sample in enumerate(samples):
            if sample.finish_reason is None:
                self.output.put(Delta(index=index, finish_reason=reason))
        self.output.finish([self._reply(sample, at, reason, error) for at, sample in enumerate(samples)])

    def _samples(self) -> list[Sample]:
        """What has been delivered, by sample."""
        samples = [Sample() for _ in range(self.request.n)]
        for text, tokens, logprobs, index, reason in self._delivered:
            sample = samples[index]
            sample.text.append(text)
            sample.tokens.extend(tokens)
            sample.logprobs.extend(logprobs)
            sample.finish_reason = reason
        return samples

    def _reply(self, sample: Sample, index: int, reason: FinishReason, error: Exception | None) -> Reply:
        now = time.monotonic()
        first = self._first or now
        cut_short = sample.finish_reason is None
        prompt = len(self.request.prompt)
        return Reply(
            text="".join(sample.text),
            tokens=tuple(sample.tokens),
            finish_reason=reason if cut_short else sample.finish_reason or reason,
            usage=Usage(prompt_tokens=prompt, completion_tokens=len(sample.tokens)),
            timings=Timings(
                queued=first - self.submitted,
                prefill=0.0,
                decode=now - first,
                prefilled_tokens=prompt,
                decoded_tokens=len(sample.tokens),
            ),
            reuse=ReuseReport(computed=prompt, why="the engine's process did not live to tell"),
            seed=self.request.sampling.seeded(index).seed or 0,
            index=index,
            logprobs=None if self.request.logprobs is None else tuple(sample.logprobs),
            error=error if cut_short else None,
        )
