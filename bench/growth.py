"""Growth: what an operation costs when a hundred times as much is there already.

Each operation is timed in a small and in a large setting, in CPU seconds of this process, with the toy
engine, so that our own work shows. A line begins with the exponent: 0 is a cost that does not grow, 1 one
that grows with what is there.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import perdure
from bench.harness import Bench, Figure, Gauge, Run, Target, at_most
from perdure.cache.block import Block, BlockId
from perdure.cache.memory_tier import MemoryTier
from perdure.cache.record import Record, RecordIndex, doomed
from perdure.cache.reuse_rule import ANY_TOKEN
from perdure.cache.slots.slot_cache import SlotCache
from perdure.cache.tiers import Tiers
from perdure.engine.toy import ToyModel
from perdure.memory import FullAttention
from perdure.store.disk import DiskTier

Operation = Callable[[], Any]
Setting = Callable[[int, ExitStack], Operation]
"""Makes an operation for a size: called again and again, it does the same kind of work each time."""

FLAT = 0.1
SIZE = 64
ROOT = BlockId(bytes(32))
SYSTEM = 24
"""Tokens that all prompts start with."""
_dice = np.random.default_rng(15)


def tokens(count: int) -> NDArray[np.int32]:
    return _dice.integers(0, 250, count, np.int32)


_SHARED = tokens(SYSTEM)


def prompt(count: int = SIZE) -> NDArray[np.int32]:
    """A prompt that starts like all others, and then goes on like none."""
    return np.concatenate([_SHARED, tokens(count - SYSTEM)])


def block(parent: BlockId = ROOT, start: int = 0, width: int = 8) -> Block:
    ids = prompt() if not start else tokens(SIZE)
    return Block.make(parent, start, ids, np.zeros((SIZE, width), np.uint8), None)


def growing(
    run: Run, name: str, setting: Setting, *, small: int, times: int = 100, target: Target | None = None
) -> Figure:
    """The cost of an operation at `times` the size of `small`, against that at `small`."""
    with ExitStack() as cleanup:
        little, much = setting(small, cleanup), setting(small * times, cleanup)
        figure = run.compare(
            name,
            ours=lambda: _seconds(much),
            peer=lambda: _seconds(little),
            against=f"at {small:,} of {small * times:,}",
            unit="ms",
            gauge=Gauge.GROWTH,
            target=target or at_most(times**FLAT),
            repeats=run.pick(31, 9),
        )
    return replace(figure, scale=times)


def _seconds(operation: Operation, count: int = 5) -> float:
    """Milliseconds of work, in whatever thread."""
    started = time.process_time()
    for _ in range(count):
        operation()
    return (time.process_time() - started) * 1e3 / count


# The block cache.


def memory(run: Run) -> Iterator[Figure]:
    def tiers(size: int) -> Tiers:
        tier = MemoryTier(1 << 40)
        for _ in range(size):
            tier.store(block())
        return Tiers(tier)

    def lookup(size: int, _: ExitStack) -> Operation:
        here = tiers(size)
        return lambda: here.longest_prefix(ROOT, prompt(), size=SIZE, limit=SIZE, rule=ANY_TOKEN)

    def keep(size: int, _: ExitStack) -> Operation:
        here = tiers(size)
        return lambda: here.memory.store(block())

    def evict(size: int, _: ExitStack) -> Operation:
        here = tiers(size)
        here.memory.budget = here.memory.nbytes
        return lambda: here.memory.store(block())

    yield growing(run, "look-up in memory, siblings", lookup, small=run.pick(1000, 100))
    yield growing(run, "keeping a block in memory, siblings", keep, small=run.pick(1000, 100))
    yield growing(run, "keeping a block in a full memory", evict, small=run.pick(1000, 100))


def slots(run: Run) -> Iterator[Figure]:
    def admit(size: int, cleanup: ExitStack) -> Operation:
        context = cleanup.enter_context(ToyModel(FullAttention).context(n_ctx=256, n_seq=size))
        cache = SlotCache(context, budget=1 << 30)

        def burst() -> None:
            place = cache.acquire(prompt())
            assert place is not None
            cache.release(place.seq)  # type: ignore[union-attr]

        return burst

    yield growing(run, "admission, slots", admit, small=16, times=16, target=at_most(0.2, "ms"))


def records(run: Run) -> Iterator[Figure]:
    def clear(size: int, _: ExitStack) -> Operation:
        tier = MemoryTier(1 << 40)
        index = RecordIndex(limit=1 << 30, budget=1 << 40)

        def record() -> Record:
            made = block()
            tier.store(made)
            return Record(tokens=tuple(made.tokens.tolist()), kept=SIZE, labels=frozenset("a"), root=ROOT)

        for _number in range(size):
            index.put(record())
        tiers = Tiers(tier)

        def one() -> None:
            gone = record()
            assert len(doomed(tiers, [gone], index, ANY_TOKEN).drop) == 1

        return one

    yield growing(run, "clearing a record, records", clear, small=run.pick(100, 30))


# The store.


def store(run: Run) -> Iterator[Figure]:
    small = run.pick(1000, 50)

    def filled(size: int, cleanup: ExitStack) -> DiskTier:
        folder = Path(tempfile.mkdtemp(prefix="perdure-growth-", dir=_fast()))
        cleanup.callback(shutil.rmtree, folder)
        disk = DiskTier(folder, budget=1 << 40)
        cleanup.callback(disk.close)
        _fill(disk, size)
        return disk

    def lookup(size: int, cleanup: ExitStack) -> Operation:
        tiers = Tiers(MemoryTier(0), filled(size, cleanup))  # type: ignore[arg-type]
        return lambda: tiers.longest_prefix(ROOT, prompt(), size=SIZE, limit=SIZE, rule=ANY_TOKEN)

    def keep(size: int, cleanup: ExitStack) -> Operation:
        disk = filled(size, cleanup)
        return lambda: disk.store([block()])

    def replace_oldest(size: int, cleanup: ExitStack) -> Operation:
        disk = filled(size, cleanup)
        disk.budget = disk.nbytes
        return lambda: disk.store([block()])

    def opening(size: int, cleanup: ExitStack) -> Operation:
        disk = filled(size, cleanup)
        disk.close()

        def reopen() -> None:
            DiskTier(disk.folder, budget=1 << 40).close()

        return reopen

    yield growing(run, "look-up on disk, siblings", lookup, small=small)
    yield growing(run, "keeping a block on disk", keep, small=small)
    yield growing(run, "keeping a block in a full store", replace_oldest, small=small)
    yield growing(run, "opening a store, blocks", opening, small=small)


def _fill(disk: DiskTier, size: int) -> None:
    """List blocks without writing their files: what is measured reads the index alone."""
    with disk._writing():
        for number in range(size):
            disk._enter(block(), 1000, number)


def _fast() -> str | None:
    """A folder in memory, where there is one: the disk's own time is not what is asked for."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


# The library.


def sessions(run: Run) -> Iterator[Figure]:
    def runtime(cleanup: ExitStack) -> perdure.Runtime:
        folder = Path(tempfile.mkdtemp(prefix="perdure-growth-", dir=_fast()))
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        return cleanup.enter_context(
            perdure.open(ToyModel(FullAttention), store=folder, n_ctx=512, slots=2, template="chatml")
        )

    def talked(size: int, cleanup: ExitStack) -> perdure.Runtime:
        rt = runtime(cleanup)
        for number in range(size):
            rt.session(f"s{number}", system="Be brief.").say(f"Hello {number}", max_tokens=1)
        return rt

    def first_turn(size: int, cleanup: ExitStack) -> Operation:
        rt, fresh = talked(size, cleanup), iter(range(1 << 30))
        return lambda: rt.session(f"new {next(fresh)}").say("Hello", max_tokens=1)

    def by_name(size: int, cleanup: ExitStack) -> Operation:
        rt = talked(size, cleanup)
        return lambda: rt.session("s0")

    def generate(size: int, cleanup: ExitStack) -> Operation:
        rt = runtime(cleanup)
        for _ in range(size):
            rt.generate(prompt=prompt().tolist(), max_tokens=1)
        return lambda: rt.generate(prompt=prompt().tolist(), max_tokens=1)

    small = run.pick(10, 3)
    yield growing(run, "a request, earlier requests", generate, small=small)
    yield growing(run, "a first turn, sessions", first_turn, small=small)
    yield growing(run, "opening a session by name, sessions", by_name, small=small)


main = Bench("growth", (memory, slots, records, store, sessions))

if __name__ == "__main__":
    # A cost that grows is an error wherever it is measured.
    sys.exit(main([*sys.argv[1:], "--check"]))
