"""What the cache does for one request does not grow with what it holds.

Counted as work: comparisons of tokens, states read out of the engine, blocks made.
"""

from __future__ import annotations

import hashlib
import heapq
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import perdure
from counting import calls_of, size_of
from perdure.cache import kept_prefixes, prefix_search
from perdure.cache.block import Block, BlockId, chain
from perdure.cache.drop_plan import drop_plan
from perdure.cache.kept_prefixes import KeptPrefixes
from perdure.cache.prefix_search import ANY_TOKEN
from perdure.cache.slots import placement
from perdure.cache.slots.cache import SlotCache
from perdure.cache.tiers import tiered
from perdure.cache.tiers.memory import MemoryTier
from perdure.cache.tiers.tiered import Tiers
from perdure.decode.request import KeptPrefix
from perdure.decode.sequence import SlotAssignment
from perdure.engine.context import Context
from perdure.memory import MEMORY_KINDS, FullAttention, MemorySpec
from perdure.testing.toy import ToyModel

SIZE = 16
ROOT = BlockId(bytes(32))
SIZES = (20, 2000)
COMPARED = tuple((each, "common_prefix_length") for each in (prefix_search, tiered, kept_prefixes, placement))
"""Wherever two lists of tokens are compared."""


def prompt(number: int, length: int = SIZE) -> NDArray[np.int32]:
    """One that begins like all others."""
    return np.array([1, 2, 3, *np.random.default_rng(number % 2**32).integers(4, 250, length - 3)], np.int32)


def block(number: int) -> Block:
    return Block.make(ROOT, 0, prompt(number), np.zeros((SIZE, 4), np.uint8), None)


def filled(size: int) -> MemoryTier:
    tier = MemoryTier(1 << 40)
    for number in range(size):
        tier.store(block(number))
    return tier


def test_a_lookup_compares_two_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the blocks where a prompt departs, and not all of them."""
    costs = []
    for size in SIZES:
        here = Tiers(filled(size))
        with calls_of(monkeypatch, *COMPARED) as compared:
            tokens = prompt(-size)
            names = chain(ROOT, tokens, SIZE)
            found = here.longest_prefix(ROOT, names, tokens, size=SIZE, rule=ANY_TOKEN)
        assert found.length >= 3
        costs.append(compared.count)
    assert costs[0] == costs[1] <= 2


def test_storing_a_block_compares_no_more_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []
    for size in SIZES:
        tier = filled(size)
        with calls_of(monkeypatch, *COMPARED) as compared:
            for number in range(10_000, 10_010):
                tier.store(block(number))
        costs.append(compared.count)
    # One with the block after it, and those that it might begin with: as many as the longest of them is.
    assert max(costs) <= 10 * (1 + SIZE)


def test_making_room_looks_at_what_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []
    for size in SIZES:
        tier = filled(size)
        tier.budget = tier.nbytes
        with calls_of(monkeypatch, (heapq, "heappop")) as popped:
            for number in range(10_000, 10_050):
                tier.store(block(number))
        assert tier.evicted == 50
        costs.append(popped.count)
    assert costs == [50, 50]


def test_clearing_a_record_compares_no_more_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []
    for size in SIZES:
        tier, index = filled(size), KeptPrefixes(limit=1 << 30, budget=1 << 40)
        for number in range(size):
            index.put(warmed(number))
        index.remove(warmed(0))
        with calls_of(monkeypatch, *COMPARED) as compared:
            assert drop_plan(Tiers(tier), [warmed(0)], index, rule=ANY_TOKEN).drop == (block(0).id,)
        costs.append(compared.count)
    assert max(costs) <= 3 * SIZE


def warmed(number: int) -> KeptPrefix:
    return KeptPrefix(tokens=tuple(prompt(number).tolist()), kept=SIZE, labels=frozenset("a"), root=ROOT)


def test_a_page_of_records_looks_at_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all pages together are all of them, in the order in which they came."""
    for size in SIZES:
        index = KeptPrefixes(limit=1 << 30, budget=1 << 40)
        for number in range(size):
            index.put(warmed(number))
        found: list[KeptPrefix] = []
        while True:
            with calls_of(monkeypatch, (KeptPrefix, "carries")) as looked:
                page = index.page(None, "", limit=7, after=found[-1].id if found else None)
            assert looked.count == len(page) <= 7
            if not page:
                break
            found += page
        assert found == [warmed(number) for number in range(size)]
        with pytest.raises(perdure.InvalidInputError, match="no warmed prefix"):
            index.page(None, "other", after=found[0].id)


def test_admission_reads_no_more_on_many_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is compared once with each slot, by what is known of it; no slot is read for it."""
    costs = []
    for slots in (8, 256):
        with ToyModel(FullAttention).context(n_ctx=64, n_seq=slots) as context:
            cache = SlotCache(context, budget=1 << 30)
            for number in range(2 * slots):
                serve(context, cache, prompt(number))
            # What the last one left behind is looked at once, when the next comes.
            serve(context, cache, prompt(-1))
            with (
                calls_of(monkeypatch, *COMPARED) as compared,
                calls_of(monkeypatch, (Context, "token_array"), (Context, "common_prefix")) as read,
                calls_of(monkeypatch, (Context, "capture")) as captured,
            ):
                serve(context, cache, prompt(-2))
            costs.append((compared.count - slots, read.count, captured.count))
    for compared_count, read_count, captured_count in costs:
        assert (read_count <= 3, captured_count <= 1) == (True, True)
        assert compared_count <= 3 * SIZE


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_all_that_is_asked_of_a_prompt_hashes_its_blocks_once(
    kind: type[MemorySpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked up by one rule or by two, and pinned; for the next prompt of a conversation, what is new."""
    with ToyModel(kind, window=8).context(n_ctx=1024, n_seq=1) as context:
        cache = SlotCache(context, budget=1 << 30, block_size=SIZE)
        tokens = prompt(1, 32 * SIZE)
        serve(context, cache, tokens)
        cache.store(tokens, "")
        blocks, counts = cache.blocks, []
        # What the cache was asked before is forgotten with it.
        blocks.replace((), ())
        for asked in (tokens, np.concatenate([tokens, tokens])):
            with calls_of(monkeypatch, (hashlib, "sha256")) as hashed:
                found = blocks.lookup(asked, "")
                assert (blocks.shared(asked, "", found), found.length) == (32 * SIZE, 32 * SIZE)
                assert len(list(blocks.names(asked, "", 30 * SIZE))) == 30
            counts.append(hashed.count)
    # The block that follows the last one that is kept is looked for too.
    assert counts == [32, 1]


def serve(context: Context, cache: SlotCache, tokens: NDArray[np.int32], *ends: int) -> None:
    """Have a prompt computed in steps that end at `ends`, and where each is worth coming back to."""
    place = cache.acquire(tokens)
    assert isinstance(place, SlotAssignment)
    steps = sorted({place.cached, len(tokens), *(end for end in ends if end > place.cached)})
    for start, end in pairwise(steps):
        context.decode(tokens[start:end].tolist(), place.seq)
        cache.reached(place.seq, end, {end})
    cache.release(place.seq)


KINDS = [kind for kind in MEMORY_KINDS if kind is not FullAttention]


@pytest.mark.parametrize("kind", KINDS)
def test_admission_reads_no_more_of_many_slots_that_keep_checkpoints(
    kind: type[MemorySpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which checkpoints a prompt can go back to is known of each slot without reading it."""
    costs = []
    for slots in (8, 128):
        with ToyModel(kind, window=8).context(n_ctx=64, n_seq=slots) as context:
            cache = SlotCache(context, budget=1 << 30)
            for number in range(2 * slots):
                serve(context, cache, prompt(number), 3, 9)
            serve(context, cache, prompt(-1), 3, 9)
            with calls_of(monkeypatch, (Context, "token_array"), (Context, "common_prefix")) as read:
                place = cache.acquire(prompt(-2))
            assert isinstance(place, SlotAssignment)
            costs.append(read.count)
    assert costs[0] == costs[1]


def test_saving_a_longer_state_makes_the_blocks_that_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was saved before is not copied again."""
    costs = []
    for length in (256, 2048):
        with ToyModel(FullAttention).context(n_ctx=4096, n_seq=1) as context:
            cache = SlotCache(context, budget=1 << 30)
            tokens = prompt(1, length + 128)
            context.decode(tokens[:length].tolist(), 0)
            cache.store(tokens[:length], "")
            context.decode(tokens[length:].tolist(), 0)
            with calls_of(monkeypatch, (Block, "make")) as made:
                cache.store(tokens, "")
            costs.append(made.count)
    assert costs == [2, 2]


def test_a_namespace_that_is_not_served_any_more_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many there were: only what the slots and the budget hold."""
    monkeypatch.setattr("perdure.cache.eviction._BLOCKS", 32)
    monkeypatch.setattr("perdure.cache.tiers.memory._REMEMBERED", 32)
    settings: dict[str, Any] = {"n_ctx": 256, "slots": 2, "template": "chatml", "cache": 1 << 15}
    sizes = []
    with perdure.open(ToyModel(FullAttention), **settings) as rt:
        tier = rt.backend.slot_cache.tier  # type: ignore[attr-defined]
        for number in range(100):
            said = [{"role": "user", "content": f"Hello {number}"}]
            rt.chat(said, namespace=f"n{number}", max_tokens=1)
            sizes.append(size_of(tier))
        assert len(tier) < 50
    assert max(sizes[75:]) <= 1.02 * max(sizes[:75])


@pytest.mark.extension("inspection")
def test_blocks_are_listed_page_by_page() -> None:
    """Each once, each before those that follow it; only those of the namespace."""
    with perdure.open(ToyModel(FullAttention), n_ctx=512, slots=1) as rt:
        for number in range(12):
            rt.cache.warm(prompt(number % 4, 64 * (2 + number % 3)).tolist())
        rt.cache.warm(prompt(99, 128).tolist(), namespace="other")
        every = rt.cache.blocks()
        assert len({block.id for block in every}) == len(every) >= 12
        seen = {""}
        for each in every:
            assert each.parent in seen
            seen.add(each.id)
        pages, last = [], None
        while page := rt.cache.blocks(limit=3, after=last):
            assert len(page) <= 3
            pages += page
            last = page[-1].id
        assert pages == every
        assert {each.id for each in rt.cache.blocks(namespace="other")}.isdisjoint(seen)
        assert rt.cache.blocks(namespace="nobody") == []
        for wrong in (every[0].id, "00" * 32, "x"):
            with pytest.raises(perdure.InvalidInputError, match="no block"):
                rt.cache.blocks(namespace="other", after=wrong)
        with pytest.raises(perdure.InvalidInputError, match="limit"):
            rt.cache.blocks(limit=0)
        assert [record.id for record in rt.cache.records(limit=2)] == [
            record.id for record in rt.cache.records()
        ][:2]
