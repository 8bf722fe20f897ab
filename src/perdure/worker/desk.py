"""Everything that was asked of the engine and is not answered yet."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from perdure.decode.output_queue import notify
from perdure.decode.request import Request
from perdure.errors import BusyError, ClosedError, EngineDiedError, InvalidInputError
from perdure.worker.flight import Flight
from perdure.worker.messages import Answer, AskId, Call, Cancel, News, Target
from perdure.worker.process import Death
from perdure.worker.wire import Wire, pack

TRIES = 2
"""How often anything is asked at most: what the engine dies of must not kill it for ever."""
_SLACK = 2.0
"""Seconds past its time after which a request is ended here, if the engine does not get to it."""


class Question:
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


class Desk:
    """Requests and calls, whether or not there is an engine just now.

    Always holds: each is asked at most twice, and again only if nothing of it had come; each ends. Anyone
    may ask and cancel, and neither waits for a reader; one thread, which also reads what the engine says,
    connects, disconnects and delivers.
    """

    def __init__(self, queue: int) -> None:
        self._queue = queue
        self._slots = 1
        self._changing = threading.Lock()
        self._ids = itertools.count(1)
        self._flights: dict[AskId, Flight] = {}
        self._questions: dict[AskId, Question] = {}
        self._wire: Wire | None = None
        self._shut = False

    # For those who ask, in any thread.

    def submit(self, request: Request) -> Flight:
        """Ask for a reply. While there is no engine it waits here, if there is room."""
        flight = Flight(self._next(), request)
        data = packed(flight.message())
        with self._changing:
            self._check_open()
            if self._wire is None:
                # Of those who wait here, some will find a free sequence at once.
                waiting, limit = self._unfinished(), self._queue + self._slots
                if waiting >= limit:
                    raise BusyError(
                        f"{waiting} requests wait for the engine to start, {limit} may; try again later",
                        waiting=waiting,
                        limit=limit,
                    )
                flight.settle()
            self._flights[flight.id] = flight
            if self._wire is not None:
                self._send(self._wire, flight, data)
        return flight

    def cancel(self, flight: Flight) -> None:
        """Takes no lock: the garbage collector calls this for jobs that were dropped, anywhere."""
        flight.cancelled = True
        wire = self._wire
        if wire is not None and not flight.finished:
            wire.send(Cancel(flight.id))

    def ask(
        self, target: Target, name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Future[Any]:
        """Call a method of something in the engine's process, once there is one.

        To cancel what it gives is to withdraw the question.
        """
        question = Question(Call(self._next(), target, name, args, keywords))
        question.answer.add_done_callback(lambda answer: self._withdraw(question, answer))
        data = packed(question.call)
        with self._changing:
            self._check_open()
            self._questions[question.call.id] = question
            if self._wire is not None:
                question.tries += 1
                self._wire.send_packed(data)
        return question.answer

    def _withdraw(self, question: Question, answer: Future[Any]) -> None:
        if answer.cancelled():
            self._drop(question.call.id)
            if (wire := self._wire) is not None:
                wire.send(Cancel(question.call.id))

    @property
    def load(self) -> tuple[int, int]:
        """Requests waiting, and being served, as far as this side can tell."""
        with self._changing:
            unfinished = self._unfinished()
            served = 0 if self._wire is None else min(unfinished, self._slots)
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
            return bool(self._flights) or any(
                question.call.target in ("cache", "backend") for question in self._questions.values()
            )

    def connect(self, wire: Wire, slots: int) -> None:
        """An engine is there: ask it all that waits, in the order in which it came."""
        with self._changing:
            self._wire = wire
            self._slots = slots
            for flight in self._flights.values():
                self._send(wire, flight, pack(flight.message()))
            for question in self._questions.values():
                question.tries += 1
                wire.send(question.call)

    def disconnect(self, death: Death) -> None:
        """The engine is gone. What it did not get to show is asked again, once; the rest ends."""
        with self._changing:
            self._wire = None
            flights, questions = list(self._flights.values()), list(self._questions.values())
        for flight in flights:
            flight.settle()
            again = flight.tries >= TRIES
            if flight.cancelled:
                flight.cancel()
            elif flight.delivered or again:
                flight.die(death, again=again)
        for question in questions:
            if question.tries >= TRIES:
                message = f"{death.reason} twice during {question.call.target}.{question.call.name}"
                question.settle(error=EngineDiedError(message, signal=death.signal, code=death.code))
        self._sweep()

    def answered(self, answer: Answer) -> None:
        flight, question = self._flights.get(answer.id), self._questions.get(answer.id)
        if flight is not None:
            if answer.error is not None:
                self._drop(answer.id)
            flight.settle(answer.error)
        elif question is not None:
            self._drop(answer.id)
            question.settle(answer.value, answer.error)

    def deliver(self, news: News) -> None:
        changed = []
        for id_, deltas, replies in news.items:
            flight = self._flights.get(id_)
            if flight is None:
                continue
            if deltas:
                flight.deliver(deltas)
                changed.append(flight.output)
            if replies is not None:
                self._drop(id_)
                flight.finish(replies)
        notify(changed)

    def end_overdue(self) -> None:
        """End whose time is up though the engine did not see to it, and who gave up while it was gone."""
        with self._changing:
            flights, wire = list(self._flights.values()), self._wire
        for flight in flights:
            if wire is None and flight.cancelled:
                flight.cancel()
            elif flight.overdue(_SLACK if wire is not None else 0.0):
                self.cancel(flight)
                flight.cancel()
        self._sweep()

    def end_all(self, error: Exception | None) -> None:
        """End everything by `error`, or as cancelled."""
        with self._changing:
            self._wire = None
            flights, questions = list(self._flights.values()), list(self._questions.values())
        for flight in flights:
            flight.settle()
            if error is None or flight.cancelled:
                flight.cancel()
            else:
                flight.fail(error)
        for question in questions:
            question.settle(error=error or ClosedError("this runtime is closed"))
        self._sweep()

    # Inside.

    def _next(self) -> AskId:
        return AskId(next(self._ids))

    def _unfinished(self) -> int:
        return sum(not flight.finished for flight in self._flights.values())

    def _check_open(self) -> None:
        if self._shut:
            raise ClosedError("this runtime is closed")

    def _send(self, wire: Wire, flight: Flight, data: bytes) -> None:
        flight.tries += 1
        wire.send_packed(data)
        # A cancel that came before the request itself was nobody's.
        if flight.cancelled:
            wire.send(Cancel(flight.id))

    def _drop(self, id_: AskId) -> None:
        with self._changing:
            self._flights.pop(id_, None)
            self._questions.pop(id_, None)

    def _sweep(self) -> None:
        with self._changing:
            self._flights = {id_: each for id_, each in self._flights.items() if not each.finished}
            self._questions = {id_: each for id_, each in self._questions.items() if not each.answer.done()}


def packed(message: object) -> bytes:
    """A message as it travels; a caller's value that cannot is refused."""
    try:
        return pack(message)
    except Exception as error:
        raise InvalidInputError(
            f"the engine is in a process of its own, and this cannot be sent there: {error}; "
            "give plain data, or open the runtime without isolated"
        ) from None
