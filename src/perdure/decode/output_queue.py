"""The output of one request: the queue that one thread fills, those who listen, and the caller's job."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from perdure.decode.request import Delta, Reply

log = logging.getLogger("perdure.decode")
T = TypeVar("T")

NAP = 0.2
"""Seconds: threads wait in short naps, since Python may miss a Ctrl-C that comes just as a wait begins."""


class Listener(Protocol):
    """Is told that output queues changed.

    `notify` is called in the thread that fills the queues, once for all of a step that this listener waits
    for, with the waiters that it gave to `OutputQueue.listen` or `subscribe`. It must not wait, and must be
    hashable.
    """

    def notify(self, waiters: Sequence[Any]) -> None: ...


class ThreadListener:
    """Threads that wait: a waiter is a lock that its thread tries to acquire."""

    def notify(self, waiters: Sequence[threading.Lock]) -> None:
        for waiter in waiters:
            waiter.release()


class AsyncioListener:
    """Those who wait in one event loop: a waiter is called there, and one call reaches all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Weak: the table of listeners must not keep loops alive.
        self._loop = weakref.ref(loop)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> AsyncioListener:
        """The one listener of a loop, so that one call serves all who wait there."""
        found = _listeners.get(loop)
        if found is None:
            found = _listeners.setdefault(loop, cls(loop))
        return found

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
THREADS = ThreadListener()


class OutputQueue:
    """Deltas and then the replies of one request. Filling it never waits; readers may be slow or gone."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.deltas: deque[Delta] = deque()
        self.replies: list[Reply] = []
        self.finished = False
        self.read = 0
        """Tokens of the prompt whose state is there, for whoever asks while it waits."""
        self.written = 0
        """Tokens of all deltas so far."""
        self._on_every_change: list[tuple[Listener, Any]] = []
        self._on_change: list[tuple[Listener, Any]] = []
        self._on_finish: list[tuple[Listener, Any]] = []
        self._taker: Taker | None = None

    def put(self, delta: Delta) -> None:
        """Add a delta. Listeners learn of it at the next `notify`."""
        with self.lock:
            self.written += len(delta.tokens)
            self.deltas.append(delta)

    def hand(self, deltas: list[Delta]) -> bool:
        """Hand deltas to the taker, where this is called in its event loop: every token may come so, and
        touches no queue. False: they are in the queue, and listeners learn of them at the next `notify`.

        One thread at a time puts and hands.
        """
        for delta in deltas:
            self.written += len(delta.tokens)
        if self._taker is not None and not self.deltas and self._taker.takes(deltas):
            return True
        with self.lock:
            self.deltas += deltas
        return False

    def finish(self, replies: list[Reply]) -> None:
        """Close the queue and tell everybody."""
        with self.lock:
            self.replies = replies
            self.finished = True
        notify([self])

    def listen(self, listener: Listener, waiter: Any, *, finish: bool = False) -> None:
        """Tell `listener` of the next change, or only of the end; called with `lock` held, once a wait."""
        (self._on_finish if finish else self._on_change).append((listener, waiter))

    def subscribe(self, listener: Listener, waiter: Any) -> None:
        """Tell `listener` of every change from now on, and of the end; called with `lock` held."""
        self._on_every_change.append((listener, waiter))

    def due(self) -> list[tuple[Listener, Any]]:
        """The listeners to be told now; who only listens is told once."""
        with self.lock:
            found = self._on_every_change + self._on_change
            if self._on_change:
                self._on_change = []
            if self.finished:
                found += self._on_finish
                self._on_every_change, self._on_finish = [], []
        return found

    def wait(self, *, finish: bool = False, timeout: float | None = None) -> bool:
        """Have this thread wait for something to take, or for the end. False: `timeout` seconds passed."""
        waiter = threading.Lock()
        with self.lock:
            if self._ready(finish):
                return True
            waiter.acquire()
            self.listen(THREADS, waiter, finish=finish)
        if timeout is None:
            while not waiter.acquire(timeout=NAP):
                pass
            return True
        end = time.monotonic() + timeout
        while not waiter.acquire(timeout=max(0.0, min(NAP, end - time.monotonic()))):
            if time.monotonic() >= end:
                self.forget(waiter)
                return self._ready(finish)
        return True

    def async_end(self) -> asyncio.Future[None] | None:
        """What a task awaits until the end; None: it is there already."""
        with self.lock:
            if self.finished:
                return None
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            self.listen(AsyncioListener.of(loop), functools.partial(_resolve, waiter), finish=True)
        return waiter

    @contextlib.contextmanager
    def taken_by(self, taker: Taker) -> Iterator[None]:
        """While this is open, `taker` is handed what comes in its event loop."""
        self._taker = taker
        try:
            yield
        finally:
            if self._taker is taker:
                self._taker = None
            self.forget(taker.look)

    def forget(self, waiter: Any) -> None:
        """Tell nobody of this waiter any more."""
        with self.lock:
            self._on_every_change = [each for each in self._on_every_change if each[1] != waiter]
            self._on_change = [each for each in self._on_change if each[1] != waiter]
            self._on_finish = [each for each in self._on_finish if each[1] != waiter]

    def _ready(self, finish: bool) -> bool:
        return self.finished or (not finish and bool(self.deltas))


class Taker:
    """Takes what comes of one request in an event loop, by calls: no task is woken for a token.

    It ends when `take` gives False, which is the result, or raises; and when all was taken.
    """

    def __init__(self, output: OutputQueue, take: Callable[[list[Delta]], bool]) -> None:
        self._output = output
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._listener = AsyncioListener.of(self._loop)
        self.ended: asyncio.Future[bool] = self._loop.create_future()
        """Whether all was taken."""

    def takes(self, deltas: list[Delta]) -> bool:
        """Take what was never in the queue. False where this is not the event loop, or it has ended."""
        # Whoever waited may have been cancelled meanwhile.
        if asyncio._get_running_loop() is not self._loop or self.ended.done():
            return False
        try:
            if not self._take(deltas):
                self.ended.set_result(False)
        except Exception as error:
            self.ended.set_exception(error)
        return True

    def look(self) -> None:
        """Take what is in the queue, and listen for more; called in the event loop."""
        output = self._output
        while not self.ended.done():
            with output.lock:
                deltas = list(output.deltas)
                output.deltas.clear()
                if not deltas and not output.finished:
                    output.listen(self._listener, self.look)
                    return
            if deltas:
                self.takes(deltas)
            else:
                self.ended.set_result(True)


def notify(queues: Iterable[OutputQueue]) -> None:
    """Tell the listeners of all `queues` what is new: one call a listener."""
    told: dict[Listener, list[Any]] = {}
    for queue in queues:
        for listener, waiter in queue.due():
            told.setdefault(listener, []).append(waiter)
    for listener, waiters in told.items():
        try:
            listener.notify(waiters)
        except Exception:
            # Called in the engine thread, which has others to serve.
            log.exception("%d readers could not be told of their replies", len(waiters))


def _call(waiters: Sequence[Callable[[], None]]) -> None:
    for waiter in waiters:
        try:
            waiter()
        except Exception:
            log.exception("a reader could not be told of its reply")


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Job:
    """The caller's end of a request: iterate it for deltas, ask it for the reply, or cancel it.

    Dropping it cancels what is left of the request. An error of the request is raised where its result
    is asked for, or at the end of the iteration.
    """

    def __init__(self, output: OutputQueue, cancel: Callable[[], None], *, prompt_tokens: int) -> None:
        self.output = output
        self.prompt_tokens = prompt_tokens
        self._cancel = cancel

    @property
    def done(self) -> bool:
        return self.output.finished

    @property
    def prompt_read(self) -> int:
        """Tokens of the prompt whose state is there."""
        return self.output.read

    @property
    def written(self) -> int:
        """Tokens that have come so far, of all samples."""
        return self.output.written

    def cancel(self) -> None:
        """End the request within one step; its reply says `cancelled`."""
        self._cancel()

    def replies(self, timeout: float | None = None) -> list[Reply]:
        """All samples, once all are finished."""
        if not self.output.wait(finish=True, timeout=timeout):
            raise TimeoutError(f"no reply within {timeout} seconds")
        return self._result()

    def reply(self, timeout: float | None = None) -> Reply:
        """The only, or first, sample."""
        return self.replies(timeout)[0]

    async def areplies(self) -> list[Reply]:
        """Like `replies`, for asyncio."""
        if (waiter := self.output.async_end()) is not None:
            try:
                await waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._result()

    async def areply(self) -> Reply:
        """Like `reply`, for asyncio."""
        return (await self.areplies())[0]

    def unread(self) -> list[Delta]:
        """The deltas that nobody has read yet. They are taken, and not waited for."""
        with self.output.lock:
            deltas = list(self.output.deltas)
            self.output.deltas.clear()
        return deltas

    async def drain(self, take: Callable[[list[Delta]], bool]) -> bool:
        """Have `take` called in the event loop with what is new, whenever there is something, until it gives
        False or all deltas were taken: whether they were. No task is woken for a token."""
        taker = Taker(self.output, take)
        with self.output.taken_by(taker):
            taker.look()
            try:
                return await taker.ended
            except asyncio.CancelledError:
                self.cancel()
                raise

    def __iter__(self) -> Iterator[Delta]:
        output = self.output
        while True:
            output.wait()
            with output.lock:
                # Another reader of the same job may have been faster.
                delta = output.deltas.popleft() if output.deltas else None
                over = output.finished
            if delta is not None:
                yield delta
            elif over:
                break
        self._result()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        output, loop = self.output, asyncio.get_running_loop()
        listener = AsyncioListener.of(loop)
        while True:
            # At every token: nothing is called that need not be.
            waiter = None
            with output.lock:
                delta = output.deltas.popleft() if output.deltas else None
                if delta is None and not output.finished:
                    waiter = loop.create_future()
                    output.listen(listener, functools.partial(_resolve, waiter))
            if delta is not None:
                yield delta
            elif waiter is None:
                break
            else:
                # Another reader of the same job may be faster.
                try:
                    await waiter
                except asyncio.CancelledError:
                    self.cancel()
                    raise
        self._result()

    def _result(self) -> list[Reply]:
        for reply in self.output.replies:
            if reply.error is not None:
                raise reply.error
        return self.output.replies

    def __del__(self) -> None:
        if (output := getattr(self, "output", None)) and not output.finished:
            self._cancel()


def result_of(answer: Future[T]) -> T:
    """What `answer` gives or raises, waited for in short naps so that no Ctrl-C is missed."""
    while not answer.done():
        try:
            answer.exception(NAP)
        except TimeoutError:
            continue
    return answer.result()
