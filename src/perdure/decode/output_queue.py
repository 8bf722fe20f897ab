"""The output queue of a request: one thread fills it, and notifies its readers with one call a step.

A reader waits in a thread, in a task of an event loop, or is called in that loop (`DirectReader`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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


THREADS = ThreadListener()


class CallReader(Protocol):
    """Is given deltas by calls in its event loop: `DirectReader` of `asyncio_reader.py`."""

    def push(self, deltas: Sequence[Delta]) -> bool: ...
    def poll(self) -> None: ...


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
        self._direct: CallReader | None = None

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

    @contextlib.contextmanager
    def read_by(self, reader: CallReader) -> Iterator[None]:
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


def until(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())
