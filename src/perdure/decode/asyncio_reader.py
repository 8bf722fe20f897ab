"""Readers of output queues in an event loop: waiters that are woken together, and a reader by calls."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Sequence

from perdure.decode.output_queue import OutputQueue
from perdure.decode.request import Delta

log = logging.getLogger("perdure.decode")


class AsyncioListener:
    """The waiters in one event loop: each is called there, and one call reaches all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Weak: the table of listeners must not keep loops alive.
        self._loop = weakref.ref(loop)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> AsyncioListener:
        """The one listener of a loop, so that one call serves all waiters there."""
        listener = _listeners.get(loop)
        return listener if listener is not None else _listeners.setdefault(loop, cls(loop))

    def notify(self, waiters: Sequence[Callable[[], None]]) -> None:
        loop = self._loop()
        if loop is not None and asyncio._get_running_loop() is loop:
            _call(waiters)
        elif loop is not None:
            # One that is closed has nobody left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_call, waiters)


_listeners: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncioListener] = (
    weakref.WeakKeyDictionary()
)


class DirectReader:
    """Reads one output queue in an event loop, by calls: no task is woken for a token.

    It ends when `push` gives False, which is the result, or raises; and when all was read.
    """

    def __init__(self, output: OutputQueue, push: Callable[[Sequence[Delta]], bool]) -> None:
        self._output = output
        self._push = push
        self._loop = asyncio.get_running_loop()
        self._listener = AsyncioListener.of(self._loop)
        self.ended: asyncio.Future[bool] = self._loop.create_future()
        """Whether all was read."""

    def push(self, deltas: Sequence[Delta]) -> bool:
        """Read what was never in the queue. False where this is not the event loop, or it has ended."""
        # The waiting task may have been cancelled meanwhile.
        if asyncio._get_running_loop() is not self._loop or self.ended.done():
            return False
        try:
            if not self._push(deltas):
                self.ended.set_result(False)
        except Exception as error:
            self.ended.set_exception(error)
        return True

    def poll(self) -> None:
        """Read what is in the queue, and listen for more; called in the event loop."""
        output = self._output
        while not self.ended.done():
            with output.lock:
                deltas = list(output.deltas)
                output.deltas.clear()
                if not deltas and not output.finished:
                    output.listen(self._listener, self.poll)
                    return
            if deltas:
                self.push(deltas)
            else:
                self.ended.set_result(True)


async def pushed(output: OutputQueue, push: Callable[[Sequence[Delta]], bool]) -> bool:
    """Whether all of a queue was read by calls of `push`."""
    reader = DirectReader(output, push)
    with output.read_by(reader):
        reader.poll()
        return await reader.ended


def _call(waiters: Sequence[Callable[[], None]]) -> None:
    for waiter in waiters:
        try:
            waiter()
        except Exception:
            log.exception("a reader could not be notified of its reply")


def resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def wait_end(output: OutputQueue) -> None:
    """Have this task wait for the end of a queue."""
    with output.lock:
        if output.finished:
            return
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        output.listen(AsyncioListener.of(loop), functools.partial(resolve, waiter), finish=True)
    await waiter
