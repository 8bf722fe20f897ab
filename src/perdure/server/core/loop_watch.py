"""Loop watch: the debug mode of the server. Nothing waits on the event loop, which serves everybody.

A store that is touched in the loop's thread raises `WaitInEventLoopError` there and then. A loop that is held
for 100 ms is logged with the line that holds it. That is measured in CPU time of its thread, so that a busy
machine is not taken for a defect; what only waits is found by the first rule.

It is on under `python -X dev`, and in the tests.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from perdure.checks import never_waiting

log = logging.getLogger("perdure.server")

HELD = 0.1
"""Seconds of CPU time for which nobody may hold the loop."""
_PAUSE, _LOOK = 0.05, 0.01


class LoopWatch:
    """Watches one event loop from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """To be called in the thread of the loop."""
        self._loop = loop
        self._thread = threading.get_ident()
        self._stopped = threading.Event()
        self.held: list[str] = []
        """The stack of each callback that held the loop for too long, once it had."""
        self.refused: list[str] = []
        """Calls that were refused because they may wait."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """To be entered in the thread of the loop."""
        watcher = None
        if hasattr(time, "pthread_getcpuclockid"):
            clock = time.pthread_getcpuclockid(self._thread)
            args = (lambda: time.clock_gettime(clock),)
            watcher = threading.Thread(target=self._watch, args=args, name="perdure-loop-watch", daemon=True)
            watcher.start()
        try:
            with never_waiting() as self.refused:
                yield
        finally:
            self._stopped.set()
            if watcher is not None:
                watcher.join()

    def _watch(self, used: Callable[[], float]) -> None:
        while not self._stopped.wait(_PAUSE):
            turned = threading.Event()
            began, reported = used(), False
            try:
                self._loop.call_soon_threadsafe(turned.set)
            except RuntimeError:
                return
            while not turned.wait(_LOOK) and not self._stopped.is_set():
                if not reported and used() - began > HELD:
                    reported = True
                    self._report()

    def _report(self) -> None:
        frame = sys._current_frames().get(self._thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        self.held.append(stack)
        log.warning("the event loop was held for more than %g s of CPU time:\n%s", HELD, stack)
