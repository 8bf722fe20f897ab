"""Growth of the block cache: look-ups, keeping, eviction, admission, clearing; in memory and on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle

from bench.growing.measure import FLAT, ROOT, SIZE, Operation, block, growing, new_folder, prompt
from bench.harness import Figure, Gauge, Run, at_most
from perdure.cache.block import PrefixHit, chain
from perdure.cache.drop_plan import drop_plan
from perdure.cache.kept_prefixes import KeptPrefixes
from perdure.cache.prefix_search import ANY_TOKEN
from perdure.cache.slots.cache import SlotCache
from perdure.cache.tiers.disk import DiskTier
from perdure.cache.tiers.memory import MemoryTier
from perdure.cache.tiers.tiered import Tiers
from perdure.cache.tiers.write_behind import WriteBehind
from perdure.decode.request import KeptPrefix
from perdure.decode.sequence import SlotAssignment
from perdure.memory import FullAttention, MemorySpec, Recurrent, SlidingWindow
from perdure.testing.toy import ToyModel


def looking_up(tiers: Tiers) -> Operation:
    def lookup() -> PrefixHit:
        tokens = prompt()
        return tiers.longest_prefix(ROOT, chain(ROOT, tokens, SIZE), tokens, size=SIZE, rule=ANY_TOKEN)

    return lookup


def memory(run: Run) -> Iterator[Figure]:
    def tiers(size: int) -> Tiers:
        tier = MemoryTier(1 << 40)
        for _ in range(size):
            tier.store(block())
        return Tiers(tier)

    def lookup(size: int, _: ExitStack) -> Operation:
        return looking_up(tiers(size))

    def keep(size: int, _: ExitStack) -> Operation:
        here = tiers(size)
        return lambda: here.memory.store(block())

    def evict(size: int, _: ExitStack) -> Operation:
        here = tiers(size)
        here.memory.budget = here.memory.nbytes
        return lambda: here.memory.store(block())

    small = run.pick(1000, 100)
    yield growing(run, "look-up in memory, siblings", lookup, small=small)
    yield growing(run, "keeping a block in memory, siblings", keep, small=small)
    yield growing(run, "keeping a block in a full memory, blocks", evict, small=small)


def slots(run: Run) -> Iterator[Figure]:
    def admit(size: int, cleanup: ExitStack) -> Operation:
        context = cleanup.enter_context(ToyModel(FullAttention).context(n_ctx=256, n_seq=size))
        cache = SlotCache(context, budget=1 << 30)
        waiting = cycle([prompt() for _ in range(1000)])

        def burst() -> None:
            places = [cache.acquire(next(waiting)) for _ in range(5)]
            for place in places:
                assert isinstance(place, SlotAssignment)
                cache.release(place.seq)

        return burst

    yield growing(run, "admission of 5, idle slots", admit, small=8, times=4, target=at_most(1.0, "ms"))
    yield _bursts(run, FullAttention, held=False)
    for kind in (FullAttention, SlidingWindow, Recurrent):
        yield _bursts(run, kind, held=True)


def _bursts(run: Run, kind: type[MemorySpec], *, held: bool) -> Figure:
    """As many requests as slots at once, all with the same beginning. With `held`, each slot holds another
    conversation, whose state is moved out."""
    small, times = 8, 4
    name = f"{kind.name}, each moves another out" if held else kind.name

    def burst(size: int, cleanup: ExitStack) -> Callable[[], float]:
        context = cleanup.enter_context(ToyModel(kind).context(n_ctx=256, n_seq=size))
        cache = SlotCache(context, budget=1 << 30)

        def milliseconds() -> float:
            """Of one request; computing its prompt is not counted."""
            waiting = [prompt() for _ in range(size)]
            started = time.process_time()
            places = [cache.acquire(each) for each in waiting]
            took = time.process_time() - started
            for place, tokens in zip(places, waiting, strict=True):
                assert isinstance(place, SlotAssignment)
                if held:
                    context.decode(tokens[place.cached :].tolist(), place.seq)
                cache.release(place.seq)
            return took * 1e3 / size

        milliseconds()
        return milliseconds

    with ExitStack() as cleanup:
        figure = run.compare(
            f"admission of one of a burst on all slots ({name}), slots",
            ours=burst(small * times, cleanup),
            peer=burst(small, cleanup),
            against=f"at {small}",
            unit="ms",
            gauge=Gauge.GROWTH,
            target=at_most(times**FLAT) if held else at_most(0.2, "ms"),
            repeats=run.pick(21, 5),
        )
    return replace(figure, scale=times)


def records(run: Run) -> Iterator[Figure]:
    def filled(size: int) -> tuple[MemoryTier, KeptPrefixes]:
        tier = MemoryTier(1 << 40)
        index = KeptPrefixes(limit=1 << 30, budget=1 << 40)
        for _ in range(size):
            index.put(record(tier))
        return tier, index

    def record(tier: MemoryTier) -> KeptPrefix:
        made = block()
        tier.store(made)
        return KeptPrefix(tokens=tuple(made.tokens.tolist()), kept=SIZE, labels=frozenset("a"), root=ROOT)

    def clear(size: int, _: ExitStack) -> Operation:
        tier, index = filled(size)
        tiers = Tiers(tier)

        def one() -> None:
            gone = record(tier)
            assert len(drop_plan(tiers, [gone], index, rule=ANY_TOKEN).drop) == 1

        return one

    def page(size: int, _: ExitStack) -> Operation:
        index = filled(size)[1]
        last = index.page(None, "", limit=size // 2)[-1].id
        return lambda: index.page(None, "", limit=20, after=last)

    small = run.pick(100, 50)
    yield growing(run, "clearing a record, records", clear, small=small)
    yield growing(run, "a page of records, records", page, small=small)


def store(run: Run) -> Iterator[Figure]:
    small = run.pick(1000, 50)

    def filled(size: int, cleanup: ExitStack) -> DiskTier:
        disk = DiskTier(new_folder(cleanup), budget=1 << 40)
        cleanup.callback(disk.close)
        with disk.table.writing():
            # Listed without their files: what is measured reads the index alone.
            for number in range(size):
                disk.table.add(block(), 1000, used=number)
        return disk

    def lookup(size: int, cleanup: ExitStack) -> Operation:
        behind = WriteBehind(filled(size, cleanup))
        cleanup.callback(behind.close)
        return looking_up(Tiers(MemoryTier(0), [behind]))

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

    def page(size: int, cleanup: ExitStack) -> Operation:
        disk = filled(size, cleanup)
        return lambda: disk.page(limit=20, after="80" * 32)

    yield growing(run, "look-up on disk, siblings", lookup, small=small)
    yield growing(run, "keeping a block on disk, blocks", keep, small=small)
    yield growing(run, "keeping a block in a full store, blocks", replace_oldest, small=small)
    yield growing(run, "opening a store, blocks", opening, small=small)
    yield growing(run, "a page of blocks, blocks", page, small=small)
