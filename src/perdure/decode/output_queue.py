"""The output queue of a request: one thread fills it, and notifies its readers with one call a step.

A reader waits in a thread, in a task of an event loop, or is called in that loop (`DirectReader`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from perdure.decode.request import Delta, Reply

log = logging.getLogger("perdure.decode")

NAP = 0.2
"""Seconds: threads wait in short naps, since Python may miss a Ctrl-C that comes just as a wait begins."""


class OutputListener(Protocol):
    """Gets a call when output queues changed.

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
THREADS = ThreadListener()


class Canceller(Protocol):
    """Ends requests on demand: the engine loop, or the client of a worker."""

    def cancel(self, output: Any) -> None: ...


class OutputQueue:
    """Deltas and then the replies of one request. Filling it never waits; readers may be slow or gone."""

    def __init__(self, prompt_tokens: int = 0, canceller: Canceller | None = None) -> None:
        self.lock = threading.RLock()
        self.deltas: deque[Delta] = deque()
        self.replies: list[Reply] = []
        self.finished = False
        self.prompt_tokens = prompt_tokens
        self.read = 0
        """Tokens of the prompt whose state is there, for readers that show progress."""
        self.tokens = array("i")
        """Of all deltas so far, whether somebody has read them or not."""
        self.last_tokens = 0
        """How many of them came with the end."""
        self.cancelled = False
        self.interrupted = ""
        """Why it was cancelled, where its caller did not ask for that."""
        self._canceller = canceller
        self._on_every_change: list[tuple[OutputListener, Any]] = []
        self._on_change: list[tuple[OutputListener, Any]] = []
        self._on_finish: list[tuple[OutputListener, Any]] = []
        self._direct: DirectReader | None = None

    # For the thread that fills it.

    def push(self, deltas: Sequence[Delta]) -> bool:
        """Give deltas to the direct reader, where this is called in its event loop: every token may come so,
        and touches no queue. False: they are in the queue, and listeners learn of them at the next `notify`.

        One thread at a time pushes.
        """
        for delta in deltas:
            if delta.finish_reason is not None:
                self.last_tokens = len(delta.tokens)
            self.tokens.extend(delta.tokens)
        if self._direct is not None and not self.deltas and self._direct.push(deltas):
            return True
        with self.lock:
            self.deltas += deltas
        return False

    def finish(self, replies: list[Reply]) -> None:
        """Close the queue and notify its listeners. Later calls do nothing."""
        with self.lock:
            if self.finished:
                return
            self.replies = replies
            self.finished = True
            # A caller that keeps the queue keeps its replies, and not the request behind the canceller.
            self._canceller = None
        notify([self])

    # For readers.

    @property
    def written(self) -> int:
        """Tokens of all deltas so far."""
        return len(self.tokens)

    def cancel(self) -> None:
        """End the request within one step; its reply says `cancelled`."""
        self.cancelled = True
        if (canceller := self._canceller) is not None:
            canceller.cancel(self)

    def pop_all(self) -> list[Delta]:
        """The deltas that nobody has read yet. They are taken, and not waited for."""
        with self.lock:
            deltas = list(self.deltas)
            self.deltas.clear()
        return deltas

    def each(self, end: float | None = None) -> Iterator[Delta]:
        """Each delta as it comes, waited for in this thread, until all are read, or the instant `end`."""
        while True:
            if not self.wait(timeout=until(end)):
                raise TimeoutError
            with self.lock:
                # Another reader of the same queue may have been faster.
                delta = self.deltas.popleft() if self.deltas else None
                over = self.finished
            if delta is not None:
                yield delta
            elif over:
                return

    def listen(self, listener: OutputListener, waiter: Any, *, finish: bool = False) -> None:
        """Notify `listener` of the next change, or only of the end; called with `lock` held, once a wait."""
        (self._on_finish if finish else self._on_change).append((listener, waiter))

    def subscribe(self, listener: OutputListener, waiter: Any) -> None:
        """Notify `listener` of every change from now on, and of the end; called with `lock` held."""
        self._on_every_change.append((listener, waiter))

    def due(self) -> list[tuple[OutputListener, Any]]:
        """The listeners to notify now; those of `listen` are notified once."""
        with self.lock:
            waiters = self._on_every_change + self._on_change
            if self._on_change:
                self._on_change = []
            if self.finished:
                waiters += self._on_finish
                self._on_every_change, self._on_finish = [], []
        return waiters

    def wait(self, *, finish: bool = False, timeout: float | None = None) -> bool:
        """Have this thread wait for something to read, or for the end. False: `timeout` seconds passed."""
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

    async def wait_end(self) -> None:
        """Have this task wait for the end."""
        with self.lock:
            if self.finished:
                return
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            self.listen(AsyncioListener.of(loop), functools.partial(resolve, waiter), finish=True)
        await waiter

    @contextlib.contextmanager
    def read_by(self, reader: DirectReader) -> Iterator[None]:
        """While this is open, `reader` is given what comes in its event loop."""
        self._direct = reader
        try:
            yield
        finally:
            if self._direct is reader:
                self._direct = None
            self.forget(reader.poll)

    def forget(self, waiter: Any) -> None:
        """Tell nobody of this waiter any more."""
        with self.lock:
            self._on_every_change = [each for each in self._on_every_change if each[1] != waiter]
            self._on_change = [each for each in self._on_change if each[1] != waiter]
            self._on_finish = [each for each in self._on_finish if each[1] != waiter]

    def _ready(self, finish: bool) -> bool:
        return self.finished or (not finish and bool(self.deltas))


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


def notify(queues: Iterable[OutputQueue]) -> None:
    """Tell the listeners of all `queues` what is new: one call a listener."""
    due: dict[OutputListener, list[Any]] = {}
    for queue in queues:
        for listener, waiter in queue.due():
            due.setdefault(listener, []).append(waiter)
    for listener, waiters in due.items():
        try:
            listener.notify(waiters)
        except Exception:
            # Called in the engine thread, which has others to serve.
            log.exception("%d readers could not be notified of their replies", len(waiters))


def _call(waiters: Sequence[Callable[[], None]]) -> None:
    for waiter in waiters:
        try:
            waiter()
        except Exception:
            log.exception("a reader could not be notified of its reply")


def resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def until(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())
