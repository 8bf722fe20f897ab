"""The memory tier: never over its budget, leaves first, and nothing in use is taken away."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from inside import nodes_of
from perdure.cache.block import Block, BlockId, block_id
from perdure.cache.block_cache import BlockNames
from perdure.cache.prefix_search import ANY_TOKEN
from perdure.cache.tiers.memory import MemoryTier
from perdure.cache.tiers.tiered import Tiers

ROOT = BlockId(b"r" * 32)
SIZE = 4
WIDTH = 100


class Watched(MemoryTier):
    """Notes every figure that `nbytes` ever has, however short."""

    seen: list[int]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "nbytes":
            self.__dict__.setdefault("seen", []).append(value)
        super().__setattr__(name, value)


def ids(tokens: Sequence[int]) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def block(
    tokens: Sequence[int], parent: Block | None = None, *, tail_state: int = 0, rows: int = WIDTH
) -> Block:
    return Block.make(
        parent.id if parent else ROOT,
        parent.end if parent else 0,
        ids(tokens),
        np.full((len(tokens), rows), 1, np.uint8) if rows else None,
        np.full(tail_state, 2, np.uint8) if tail_state else None,
    )


def chain(*parts: Sequence[int]) -> list[Block]:
    """Blocks that follow one another."""
    made: list[Block] = []
    for part in parts:
        made.append(block(part, made[-1] if made else None))
    return made


def put_all(tier: MemoryTier, blocks: Sequence[Block]) -> None:
    for each in blocks:
        assert tier.store(each)


COST = block([0] * SIZE).nbytes


def distinct(number: int) -> list[int]:
    return [number, number + 1, number + 2, number + 3]


# Budget.


def test_p6_ten_times_the_budget_goes_through_without_passing_it_for_a_moment() -> None:
    tier = Watched(10 * COST)
    for number in range(100):
        assert tier.store(block(distinct(number)))
        assert tier.nbytes == sum(each.nbytes for each in tier.children(ROOT))
    assert max(tier.seen) <= tier.budget
    assert len(tier) == 10
    assert tier.evicted == 90


def test_p6_room_is_made_before_it_is_needed() -> None:
    tier = MemoryTier(2 * COST)
    first, second = block(distinct(1)), block(distinct(50))
    put_all(tier, [first, second])
    assert tier.make_room(COST, keep=ROOT)
    assert tier.nbytes + COST <= tier.budget
    assert first.id not in tier
    assert second.id in tier


def test_p6_what_can_never_fit_evicts_nobody() -> None:
    tier = MemoryTier(3 * COST)
    put_all(tier, [block(distinct(number)) for number in (1, 20, 40)])
    assert not tier.store(block(range(SIZE), tail_state=4 * COST))
    assert len(tier) == 3


def test_p6_a_budget_of_nothing_keeps_nothing() -> None:
    tier = MemoryTier(0)
    assert not tier.store(block(distinct(1)))
    assert (len(tier), tier.nbytes) == (0, 0)


def test_p6_more_state_for_a_kept_block_counts_too() -> None:
    tier = Watched(3 * COST)
    first, second, third = (block(distinct(number)) for number in (1, 20, 40))
    put_all(tier, [first, second, third])
    assert tier.store(block(distinct(40), tail_state=50))
    found = tier.lookup(third.id)
    assert found is not None
    assert found.tail_state is not None
    assert first.id not in tier
    assert max(tier.seen) <= tier.budget
    # Less state than is kept changes nothing.
    assert tier.store(third)
    assert tier.lookup(third.id) is found


# Who goes.


def test_p6_leaves_go_first_oldest_first() -> None:
    tier = MemoryTier(4 * COST)
    first, second, third = chain(distinct(1), distinct(2), distinct(3))
    other = block(distinct(90))
    put_all(tier, [first, second, third, other])
    assert tier.store(block(distinct(91)))
    assert third.id not in tier
    assert tier.store(block(distinct(92)))
    # The second became a leaf, and was used before the others.
    assert second.id not in tier
    assert tier.was_evicted(second.id)
    assert first.id in tier
    assert other.id in tier


def test_p6_what_is_asked_for_is_no_longer_the_oldest() -> None:
    tier = MemoryTier(2 * COST)
    first, second = block(distinct(1)), block(distinct(20))
    put_all(tier, [first, second])
    assert tier.lookup(first.id) is first
    assert tier.store(block(distinct(40)))
    assert first.id in tier
    assert second.id not in tier


def test_p6_a_block_in_use_is_never_evicted() -> None:
    tier = MemoryTier(3 * COST)
    used = chain(distinct(1), distinct(2))
    put_all(tier, used)
    tier.pin(used)
    for number in range(10, 60):
        tier.store(block(distinct(number)))
        assert all(each.id in tier for each in used)
    tier.unpin(used)
    put_all(tier, [block(distinct(number)) for number in (100, 200, 300)])
    assert not any(each.id in tier for each in used)


def test_p6_where_all_is_in_use_there_is_no_room() -> None:
    tier = MemoryTier(2 * COST)
    used = [block(distinct(1)), block(distinct(20))]
    put_all(tier, used)
    tier.pin(used)
    assert not tier.store(block(distinct(40)))
    assert len(tier) == 2


def test_p6_two_users_of_one_block_both_hold_it() -> None:
    tier = MemoryTier(COST)
    used = [block(distinct(1))]
    put_all(tier, used)
    tier.pin(used)
    tier.pin(used)
    tier.unpin(used)
    assert not tier.store(block(distinct(40)))
    tier.unpin(used)
    assert tier.store(block(distinct(40)))


def test_a_parent_is_not_evicted_for_its_child() -> None:
    tier = MemoryTier(COST)
    first, second = chain(distinct(1), distinct(2))
    assert tier.store(first)
    assert not tier.store(second)
    assert first.id in tier


def test_a_block_without_its_parent_is_not_kept() -> None:
    tier = MemoryTier(9 * COST)
    _, second = chain(distinct(1), distinct(2))
    assert not tier.store(second)
    assert len(tier) == 0


# The tree.


def test_p5_a_hit_leaves_the_entry_for_others() -> None:
    tier = MemoryTier(9 * COST)
    blocks = chain(distinct(1), distinct(2))
    put_all(tier, blocks)
    tiers = Tiers(tier)
    tokens = ids([*distinct(1), *distinct(2), 9])
    for _ in range(3):
        names = BlockNames(SIZE).of(ROOT, tokens)
        found = tiers.longest_prefix(ROOT, names, tokens, size=SIZE, rule=ANY_TOKEN)
        assert tiers.load(found, ANY_TOKEN).blocks == tuple(blocks)
    assert len(tier) == 2


def test_a_dropped_block_takes_along_what_follows_it_however_long() -> None:
    tier = MemoryTier(10_000 * COST)
    blocks = chain(*(distinct(number) for number in range(3_000)))
    put_all(tier, blocks)
    other = block(distinct(9_000))
    assert tier.store(other)
    tier.drop(blocks[0].id)
    assert len(tier) == 1
    assert tier.nbytes == other.nbytes
    assert not tier.was_evicted(blocks[0].id)
    tier.drop(blocks[0].id)


def test_a_tail_that_a_longer_block_covers_is_kept_once() -> None:
    for order in ([2, 3, 4], [4, 3, 2], [3, 4, 2]):
        tier = MemoryTier(9 * COST)
        for count in order:
            assert tier.store(block(distinct(1)[:count]))
        assert [len(each.tokens) for each in tier.children(ROOT)] == [4]
        assert tier.covers(ROOT, ids(distinct(1)[:3]))
        assert not tier.covers(ROOT, ids([1, 3]))
        assert not tier.covers(ROOT, ids(distinct(1)))


def test_a_tail_with_a_rest_of_its_own_is_kept_beside_a_longer_block() -> None:
    tier = MemoryTier(9 * COST)
    put_all(
        tier, [block([1, 2], tail_state=9), block(distinct(1), tail_state=9), block([1, 2, 3], tail_state=9)]
    )
    assert len(tier) == 3


def test_a_tail_in_use_is_not_dropped_for_a_longer_block() -> None:
    tier = MemoryTier(9 * COST)
    tail = block([1, 2])
    assert tier.store(tail)
    tier.pin([tail])
    assert tier.store(block(distinct(1)))
    assert tail.id in tier


def test_looking_for_what_is_not_there_leaves_nothing_behind() -> None:
    tier = MemoryTier(9 * COST)
    for number in range(100):
        nobody = BlockId(number.to_bytes(32, "little"))
        assert tier.lookup(nobody) is None
        assert list(tier.children(nobody)) == []
        tier.drop(nobody)
    assert not list(tier.children(ROOT))
    put_all(tier, chain(distinct(1), distinct(2)))
    tier.drop(block(distinct(1)).id)
    assert not list(tier.children(ROOT))
    assert not len(tier)


def test_clearing_forgets_all_figures_too() -> None:
    tier = MemoryTier(2 * COST)
    for number in range(9):
        assert tier.store(block(distinct(number)))
    tier.clear()
    assert (len(tier), tier.nbytes, tier.state_bytes, tier.evicted) == (0, 0, 0, 0)
    assert not tier.was_evicted(block(distinct(0)).id)
    put_all(tier, [block(distinct(1))])


@pytest.mark.parametrize("field", ["id", "parent", "start", "tokens", "checksum"])
def test_p2_a_damaged_header_breaks_no_tree(field: str) -> None:
    wrong: dict[str, Any] = {
        "id": ROOT,
        "parent": BlockId(bytes(32)),
        "start": 99,
        "tokens": ids([7, 7, 7, 7]),
        "checksum": b"?",
    }
    tier = MemoryTier(9 * COST)
    blocks = chain(distinct(1), distinct(2), distinct(3))
    put_all(tier, blocks)
    node = nodes_of(tier)[blocks[1].id]
    node.block = dataclasses.replace(node.block, **{field: wrong[field]})
    tiers = Tiers(tier)
    tokens = ids([*distinct(1), *distinct(2), *distinct(3)])
    names = BlockNames(SIZE).of(ROOT, tokens)
    found = tiers.longest_prefix(ROOT, names, tokens, size=SIZE, rule=ANY_TOKEN)
    match = tiers.load(found, ANY_TOKEN)
    assert match.blocks == (blocks[0],)
    assert match.length == SIZE
    # What follows a damaged block went with it, and all of it can be kept again.
    for each in blocks:
        tier.store(each)
    tier.drop(blocks[0].id)
    assert (len(tier), tier.nbytes, tier.state_bytes) == (0, 0, 0)
    assert not list(tier.children(ROOT))


# Any history, against a plain dictionary.

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=SIZE)


class TierMachine(RuleBasedStateMachine):
    """`held` is the model: blocks by name, in the order of their last use."""

    known = Bundle("known")

    @initialize(budget=st.integers(0, 12))
    def open(self, budget: int) -> None:
        self.tier = Watched(budget * COST)
        self.held: dict[BlockId, Block] = {}
        self.pinned: list[Block] = []

    def use(self, name: BlockId) -> None:
        self.held[name] = self.held.pop(name)

    def expect_room(self, size: int, spared: BlockId) -> bool:
        """Evict from the model as the tier must."""
        if size > self.tier.budget:
            return False
        while sum(each.nbytes for each in self.held.values()) + size > self.tier.budget:
            parents = {each.parent for each in self.held.values()}
            safe = {spared, *(each.id for each in self.pinned)}
            victim = next((name for name in self.held if name not in parents and name not in safe), None)
            if victim is None:
                return False
            del self.held[victim]
            assert victim not in self.tier
            assert self.tier.was_evicted(victim)
        return True

    @rule(target=known, tokens=tokens, tail_state=st.sampled_from([0, 0, 60]))
    def start(self, tokens: list[int], tail_state: int) -> Block:
        return self.put(block(tokens, tail_state=tail_state))

    @rule(target=known, parent=known, tokens=tokens, tail_state=st.sampled_from([0, 0, 60]))
    def follow(self, parent: Block, tokens: list[int], tail_state: int) -> Block:
        if len(parent.tokens) < SIZE:
            # Nothing follows a tail.
            return parent
        return self.put(block(tokens, parent, tail_state=tail_state))

    def put(self, new: Block) -> Block:
        kept = self.tier.store(new)
        siblings = [each for each in self.held.values() if each.parent == new.parent and each.id != new.id]
        covering = [each for each in siblings if _starts_with(each, new)]
        if new.id in self.held:
            self.use(new.id)
            before = self.held[new.id]
            if before.state_bytes < new.state_bytes:
                self.pinned.append(before)
                assert kept == self.expect_room(new.nbytes - before.nbytes, new.id)
                self.pinned.remove(before)
                if kept:
                    self.held[new.id] = new
        elif new.start and new.parent not in self.held:
            assert not kept
        elif new.tail_state is None and covering:
            assert kept
            # Which of several covers it does not matter; the tier says which it used.
            self.use(max(covering, key=lambda each: nodes_of(self.tier)[each.id].used).id)
        else:
            assert kept == self.expect_room(new.nbytes, new.parent)
            if kept:
                for each in siblings:
                    free = each.id in self.held and each.tail_state is None and each not in self.pinned
                    if free and _starts_with(new, each):
                        del self.held[each.id]
                self.held[new.id] = new
        return new

    @rule(name=known)
    def get(self, name: Block) -> None:
        assert self.tier.lookup(name.id) is self.held.get(name.id)
        if name.id in self.held:
            self.use(name.id)

    @rule(name=known)
    def drop(self, name: Block) -> None:
        self.tier.drop(name.id)
        drop_plan = [name.id]
        for gone in drop_plan:
            self.held.pop(gone, None)
            drop_plan += [each.id for each in self.held.values() if each.parent == gone]
        self.pinned = [each for each in self.pinned if each.id in self.held]

    @rule(name=known)
    def pin(self, name: Block) -> None:
        if name.id in self.held and len(self.pinned) < 3:
            self.tier.pin([name])
            self.pinned.append(self.held[name.id])

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            self.tier.unpin([self.pinned.pop()])

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.held, self.pinned = {}, []

    @invariant()
    def it_holds_just_that(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert nodes_of(self.tier).keys() == self.held.keys()
        assert self.tier.nbytes == sum(each.nbytes for each in self.held.values())
        assert self.tier.state_bytes == sum(each.state_bytes for each in self.held.values())
        assert max(self.tier.seen) <= self.tier.budget
        for name in [ROOT, *self.held]:
            following = {each.id for each in self.held.values() if each.parent == name}
            assert {each.id for each in self.tier.children(name)} == following


def _starts_with(longer: Block, shorter: Block) -> bool:
    count = len(shorter.tokens)
    return len(longer.tokens) > count and bool(np.array_equal(longer.tokens[:count], shorter.tokens))


def test_p6_any_history_keeps_what_a_plain_dictionary_would() -> None:
    run_state_machine_as_test(TierMachine, settings=settings(max_examples=150, stateful_step_count=40))


def test_names_are_what_a_tier_finds_by() -> None:
    tier = MemoryTier(9 * COST)
    kept = block(distinct(1))
    assert tier.store(kept)
    assert tier.lookup(block_id(ROOT, ids(distinct(1)))) is kept
    assert tier.lookup(block_id(ROOT, ids(distinct(2)))) is None
