"""What it costs that a turn is written down before its first step, and its reply as it is written.

Two runtimes on two stores have the same conversations: one as it is, one whose store forgets what is asked.
The reply is 128 tokens of the small default model: turns are hardly shorter.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
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


class _Forgetful:
    """A session store that keeps no pending turn."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def pend(self, session: Any, body: Any) -> None:
        return None


def turn(run: Run) -> Iterator[Figure]:
    """Against the same turn, of which nothing is written down before its end."""
    with ExitStack() as held, tempfile.TemporaryDirectory() as folder:
        ours = _turns(held, Path(folder) / "ours", forgetful=False)
        peer = _turns(held, Path(folder) / "peer", forgetful=True)
        yield run.compare(
            f"turn of {REPLY} tokens in a session",
            ours=ours,
            peer=peer,
            against="not written down",
            unit="s",
            gauge=Gauge.COST,
            target=FLOOR,
            repeats=run.pick(61, 5),
        )


def _turns(held: ExitStack, store: Path, *, forgetful: bool) -> Callable[[], float]:
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
    return measure


main = Bench("resume.pending", (turn,))

if __name__ == "__main__":
    sys.exit(main())
