"""Work on large memory, in several threads where that pays."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from perdure import system
from perdure.events.background import BackgroundThread

T = TypeVar("T")
R = TypeVar("R")

_MOST = 8
"""Threads: a few already move memory as fast as the machine can."""
MOST_THREADS = 6
"""Threads that share work of less than a millisecond: to wake more takes longer than they save."""
_LARGE = 8 << 20
"""Bytes below which starting threads takes longer than the work."""
_PIECE = 16 << 20

_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_bytes_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))


def threads() -> int:
    """How many threads a large piece of work is spread over."""
    return min(_MOST, system.usable_cores())


def spread(
    function: Callable[[T], R], items: Sequence[T], nbytes: int, *, large: int = _LARGE
) -> Iterator[R]:
    """What `function` makes of each item, in their order. Where they have `large` bytes and more in all,
    several are computed at a time, a few ahead of what was taken. It pays where Python's lock is free."""
    if nbytes < large or len(items) < 2 or threads() < 2:
        yield from map(function, items)
        return
    ahead: deque[Future[R]] = deque()
    try:
        for item in items:
            if len(ahead) > threads():
                yield ahead.popleft().result()
            ahead.append(_pool().submit(function, item))
        while ahead:
            yield ahead.popleft().result()
    finally:
        for each in ahead:
            # What has begun uses memory of the caller's, who may give it up now.
            if not each.cancel():
                each.exception()


def assist(work: Callable[[], object], most: int) -> None:
    """Have a few idle threads, at most `most`, call `work` too once they are awake. Nobody waits for them:
    each thread that is awake takes the next piece of the work."""
    idle = idle_helpers(os.getpid())
    for _ in range(min(most, threads() - 1)):
        try:
            helper = idle.pop()
        except IndexError:
            return
        helper.start(work)


class _Helper:
    """A thread that does one piece of work at a time. A lock wakes it: a pool's queue takes twice as long,
    which counts between two steps (`python -m bench.gpu`)."""

    def __init__(self, idle: list[_Helper]) -> None:
        self._idle = idle
        self._go = threading.Lock()
        self._go.acquire()
        self._work: Callable[[], object] | None = None
        BackgroundThread(self._run, name="perdure-assist", restart=True).start()

    def start(self, work: Callable[[], object]) -> None:
        self._work = work
        self._go.release()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            work, self._work = self._work, None
            assert work is not None
            try:
                work()
            finally:
                # Nothing of the caller's is held by one that is idle.
                del work
                self._idle.append(self)


@functools.lru_cache(maxsize=1)
def idle_helpers(process: int) -> list[_Helper]:
    """The threads of one process that have nothing to do."""
    idle: list[_Helper] = []
    for _ in range(MOST_THREADS - 1):
        try:
            idle.append(_Helper(idle))
        except RuntimeError:
            # The system gives no more threads: the caller computes alone.
            break
    return idle


def _pool() -> ThreadPoolExecutor:
    return _pool_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _pool_of(process: int) -> ThreadPoolExecutor:
    """The threads of one process: a fork has none of its parent's, and would wait for them for ever."""
    return ThreadPoolExecutor(threads(), thread_name_prefix="perdure-memory")


def joined(head: Callable[[], bytes], size: int, payload: NDArray[np.uint8]) -> bytes:
    """`head()`, which has `size` bytes, and `payload` as one object.

    A large payload is copied by several threads while `head` is computed: the pages of a new object have to
    be made, which takes one thread longer than the copy.
    """
    if payload.nbytes < _LARGE or threads() < 2:
        return b"".join((head(), payload.data))
    whole: bytes = _new_bytes(None, size + payload.nbytes)
    # Nobody else has seen it yet: until then it may be written.
    address = _bytes_address(whole)
    system.prefer_large_pages(address, len(whole))
    memory = (ctypes.c_uint8 * len(whole)).from_address(address)
    target = np.frombuffer(memoryview(memory), np.uint8)
    first = _pool().submit(head)
    places = range(0, payload.nbytes, _PIECE)
    for _ in spread(
        lambda at: np.copyto(
            target[size + at : size + at + _PIECE][: payload.nbytes - at], payload[at : at + _PIECE]
        ),
        places,
        payload.nbytes,
    ):
        pass
    target[:size] = np.frombuffer(first.result(), np.uint8)
    return whole
