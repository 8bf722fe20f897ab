"""Eviction: tokens that agents have computed again because their state had to go.

The same trace with the rule of the cache, with the least recently used, and against the best choice in
hindsight: each block that is asked for again furthest in the future goes (Belady), and blocks need not follow
each other. No rule can do better than that. The engine is the toy: what is counted is work, which is the same
on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from bench.eviction.trace import Ask, trace
from bench.harness import Bench, Figure, Gauge, Run, at_least, at_most
from perdure.cache.block import BLOCK, BlockId, chain, cost
from perdure.cache.eviction import Eviction, EvictionClass
from perdure.cache.slots.cache import SlotCache
from perdure.decode.sequence import SlotAssignment
from perdure.testing.toy import ToyModel

_SLOTS = 2
_N_CTX = 12_288


class LeastRecentlyUsed(Eviction):
    """All blocks are worth the same, and namespaces have no shares."""

    def class_of(self, block: BlockId | None) -> EvictionClass:
        return EvictionClass.CONVERSATION

    def owner(self, root: BlockId) -> str:
        return ""


def conversations(run: Run) -> Iterator[Figure]:
    turns = run.pick(60, 24)
    asks = trace(turns, seed=1)
    new = _computed(asks, 1 << 40, Eviction())
    for share in run.pick((0.05, 0.1, 0.15, 0.2), (0.1,)):
        budget = int(share * _working_set(asks))
        ours, lru = (float(sum(_computed(asks, budget, rule()))) for rule in (Eviction, LeastRecentlyUsed))
        best = _best(asks, budget, new)
        where = f"tokens computed, {share:.0%} of all state fits, {sum(new):,} are new"
        yield run.compare(
            where,
            ours=lambda ours=ours: ours,  # type: ignore[misc]
            peer=lambda lru=lru: lru,  # type: ignore[misc]
            against="least recently used",
            unit="tokens",
            gauge=Gauge.COST,
            target=at_least(1.0),
            repeats=1,
        )
        yield run.compare(
            where,
            ours=lambda ours=ours: ours,  # type: ignore[misc]
            peer=lambda best=best: best,  # type: ignore[misc]
            against="the best choice in hindsight",
            unit="tokens",
            gauge=Gauge.GROWTH,
            target=at_most(1e9),
            repeats=1,
        )


def _working_set(asks: Sequence[Ask]) -> int:
    """Bytes of all blocks that were ever read or written."""
    size = cost(BLOCK, _row_bytes(), 0)
    return size * len({name for ask in asks for name in _names(ask, (*ask.prompt, *ask.reply))})


def _row_bytes() -> int:
    with ToyModel().context(n_ctx=256, n_seq=1) as context:
        return context.row_bytes() or 0


def _names(ask: Ask, tokens: Sequence[int]) -> list[BlockId]:
    root = BlockId(ask.namespace.encode().ljust(32, b"\0"))
    return list(chain(root, np.array(tokens, np.int32), BLOCK))


def _computed(asks: Sequence[Ask], budget: int, rule: Eviction) -> list[int]:
    """Tokens of each prompt that a slot cache has computed, by this rule."""
    computed = []
    with ToyModel().context(n_ctx=_N_CTX, n_seq=_SLOTS) as context:
        cache = SlotCache(context, budget=budget, eviction=rule)
        for ask in asks:
            place = cache.acquire(
                np.array(ask.prompt[:-1], np.int32),
                namespace=ask.namespace,
                conversation=ask.conversation,
                side=ask.side,
            )
            assert isinstance(place, SlotAssignment)
            computed.append(len(ask.prompt) - place.cached)
            context.decode([*ask.prompt[place.cached :], *ask.reply], place.seq, rows="none")
            cache.release(place.seq)
    return computed


def _best(asks: Sequence[Ask], budget: int, new: Sequence[int]) -> float:
    """Tokens that the best choice in hindsight computes: those that are `new`, and blocks that were read
    before and are not kept. The slots count as room too."""
    room = budget // cost(BLOCK, _row_bytes(), 0) + _SLOTS * (max(len(ask.prompt) for ask in asks) // BLOCK)
    prompts = [_names(ask, ask.prompt) for ask in asks]
    written = [_names(ask, (*ask.prompt, *ask.reply)) for ask in asks]
    uses: dict[BlockId, list[int]] = {}
    for at, names in enumerate(prompts):
        for name in names:
            uses.setdefault(name, []).append(at)
    kept: dict[BlockId, int] = {}
    queue: list[tuple[int, BlockId]] = []
    computed = 0
    for at, (ask, names) in enumerate(zip(asks, prompts, strict=True)):
        known = names[: (len(ask.prompt) - new[at]) // BLOCK]
        computed += new[at] + BLOCK * sum(name not in kept for name in known)
        for name in written[at]:
            after = next((use for use in uses.get(name, ()) if use > at), None)
            if after is None:
                kept.pop(name, None)
            else:
                kept[name] = after
                heapq.heappush(queue, (-after, name))
        while len(kept) > room:
            after, name = heapq.heappop(queue)
            if kept.get(name) == -after:
                del kept[name]
    return float(computed)


main = Bench("eviction", [conversations])
