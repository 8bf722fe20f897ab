"""What it costs that a turn is written down before its first step, and its reply as it is written.

Two ways to see it, as a turn differs more from the next one than by this:

    turn       two runtimes on two stores have the same turns one after the other: one as it is, one whose
               store forgets what is asked. The ratio is the median over the pairs.
    written    one runtime: the time of a turn without what its calls took that write it down, against all of
               it. Both halves are of the same turn, so that what else the machine does cancels out.

Of `written` there is the wall time, and the CPU time of the calls: a disk that others write to makes the one
longer, and not the other. The reply is 128 tokens of the small default model: turns are hardly shorter.

    python -m bench.resume.pending                  # about 5 minutes on an idle machine
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Run, at_least

REPLY = 128
FLOOR = at_least(0.97)
"""A turn that is not written down, divided by one that is: at most 3%."""
PAIRS = 61


class _Forgetful:
    """A session store that keeps no pending turn."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def pend(self, session: Any, body: Any) -> None:
        return None


class _Calls:
    """What calls of an object have taken, in seconds of a clock, on any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._depth = threading.local()
        self.seconds = 0.0

    def watch(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **keywords: Any) -> Any:
            if getattr(self._depth, "within", False):
                return call(*args, **keywords)
            self._depth.within = True
            began = self._clock()
            try:
                return call(*args, **keywords)
            finally:
                self._depth.within = False
                with self._lock:
                    self.seconds += self._clock() - began

        setattr(owner, name, timed)


class _Halves:
    """A turn, and the same turn without what wrote it down: whichever is asked for first has it said."""

    def __init__(self, say: Callable[[], float], calls: _Calls) -> None:
        self._say = say
        self._calls = calls
        self._turn: tuple[float, float] | None = None

    def whole(self) -> float:
        return self._next()[0]

    def without(self) -> float:
        return self._next()[1]

    def _next(self) -> tuple[float, float]:
        if (turn := self._turn) is not None:
            self._turn = None
            return turn
        before = self._calls.seconds
        whole = self._say()
        self._turn = whole, whole - (self._calls.seconds - before)
        return self._turn


def turn(run: Run) -> Iterator[Figure]:
    """Against the same turn, of which nothing is written down before its end."""
    with ExitStack() as held, tempfile.TemporaryDirectory() as folder:
        ours, _ = _turns(held, Path(folder) / "ours", forgetful=False)
        peer, _ = _turns(held, Path(folder) / "peer", forgetful=True)
        yield run.compare(
            f"turn of {REPLY} tokens in a session",
            ours=ours,
            peer=peer,
            against="not written down",
            unit="s",
            gauge=Gauge.COST,
            target=FLOOR,
            repeats=run.pick(PAIRS, 5),
        )


def written(run: Run) -> Iterator[Figure]:
    """Against the same turn without the calls that write it down."""
    for name, clock in (("wall", time.perf_counter), ("CPU", time.thread_time)):
        with ExitStack() as held, tempfile.TemporaryDirectory() as folder:
            say, rt = _turns(held, Path(folder), forgetful=False)
            calls = _Calls(clock)
            for call in ("write", "done", "_look"):
                calls.watch(rt.sessions.pending, call)
            calls.watch(rt.sessions.store, "_settle")
            halves = _Halves(say, calls)
            yield run.compare(
                f"turn of {REPLY} tokens, less the {name} time of what writes it down",
                ours=halves.whole,
                peer=halves.without,
                against="less that",
                unit="s",
                gauge=Gauge.COST,
                target=FLOOR,
                repeats=run.pick(PAIRS, 5),
            )


def _turns(held: ExitStack, store: Path, *, forgetful: bool) -> tuple[Callable[[], float], Any]:
    import perdure

    rt = held.enter_context(perdure.open(model_path(), store=store, n_ctx=1024, threads=2))
    if forgetful:
        rt.sessions.pending._store = _Forgetful(rt.sessions.store)
    numbers = itertools.count()

    def measure() -> float:
        session = rt.session(f"{next(numbers)}")
        began = time.perf_counter()
        session.say("Tell me of the sea.", max_tokens=REPLY, ignore_eos=True, temperature=0)
        return time.perf_counter() - began

    measure()
    return measure, rt


main = Bench("resume.pending", (written, turn))

if __name__ == "__main__":
    sys.exit(main())
