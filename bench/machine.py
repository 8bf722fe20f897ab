"""What the machine did while a figure was taken."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from types import TracebackType

import psutil

IDLE = 0.1
"""Up to this many cores may be busy with other work on a machine that is still called idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine over a span of time. `others` is how many cores other processes kept busy."""

    cores: int
    others: float
    seconds: float

    @property
    def idle(self) -> bool:
        return self.others <= IDLE

    def __str__(self) -> str:
        busy = "idle" if self.idle else "NOT IDLE"
        return f"{self.cores} cores, others used {self.others:.2f} ({busy})"


class Watch:
    """A `with` block; `machine` says afterwards what else ran during it.

    Time stolen by other guests of the same host counts as other work: it disturbs just as much.
    """

    def __enter__(self) -> Watch:
        self._wall = time.perf_counter()
        self._all = _busy_everywhere()
        self._ours = _busy_here()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ours = _busy_here() - self._ours
        everything = _busy_everywhere() - self._all
        seconds = time.perf_counter() - self._wall
        # The two clocks tick apart, so a short span can come out slightly below nothing.
        others = max(0.0, everything - ours) / seconds if seconds else 0.0
        self.machine = Machine(cores=cores(), others=others, seconds=seconds)


def cores() -> int:
    """The cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _busy_everywhere() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - sum(getattr(times, name, 0.0) for name in _NOT_BUSY))


# Waiting for a disk is no work; time of guests is also counted as time of users.
_NOT_BUSY = ("iowait", "guest", "guest_nice")


def _busy_here() -> float:
    """CPU time of this process and of every process below it, whether it still runs or not."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
