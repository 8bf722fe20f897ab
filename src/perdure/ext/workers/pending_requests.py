"""Requests and calls that the engine has not answered yet."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from perdure import (
    BusyError,
    ClosedError,
    Delta,
    EngineDiedError,
    InvalidInputError,
    Reply,
    ReuseReport,
    Timings,
    TokenLogprob,
    Usage,
)
from perdure.ext.workers.connection import Connection, pack
from perdure.ext.workers.process import ExitInfo
from perdure.ext.workers.protocol import (
    EVENTS,
    Answer,
    Call,
    Cancel,
    PlainDelta,
    Pulse,
    RequestId,
    StepOutput,
    Submit,
    Target,
    Watch,
)
from perdure.spi.decode import FinishReason
from perdure.spi.runtime import NAP, Canceller, EmbeddingFuture, Ended, EventHub, OutputQueue, Request, notify

TRIES = 2
"""How often anything is asked at most: what the engine dies of must not kill it for ever."""
_SLACK = 2.0
"""Seconds past its time after which a request is ended here, if the engine does not get to it."""


@dataclass(slots=True)
class Sample:
    """What has been delivered of one sample."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class PendingRequest(OutputQueue):
    """The output queue of a request that another process answers, over all its tries.

    Always holds: it is finished once; what was pushed is in the replies, whichever thread finishes it; once a
    reader could have seen a part of it, it is not tried again. Only the thread that reads from the engine's
    process delivers and ends it, so nobody holds a lock while a reader's queue is touched. Text that was held
    back in a process that died, such as half a character, is lost with it; its tokens are not.
    """

    def __init__(self, id_: RequestId, request: Request, canceller: Canceller, events: EventHub) -> None:
        super().__init__(len(request.prompt), canceller)
        self.id = id_
        self._events = events
        # Seeded here, so that a second try draws as the first did, and a reply cut short can tell.
        self.request = replace(request, sampling=request.sampling.seeded())
        self.tries = 0
        self.submitted = time.monotonic()
        self.deadline = request.ends_at(self.submitted)
        self._first: float | None = None
        self._delivered: list[PlainDelta] = []
        self._acknowledging = threading.Lock()
        self._acknowledged = threading.Event()
        self.refusal: Exception | None = None
        """Why the engine did not take it."""

    @property
    def delivered(self) -> bool:
        return self._first is not None

    def overdue(self, slack: float = 0.0) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline + slack

    def message(self) -> Submit:
        """What is sent for it, with what is left of its time."""
        if self.deadline is None:
            return Submit(self.id, self.request)
        left = max(1e-3, self.deadline - time.monotonic())
        return Submit(self.id, replace(self.request, timeout=left, deadline=None))

    # Whether it was taken.

    def acknowledge(self, refusal: Exception | None = None) -> None:
        """The engine has taken or refused it, or nobody can say for now; after the first call, a refusal ends
        the request."""
        with self._acknowledging:
            late = self._acknowledged.is_set()
            if not late:
                self.refusal = refusal
                self._acknowledged.set()
        if late and refusal is not None:
            self.fail(refusal)

    def wait_acknowledged(self, patience: float) -> None:
        """Wait for `acknowledge`, or so long. In short naps: Python may miss a Ctrl-C as a wait begins."""
        end = time.monotonic() + patience
        while not self._acknowledged.wait(NAP) and time.monotonic() < end:
            pass
        self.acknowledge()

    # What comes of it.

    def deliver(self, deltas: Sequence[PlainDelta]) -> bool:
        """Push what came of it, as `OutputQueue.push` does."""
        if self._first is None:
            self._first = time.monotonic()
        # At every token, which mostly brings one: they are sorted only where a process dies of them.
        self._delivered += deltas
        return self.push([Delta(*deltas[0])] if len(deltas) == 1 else [Delta(*plain) for plain in deltas])

    def end_cancelled(self) -> None:
        """End it here, as cancelled."""
        self._end("cancelled", None)

    def fail(self, error: Exception) -> None:
        self._end("error", error)

    def fail_by_exit(self, info: ExitInfo, *, again: bool) -> None:
        """End it by the exit of the process that worked on it."""
        delivered = sum(len(tokens) for _, tokens, _, _, _ in self._delivered)
        if delivered:
            what = f"{delivered} tokens of the reply had come, the rest is lost"
        elif again:
            what = f"nothing of this request had come, in {self.tries} tries: it may make the engine die"
        else:
            what = "nothing of this request had come"
        message = f"{info.reason}; {what}"
        self.fail(EngineDiedError(message, signal=info.signal, code=info.code, kept=delivered))

    def _end(self, reason: FinishReason, error: Exception | None) -> None:
        if self.finished:
            return
        samples = self._samples()
        for index, sample in enumerate(samples):
            if sample.finish_reason is None:
                self.push([Delta(index=index, finish_reason=reason)])
        replies = [self._reply(sample, at, reason, error) for at, sample in enumerate(samples)]
        if self._events.on:
            self._emit_ended(replies)
        self.finish(replies)

    def _emit_ended(self, replies: Sequence[Reply]) -> None:
        """Emit the end that the engine could not report."""
        for at, reply in enumerate(replies):
            error = None if reply.error is None else f"{type(reply.error).__name__}: {reply.error}"
            usage, timings = reply.usage, reply.timings
            self._events.emit(
                Ended,
                self.request.event_id,
                at,
                reply.finish_reason,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                timings.queued,
                timings.prefill,
                timings.decode,
                error,
                at == len(replies) - 1,
            )

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
            reuse=ReuseReport(computed=prompt, why="the engine's process died before its report"),
            seed=self.request.sampling.seeded(index).seed or 0,
            index=index,
            logprobs=None if self.request.logprobs is None else tuple(sample.logprobs),
            error=error if cut_short else None,
        )


class PendingCall:
    """A call on its way, over all its tries."""

    def __init__(self, call: Call, answer: Future[Any]) -> None:
        self.call = call
        self.tries = 0
        self.answer = answer
        self.asked = time.monotonic()

    def resolve(self, value: Any = None, error: Exception | None = None) -> None:
        # The caller may have given up just now.
        with suppress(InvalidStateError):
            if error is None:
                self.answer.set_result(value)
            else:
                self.answer.set_exception(error)


class PendingRequests:
    """Requests and calls, whether or not there is an engine just now.

    Always holds: each is asked at most twice, and again only if nothing of it had come; each ends. Anyone
    may ask and cancel, and neither waits for a reader; one thread at a time, which also reads what the engine
    says, connects, disconnects and delivers.
    """

    def __init__(self, queue: int) -> None:
        self.events = EventHub(self._watch)
        """What happens in the engine's process, for subscribers here."""
        self._queue = queue
        self._slots = 1
        self._changing = threading.Lock()
        """Of what is asked, and whom. Requests and calls that end are dropped without it, at any time: who
        goes through them takes a copy."""
        self._ids = itertools.count(1)
        self._requests: dict[RequestId, PendingRequest] = {}
        self._calls: dict[RequestId, PendingCall] = {}
        self._connection: Connection | None = None
        self._others: Callable[[Any], None] = lambda message: None
        self._leaving = False
        self._shut = False
        self._watching = False
        self.heard = 0.0
        """When the engine's thread last said something."""
        self.failures: Mapping[str, int] = {}
        """How often threads of the engine's process failed, by their names."""
        self.computed = False
        """Whether anything was ever computed for a request."""

    # For callers, in any thread.

    def submit(self, request: Request) -> PendingRequest:
        """Ask for a reply. While there is no engine it waits here, if there is room."""
        pending = PendingRequest(self._next_id(), request, self, self.events)
        data = packed(pending.message())
        with self._changing:
            self._check_open()
            if self._connection is None or self._leaving:
                # Of the requests that wait here, some will find a free sequence at once.
                waiting, limit = self._unfinished(), self._queue + self._slots
                if waiting >= limit:
                    raise BusyError(
                        f"{waiting} requests wait for the engine to start, {limit} may; try again later",
                        waiting=waiting,
                        limit=limit,
                    )
                pending.acknowledge()
            self._requests[pending.id] = pending
            if self._connection is not None and not self._leaving:
                self._send(self._connection, pending, data)
        return pending

    def cancel(self, output: PendingRequest) -> None:
        """Takes no lock: the garbage collector calls this for streams that were dropped, anywhere."""
        connection = self._connection
        if connection is not None and not output.finished:
            connection.send(Cancel(output.id))

    def ask(
        self,
        target: Target,
        name: str,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
        answer: Future[Any] | None = None,
    ) -> Future[Any]:
        """Call a method of something in the engine's process, once there is one. The result comes in
        `answer`, or else in a new future.

        To cancel what it gives is to withdraw the call.
        """
        answer = Future() if answer is None else answer
        call = PendingCall(Call(self._next_id(), target, name, args, keywords), answer)
        call.answer.add_done_callback(lambda answer: self._withdraw(call, answer))
        data = packed(call.call)
        with self._changing:
            self._check_open()
            self._calls[call.call.id] = call
            if self._connection is not None and not self._leaving:
                call.tries += 1
                self._connection.send_packed(data)
        return call.answer

    def _withdraw(self, call: PendingCall, answer: Future[Any]) -> None:
        if answer.cancelled():
            self._drop(call.call.id)
            if (connection := self._connection) is not None:
                connection.send(Cancel(call.call.id))

    @property
    def load(self) -> tuple[int, int]:
        """Requests waiting, and being served, as far as this side can tell."""
        unfinished = self._unfinished()
        served = 0 if self._connection is None else min(unfinished, self._slots)
        return unfinished - served, served

    def shut(self) -> None:
        """Take nothing more."""
        with self._changing:
            self._shut = True

    # For the thread that reads.

    @property
    def engine_works(self) -> bool:
        """Whether the engine thread has work, so that a step may keep it silent for long."""
        calls = list(self._calls.values())
        return bool(self._requests) or any(call.call.target in ("cache", "backend") for call in calls)

    @property
    def silence(self) -> float:
        """Seconds since the engine's thread last said something. It has a pulse, also while it is idle."""
        return time.monotonic() - self.heard

    def connect(self, connection: Connection, slots: int, others: Callable[[Any], None]) -> None:
        """An engine is there: ask it all that waits, in the order in which it came. `others` gets its
        messages that are not about requests and calls."""
        self._others = others
        self.heard = time.monotonic()
        with self._changing:
            self._connection = connection
            if self._watching:
                connection.send(Watch(True))
            self._leaving = False
            self._slots = slots
            for pending in list(self._requests.values()):
                self._send(connection, pending, pack(pending.message()))
            for call in list(self._calls.values()):
                call.tries += 1
                connection.send(call.call)

    def pause(self) -> None:
        """The engine finishes what it has and takes nothing more: the rest waits for the next one."""
        with self._changing:
            self._leaving = True

    def pause_idle(self) -> bool:
        """The same, if nothing is asked just now; whether that is so."""
        with self._changing:
            if self._connection is None or self._unfinished() or self._calls:
                return False
            self._leaving = True
            return True

    @property
    def waiting(self) -> bool:
        """Whether anything is asked that has no answer yet."""
        return bool(self._unfinished() or self._calls)

    def disconnect(self, info: ExitInfo) -> None:
        """The engine is gone. What it did not get to show is asked again, once; the rest ends. One that has
        said that it was leaving did not die of anything that it was asked."""
        with self._changing:
            self._connection = None
            requests, calls = list(self._requests.values()), list(self._calls.values())
            if self._leaving:
                self._leaving = False
                for pending in requests:
                    pending.tries = 0
                for call in calls:
                    call.tries = 0
        for pending in requests:
            pending.acknowledge()
            again = pending.tries >= TRIES
            if pending.cancelled:
                pending.end_cancelled()
            elif pending.delivered or again:
                pending.fail_by_exit(info, again=again)
        for call in calls:
            if call.tries >= TRIES:
                message = f"{info.reason} twice during {call.call.target}.{call.call.name}"
                call.resolve(error=EngineDiedError(message, signal=info.signal, code=info.code))
        self._sweep()

    def handle(self, messages: Iterable[Any]) -> None:
        """Handle the engine's messages. Readers are notified once of all that came together."""
        changed: list[OutputQueue] = []
        try:
            for message in messages:
                # Most are what a step brought.
                if isinstance(message, list):
                    self.heard = time.monotonic()
                    self._deliver(message, changed)
                elif isinstance(message, Answer):
                    self._answered(message)
                elif isinstance(message, Pulse):
                    self.heard = time.monotonic()
                    self.failures = message.failures
                    self._progress(message.read)
                else:
                    self._others(message)
        finally:
            if changed:
                notify(changed)

    def _watch(self, enabled: bool) -> None:
        """Say whether a subscriber here wants all events."""
        with self._changing:
            self._watching = enabled
            if self._connection is not None:
                self._connection.send(Watch(enabled))

    def _answered(self, answer: Answer) -> None:
        pending, call = self._requests.get(answer.id), self._calls.get(answer.id)
        if pending is not None:
            if answer.error is not None:
                self._drop(answer.id)
            pending.acknowledge(answer.error)
        elif call is not None:
            self._drop(answer.id)
            call.resolve(answer.value, answer.error)

    def _deliver(self, output: StepOutput, changed: list[OutputQueue]) -> None:
        for id_, deltas, replies in output:
            if id_ == EVENTS:
                self.events.hand_on_all(cast(Any, deltas), cast(Any, replies))
                continue
            pending = self._requests.get(id_)
            if pending is None:
                continue
            if deltas:
                self.computed = True
                if not pending.deliver(deltas):
                    changed.append(pending)
            if replies is not None:
                self._drop(id_)
                pending.finish(list(replies))

    def _progress(self, read: Mapping[RequestId, int]) -> None:
        """How much of their prompts requests have read."""
        self.computed = self.computed or bool(read)
        for id_, count in read.items():
            if (pending := self._requests.get(id_)) is not None:
                pending.read = count
            elif (call := self._calls.get(id_)) is not None and isinstance(call.answer, EmbeddingFuture):
                call.answer.tokens_read = count

    def end_unanswered(self, seconds: float, error: Callable[[], Exception]) -> None:
        """End calls of the tokenizer that wait for an engine's process which has said nothing for so long.
        They need no step of the engine, so nothing that it does keeps them waiting."""
        now = time.monotonic()
        if now - self.heard < seconds:
            return
        with self._changing:
            calls = [] if self._connection is None else list(self._calls.values())
        for call in calls:
            if call.call.target in ("model", "tables") and now - call.asked > seconds:
                call.resolve(error=error())
        self._sweep()

    def end_overdue(self) -> None:
        """End requests whose time is up, and those that were cancelled while the engine was gone."""
        with self._changing:
            requests, connection = list(self._requests.values()), self._connection
        for pending in requests:
            if connection is None and pending.cancelled:
                pending.end_cancelled()
            elif pending.overdue(_SLACK if connection is not None else 0.0):
                pending.cancel()
                pending.end_cancelled()
        self._sweep()

    def end_all(self, error: Exception | None) -> None:
        """End everything by `error`, or as cancelled."""
        with self._changing:
            self._connection = None
            requests, calls = list(self._requests.values()), list(self._calls.values())
        for pending in requests:
            pending.acknowledge()
            if error is None or pending.cancelled:
                pending.end_cancelled()
            else:
                pending.fail(error)
        for call in calls:
            call.resolve(error=error or ClosedError("this runtime is closed"))
        self._sweep()

    # Inside.

    def _next_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def _unfinished(self) -> int:
        return sum(not pending.finished for pending in list(self._requests.values()))

    def _check_open(self) -> None:
        if self._shut:
            raise ClosedError("this runtime is closed")

    def _send(self, connection: Connection, pending: PendingRequest, data: bytes) -> None:
        pending.tries += 1
        connection.send_packed(data)
        # A cancel that came before the request itself was nobody's.
        if pending.cancelled:
            connection.send(Cancel(pending.id))

    def _drop(self, id_: RequestId) -> None:
        """Takes no lock: on the event loop, which would wait for dozens of threads that ask just now."""
        self._requests.pop(id_, None)
        self._calls.pop(id_, None)

    def _sweep(self) -> None:
        for pending in list(self._requests.values()):
            if pending.finished:
                self._drop(pending.id)
        for call in list(self._calls.values()):
            if call.answer.done():
                self._drop(call.call.id)


def packed(message: object) -> bytes:
    """A message as it travels; a caller's value that cannot is refused."""
    try:
        return pack(message)
    except Exception as error:
        raise InvalidInputError(
            f"the engine is in a separate process, and this cannot be sent there: {error}; "
            "give plain data, or open the runtime without isolated"
        ) from None
