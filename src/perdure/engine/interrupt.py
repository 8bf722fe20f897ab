"""Ctrl-C during native code.

Python notes a signal at once but acts on it only between its own instructions, so native code in the main
thread holds Ctrl-C back until it returns. Running it in another thread would free the main one, but OpenMP
keeps a team of threads for each thread that ever used it, and two teams on the same cores cost a quarter
of the speed. So the native code stays where it was called, and a thread that only watches stops it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from perdure import system


class _Watcher:
    """Reads the signals that Python notes, and stops what runs when one is Ctrl-C."""

    def __init__(self) -> None:
        self._inlet, self._outlet = os.pipe()
        os.set_blocking(self._outlet, False)
        self._stop: Callable[[], None] | None = None
        threading.Thread(target=self._watch, name="perdure-ctrl-c", daemon=True).start()

    @contextmanager
    def watching(self, stop: Callable[[], None]) -> Iterator[None]:
        self._stop = stop
        before = signal.set_wakeup_fd(self._outlet, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1 if before == self._outlet else before)
            self._stop = None

    def _watch(self) -> None:
        while numbers := os.read(self._inlet, 64):
            stop = self._stop
            if stop is not None and signal.SIGINT in numbers:
                stop()


_watcher: _Watcher | None = None


def _forget() -> None:
    global _watcher
    _watcher = None


if hasattr(os, "register_at_fork"):
    # The thread does not come along into a child.
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def stopped_by_ctrl_c(stop: Callable[[], None]) -> Iterator[None]:
    """While this is open in the main thread, Ctrl-C calls `stop` from another thread.

    Only where Ctrl-C means KeyboardInterrupt: a program with a handler of its own decides for itself.
    """
    global _watcher
    if (
        not system.POSIX
        or threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    if _watcher is None:
        _watcher = _Watcher()
    with _watcher.watching(stop):
        yield
