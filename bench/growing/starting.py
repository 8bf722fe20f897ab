"""How long it takes until the library or the command is there."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from bench.harness import Figure, Gauge, Run, at_most


def starting(run: Run) -> Iterator[Figure]:
    bare = _process("-c", "pass")
    for name, ours, limit in (
        ("import perdure", _process("-c", "import perdure"), 0.1),
        ("perdure --help", _process("-m", "perdure.cli", "--help"), 0.2),
    ):
        yield run.compare(
            name,
            ours=ours,
            peer=bare,
            against="Python itself",
            unit="s",
            gauge=Gauge.GROWTH,
            target=at_most(limit, "s"),
            repeats=run.pick(21, 5),
        )


def _process(*arguments: str) -> Callable[[], float]:
    def seconds() -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - started

    return seconds
