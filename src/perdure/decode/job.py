"""One request on its way: what has come of it so far, for whoever waits."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from perdure.decode.request import Delta, Reply

T = TypeVar("T")

Sleeper: TypeAlias = "tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]"
"""A reader in an event loop, and what ends its wait."""

_NAP = 0.2


class Outbox:
    """Between the engine thread, which never waits here, and readers, which may be slow or gone."""

    def __init__(self) -> None:
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        self.ended = threading.Condition(lock)
        self.deltas: deque[Delta] = deque()
        self.replies: list[Reply] = []
        self.finished = False
        self._sleepers: list[Sleeper] = []

    def put(self, delta: Delta) -> None:
        """Add a delta. Readers learn of it at the next `wake`."""
        with self.changed:
            self.deltas.append(delta)

    def wake(self) -> list[Sleeper]:
        """Tell readers what is new; those in event loops are returned, for `rouse`.

        Those who wait for the whole reply sleep on.
        """
        with self.changed:
            self.changed.notify_all()
            sleepers, self._sleepers = self._sleepers, []
        return sleepers

    def finish(self, replies: list[Reply]) -> None:
        with self.changed:
            self.replies = replies
            self.finished = True
            self.ended.notify_all()
        rouse(self.wake())

    def sleeper(self) -> asyncio.Future[None]:
        """A future that the next change ends; called with `changed` held."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._sleepers.append((loop, future))
        return future


def rouse(sleepers: Iterable[Sleeper]) -> None:
    """Wake readers in event loops: one call a loop, however many of them it has."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for loop, future in sleepers:
        loops.setdefault(loop, []).append(future)
    for loop, futures in loops.items():
        # A loop that is closed has nobody left to wake.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_end, futures)


def _waited(condition: threading.Condition, ready: Callable[[], Any], timeout: float | None = None) -> bool:
    """Wait until `ready`, in short naps: Python may miss a Ctrl-C that comes just as a wait begins."""
    end = math.inf if timeout is None else time.monotonic() + timeout
    while not condition.wait_for(ready, min(_NAP, end - time.monotonic())):
        if time.monotonic() >= end:
            return False
    return True


def result_of(answer: Future[T]) -> T:
    """What `answer` gives or raises, waited for in such naps."""
    while not answer.done():
        try:
            answer.exception(_NAP)
        except TimeoutError:
            continue
    return answer.result()


def _end(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class Job:
    """The caller's end of a request: iterate it for deltas, ask it for the reply, or cancel it.

    Dropping it cancels what is left of the request. An error of the request is raised where its result
    is asked for, or at the end of the iteration.
    """

    def __init__(self, outbox: Outbox, cancel: Callable[[], None]) -> None:
        self._outbox = outbox
        self._cancel = cancel

    @property
    def done(self) -> bool:
        return self._outbox.finished

    def cancel(self) -> None:
        """End the request within one step; its reply says `cancelled`."""
        self._cancel()

    def replies(self, timeout: float | None = None) -> list[Reply]:
        """All samples, once all are finished."""
        with self._outbox.ended:
            if not _waited(self._outbox.ended, lambda: self._outbox.finished, timeout):
                raise TimeoutError(f"no reply within {timeout} seconds")
        return self._result()

    def reply(self, timeout: float | None = None) -> Reply:
        """The only, or first, sample."""
        return self.replies(timeout)[0]

    async def areplies(self) -> list[Reply]:
        await self._until(lambda box: box.finished)
        return self._result()

    async def areply(self) -> Reply:
        return (await self.areplies())[0]

    def __iter__(self) -> Iterator[Delta]:
        box = self._outbox
        while True:
            with box.changed:
                _waited(box.changed, lambda: box.deltas or box.finished)
                if not box.deltas:
                    break
                delta = box.deltas.popleft()
            yield delta
        self._result()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        box = self._outbox
        while True:
            await self._until(lambda box: box.deltas or box.finished)
            with box.changed:
                # Another reader of the same job may have been faster.
                delta = box.deltas.popleft() if box.deltas else None
                over = box.finished
            if delta is not None:
                yield delta
            elif over:
                break
        self._result()

    async def _until(self, ready: Callable[[Outbox], Any]) -> None:
        while True:
            with self._outbox.changed:
                if ready(self._outbox):
                    return
                sleeper = self._outbox.sleeper()
            try:
                await sleeper
            except asyncio.CancelledError:
                self.cancel()
                raise

    def _result(self) -> list[Reply]:
        for reply in self._outbox.replies:
            if reply.error is not None:
                raise reply.error
        return self._outbox.replies

    def __del__(self) -> None:
        if (outbox := getattr(self, "_outbox", None)) and not outbox.finished:
            self._cancel()
