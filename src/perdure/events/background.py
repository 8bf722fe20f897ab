"""Background threads: none ends without a word. Each logs what ended it, and `/ready` counts it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

log = logging.getLogger("perdure.threads")

FAILURES: Counter[str] = Counter()
"""How often threads of this process failed, by their names."""
_PAUSE = 1.0
"""Seconds before a loop that failed runs again."""
_failing = threading.Lock()


class BackgroundThread(threading.Thread):
    """A daemon thread.

    Always holds: whatever its target raises, `SystemExit` and the panics of native code included, is logged
    and counted in `FAILURES`. A loop (`restart`) then runs again after a second; any other thread ends.
    """

    def __init__(
        self, target: Callable[..., object], *args: object, name: str, restart: bool = False
    ) -> None:
        """With `restart`, `target` is a loop that can begin anew at any point, and returns at its end."""
        super().__init__(name=name, daemon=True)
        self._call = target
        self._arguments = args
        self._restart = restart

    def run(self) -> None:
        try:
            while not self._is_done():
                time.sleep(_PAUSE)
        finally:
            # A thread that is over holds on to nothing.
            del self._call, self._arguments

    def _is_done(self) -> bool:
        try:
            self._call(*self._arguments)
        except BaseException as error:
            with _failing:
                FAILURES[self.name] += 1
            then = "and is started again" if self._restart else "and has ended"
            log.error("the thread %s failed, %s: %r", self.name, then, error)
            # Python's hook shows where.
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, self)))
            return not self._restart
        return True


class BackgroundTimer(threading.Timer):
    """A daemon thread that calls a function later, unless it is cancelled. Failures are reported as above."""

    def __init__(self, seconds: float, target: Callable[..., object], *args: object, name: str) -> None:
        super().__init__(seconds, BackgroundThread(target, *args, name=name).run)
        self.name, self.daemon = name, True
