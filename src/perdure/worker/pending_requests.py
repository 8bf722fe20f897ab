"""Everything that was asked of the engine and is not answered yet."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from perdure.decode.output_queue import OutputQueue, notify
from perdure.decode.request import Request
from perdure.errors import BusyError, ClosedError, EngineDiedError, InvalidInputError
from perdure.worker.connection import Connection, pack
from perdure.worker.pending_request import PendingRequest
from perdure.worker.process import Death
from perdure.worker.protocol import Answer, Call, Cancel, Pulse, RequestId, StepOutput, Target

TRIES = 2
"""How often anything is asked at most: what the engine dies of must not kill it for ever."""
_SLACK = 2.0
"""Seconds past its time after which a request is ended here, if the engine does not get to it."""


class PendingCall:
    """A call on its way, over all its tries."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.tries = 0
        self.answer: Future[Any] = Future()

    def settle(self, value: Any = None, error: Exception | None = None) -> None:
        # Whoever asked may have given up just now.
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
        self._queue = queue
        self._slots = 1
        self._changing = threading.Lock()
        self._ids = itertools.count(1)
        self._requests: dict[RequestId, PendingRequest] = {}
        self._calls: dict[RequestId, PendingCall] = {}
        self._connection: Connection | None = None
        self._others: Callable[[Any], None] = lambda message: None
        self._leaving = False
        self._shut = False
        self.heard = 0.0
        """When the engine's thread last said something."""

    # For those who ask, in any thread.

    def submit(self, request: Request) -> PendingRequest:
        """Ask for a reply. While there is no engine it waits here, if there is room."""
        pending = PendingRequest(self._next(), request)
        data = packed(pending.message())
        with self._changing:
            self._check_open()
            if self._connection is None or self._leaving:
                # Of those who wait here, some will find a free sequence at once.
                waiting, limit = self._unfinished(), self._queue + self._slots
                if waiting >= limit:
                    raise BusyError(
                        f"{waiting} requests wait for the engine to start, {limit} may; try again later",
                        waiting=waiting,
                        limit=limit,
                    )
                pending.settle()
            self._requests[pending.id] = pending
            if self._connection is not None and not self._leaving:
                self._send(self._connection, pending, data)
        return pending

    def cancel(self, pending: PendingRequest) -> None:
        """Takes no lock: the garbage collector calls this for jobs that were dropped, anywhere."""
        pending.cancelled = True
        connection = self._connection
        if connection is not None and not pending.finished:
            connection.send(Cancel(pending.id))

    def ask(
        self, target: Target, name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Future[Any]:
        """Call a method of something in the engine's process, once there is one.

        To cancel what it gives is to withdraw the call.
        """
        call = PendingCall(Call(self._next(), target, name, args, keywords))
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
        with self._changing:
            unfinished = self._unfinished()
            served = 0 if self._connection is None else min(unfinished, self._slots)
            return unfinished - served, served

    def shut(self) -> None:
        """Take nothing more."""
        with self._changing:
            self._shut = True

    # For the thread that reads.

    @property
    def busy(self) -> bool:
        """Whether the engine thread has work."""
        with self._changing:
            return bool(self._requests) or any(
                call.call.target in ("cache", "backend") for call in self._calls.values()
            )

    def connect(self, connection: Connection, slots: int, others: Callable[[Any], None]) -> None:
        """An engine is there: ask it all that waits, in the order in which it came. `others` is told what it
        says that is not about requests and calls."""
        self._others = others
        self.heard = time.monotonic()
        with self._changing:
            self._connection = connection
            self._leaving = False
            self._slots = slots
            for pending in self._requests.values():
                self._send(connection, pending, pack(pending.message()))
            for call in self._calls.values():
                call.tries += 1
                connection.send(call.call)

    def pause(self) -> None:
        """The engine finishes what it has and takes nothing more: the rest waits for the next one."""
        with self._changing:
            self._leaving = True

    def disconnect(self, death: Death) -> None:
        """The engine is gone. What it did not get to show is asked again, once; the rest ends. One that has
        said that it was leaving did not die of anything that it was asked."""
        with self._changing:
            self._connection = None
            if self._leaving:
                self._leaving = False
                for pending in self._requests.values():
                    pending.tries = 0
                for call in self._calls.values():
                    call.tries = 0
            requests, calls = list(self._requests.values()), list(self._calls.values())
        for pending in requests:
            pending.settle()
            again = pending.tries >= TRIES
            if pending.cancelled:
                pending.cancel()
            elif pending.delivered or again:
                pending.die(death, again=again)
        for call in calls:
            if call.tries >= TRIES:
                message = f"{death.reason} twice during {call.call.target}.{call.call.name}"
                call.settle(error=EngineDiedError(message, signal=death.signal, code=death.code))
        self._sweep()

    def handle(self, messages: Iterable[Any]) -> None:
        """Do what the engine says. Readers are told once of all that came together."""
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
                    self._progress(message.read)
                else:
                    self._others(message)
        finally:
            if changed:
                notify(changed)

    def _answered(self, answer: Answer) -> None:
        pending, call = self._requests.get(answer.id), self._calls.get(answer.id)
        if pending is not None:
            if answer.error is not None:
                self._drop(answer.id)
            pending.settle(answer.error)
        elif call is not None:
            self._drop(answer.id)
            call.settle(answer.value, answer.error)

    def _deliver(self, output: StepOutput, changed: list[OutputQueue]) -> None:
        for id_, deltas, replies in output:
            pending = self._requests.get(id_)
            if pending is None:
                continue
            if deltas and not pending.deliver(deltas):
                changed.append(pending.output)
            if replies is not None:
                self._drop(id_)
                pending.finish(replies)

    def _progress(self, read: Mapping[RequestId, int]) -> None:
        """How much of their prompts requests have read."""
        for id_, count in read.items():
            if (pending := self._requests.get(id_)) is not None:
                pending.output.read = count

    def end_overdue(self) -> None:
        """End whose time is up though the engine did not see to it, and who gave up while it was gone."""
        with self._changing:
            requests, connection = list(self._requests.values()), self._connection
        for pending in requests:
            if connection is None and pending.cancelled:
                pending.cancel()
            elif pending.overdue(_SLACK if connection is not None else 0.0):
                self.cancel(pending)
                pending.cancel()
        self._sweep()

    def end_all(self, error: Exception | None) -> None:
        """End everything by `error`, or as cancelled."""
        with self._changing:
            self._connection = None
            requests, calls = list(self._requests.values()), list(self._calls.values())
        for pending in requests:
            pending.settle()
            if error is None or pending.cancelled:
                pending.cancel()
            else:
                pending.fail(error)
        for call in calls:
            call.settle(error=error or ClosedError("this runtime is closed"))
        self._sweep()

    # Inside.

    def _next(self) -> RequestId:
        return RequestId(next(self._ids))

    def _unfinished(self) -> int:
        return sum(not pending.finished for pending in self._requests.values())

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
        with self._changing:
            self._requests.pop(id_, None)
            self._calls.pop(id_, None)

    def _sweep(self) -> None:
        with self._changing:
            self._requests = {id_: each for id_, each in self._requests.items() if not each.finished}
            self._calls = {id_: each for id_, each in self._calls.items() if not each.answer.done()}


def packed(message: object) -> bytes:
    """A message as it travels; a caller's value that cannot is refused."""
    try:
        return pack(message)
    except Exception as error:
        raise InvalidInputError(
            f"the engine is in a process of its own, and this cannot be sent there: {error}; "
            "give plain data, or open the runtime without isolated"
        ) from None
