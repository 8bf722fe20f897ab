"""Who reads what the engine's process says: a thread, or an event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from perdure.ext.workers.connection import Connection
from perdure.ext.workers.message_reader import MessageReader

PATIENCE = 60.0


class Place:
    """Messages that were handled, and the thread that handled each."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        here, there = socket.socketpair()
        self.reader = MessageReader()
        self.other = Connection(there)
        self.connection = Connection(here)
        self.seen: list[tuple[int, Any]] = []
        self._came = threading.Condition()
        self.thread = threading.Thread(target=self._run)
        self.error: Exception | None = None

    def _run(self) -> None:
        try:
            self.reader.read_all(self.connection, self._handle, lambda: None, seconds=self._seconds)
        except Exception as error:
            self.error = error

    def _handle(self, messages: Iterable[Any]) -> None:
        for message in messages:
            if isinstance(message, Exception):
                raise message
            with self._came:
                self.seen.append((threading.get_ident(), message))
                self._came.notify_all()

    def await_message(self, message: Any) -> int:
        """The thread that handled it."""
        with self._came:
            assert self._came.wait_for(lambda: message in [each for _, each in self.seen], PATIENCE)
            return next(thread for thread, each in self.seen if each == message)


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(PATIENCE)
            loop.close()


@pytest.fixture(params=[0.01])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A connection that its thread looks at every so many seconds."""
    made = Place(request.param)
    made.thread.start()
    yield made
    made.other.close()
    made.thread.join(PATIENCE)
    assert not made.thread.is_alive()
    made.connection.close()


def in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], Any]) -> Any:
    async def called() -> Any:
        return call()

    return asyncio.run_coroutine_threadsafe(called(), loop).result(PATIENCE)


def until_read_by(place: Place, thread: int) -> None:
    """Say something until that thread is the one that hears it."""
    for number in range(10_000):
        place.other.send(("turn", number))
        if place.await_message(("turn", number)) == thread:
            return
    raise AssertionError("it never read")


def test_messages_are_handled_in_order_while_loop_and_thread_take_turns_w1(place: Place) -> None:
    """W1: nothing of a reply is lost, doubled or swapped, whoever reads."""
    with running_loop() as loop:
        for number in range(3000):
            place.other.send(number)
            if number % 500 == 100:
                place.reader.attach_loop(loop)
            elif number % 500 == 300:
                in_loop(loop, place.reader.detach_waiting_loop)
            elif number % 500 == 400:
                place.reader.attach_loop(None)
        place.await_message(2999)
        assert [message for _, message in place.seen] == list(range(3000))


@pytest.mark.parametrize("place", [PATIENCE], indirect=True)
def test_a_loop_that_waits_itself_leaves_the_reading_to_the_thread(place: Place) -> None:
    with running_loop() as loop:
        loop_thread = in_loop(loop, threading.get_ident)
        place.reader.attach_loop(loop)
        until_read_by(place, loop_thread)

        def ask() -> int:
            place.reader.detach_waiting_loop()
            place.other.send("answer")
            return place.await_message("answer")

        assert in_loop(loop, ask) == place.thread.ident
        until_read_by(place, loop_thread)
        place.reader.attach_loop(None)


def test_a_loop_that_is_stuck_loses_the_reading_to_the_thread(place: Place) -> None:
    with running_loop() as loop:
        place.reader.attach_loop(loop)
        until_read_by(place, in_loop(loop, threading.get_ident))
        go_on = threading.Event()
        loop.call_soon_threadsafe(go_on.wait, PATIENCE)
        place.other.send("news")
        assert place.await_message("news") == place.thread.ident
        go_on.set()


def test_a_loop_that_is_closed_leaves_the_reading_to_the_thread(place: Place) -> None:
    with running_loop() as loop:
        place.reader.attach_loop(loop)
        until_read_by(place, in_loop(loop, threading.get_ident))
    place.other.send("after")
    assert place.await_message("after") == place.thread.ident


def test_what_goes_wrong_in_the_loop_is_raised_where_the_connection_is_looked_after(place: Place) -> None:
    with running_loop() as loop:
        place.reader.attach_loop(loop)
        until_read_by(place, in_loop(loop, threading.get_ident))
        place.other.send(KeyError("not understood"))
        place.thread.join(PATIENCE)
        assert isinstance(place.error, KeyError)
