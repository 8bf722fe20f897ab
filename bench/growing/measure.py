"""The cost of an operation at three sizes of what is there already, and what such settings are made of."""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import perdure
from bench.harness import Figure, Gauge, Run, Target, at_most
from perdure.cache.block import Block, BlockId
from perdure.memory import FullAttention
from perdure.testing.toy import ToyModel

Operation = Callable[[], Any]
Setting = Callable[[int, ExitStack], Operation]
"""Makes an operation for a size: called again and again, it does the same kind of work each time."""

FLAT = 0.1
"""The exponent of a cost that does not grow."""
LINEAR = 1.05
"""The exponent of what reads tokens, in their number."""
SIZE = 64
ROOT = BlockId(bytes(32))
SYSTEM = 24
"""Tokens that all prompts start with."""
_dice = np.random.default_rng(15)


def growing(
    run: Run,
    name: str,
    setting: Setting,
    *,
    small: int,
    times: int = 100,
    exponent: float = FLAT,
    target: Target | None = None,
) -> Figure:
    """The cost of an operation at `times` the size of `small`, against that at `small`."""
    between = small * round(math.sqrt(times))
    with ExitStack() as cleanup:
        little, some, much = (setting(size, cleanup) for size in (small, between, small * times))
        figure = run.compare(
            name,
            ours=lambda: cpu(much),
            peer=lambda: cpu(little),
            against="",
            unit="ms",
            gauge=Gauge.GROWTH,
            target=target or at_most(times**exponent),
            repeats=run.pick(31, 9),
        )
        middle = statistics.median(cpu(some) for _ in range(run.pick(9, 3)))
    against = f"at {between:,} of {small * times:,} {middle:.3g} ms, at {small:,}"
    return replace(figure, scale=times, against=against)


def cpu(operation: Operation, count: int = 5) -> float:
    """Milliseconds of work, in whatever thread."""
    started = time.process_time()
    for _ in range(count):
        operation()
    return (time.process_time() - started) * 1e3 / count


def tokens(count: int) -> NDArray[np.int32]:
    return _dice.integers(0, 250, count, np.int32)


_SHARED = tokens(SYSTEM)


def prompt(count: int = SIZE) -> NDArray[np.int32]:
    """A prompt that starts like all others, and then goes on like none."""
    return np.concatenate([_SHARED, tokens(count - SYSTEM)])


def block(parent: BlockId = ROOT, start: int = 0, width: int = 8) -> Block:
    ids = prompt() if not start else tokens(SIZE)
    return Block.make(parent, start, ids, np.zeros((SIZE, width), np.uint8), None)


def new_folder(cleanup: ExitStack) -> Path:
    """In memory, where there is such a place: the disk's own time is not what is asked for."""
    fast = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="perdure-growth-", dir=fast))
    cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def opened(cleanup: ExitStack, folder: Path | None = None, **settings: Any) -> perdure.Runtime:
    """A runtime whose engine costs next to nothing."""
    defaults: dict[str, Any] = {
        "n_ctx": 2048,
        "slots": 2,
        "template": "chatml",
        "store": folder or new_folder(cleanup),
    }
    return cleanup.enter_context(perdure.open(ToyModel(FullAttention), **(defaults | settings)))
