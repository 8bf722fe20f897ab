"""Eviction: what conversations have left goes first, and nobody pushes another out beyond his share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from numpy.typing import NDArray

from counting import size_of
from inside import nodes_of
from perdure.cache.block import Block, BlockId, chain, cost
from perdure.cache.eviction import Eviction, EvictionClass, Use, worth
from perdure.cache.slots.cache import SlotCache
from perdure.cache.tiers.disk import DiskTier
from perdure.cache.tiers.memory import MemoryTier
from perdure.decode.sequence import SlotAssignment
from perdure.engine.context import Context
from perdure.testing.toy import ToyModel

if TYPE_CHECKING:
    from perdure.ext.cluster.shared import SharedTier

SIZE = 4
ROOTS = {name: BlockId(name.encode().ljust(32, b".")) for name in ("ann", "bob", "cat")}
COST = cost(SIZE, 100, 0)


def parts(*numbers: int) -> list[int]:
    """Tokens of whole blocks, each told by a number."""
    return [token for number in numbers for token in (number, number, 0, 1)]


def told(
    tier: MemoryTier | DiskTier | SharedTier, tokens: Sequence[int], use: Use
) -> tuple[BlockId, NDArray[np.int32], list[BlockId]]:
    """A tier is told of a request of these tokens: where its chain starts, the tokens, the blocks."""
    root, ids = ROOTS[use.namespace], np.array(tokens, np.int32)
    names = list(chain(root, ids, SIZE))
    tier.eviction.owns(root, use.namespace)
    tier.revalue(tier.eviction.use(names, use))
    tier.eviction.write(names, [], use)
    return root, ids, names


def store(tier: MemoryTier, tokens: Sequence[int], use: Use) -> list[BlockId]:
    """A request of these tokens, and their blocks stored behind it; which of them are kept."""
    root, ids, names = told(tier, tokens, use)
    parent, start = root, 0
    for name in names:
        rows = np.ones((SIZE, 100), np.uint8)
        block = Block.make(parent, start, ids[start : start + SIZE], rows, None)
        assert block.id == name
        if not tier.store(block):
            break
        parent, start = name, start + SIZE
    return [name for name in names if name in tier]


def talk(name: str, namespace: str = "ann") -> Use:
    return Use(namespace, name)


TITLE = Use("ann", "", side=True)


# What goes first.


def test_the_order_is_superseded_side_conversation_shared_kept() -> None:
    values = [worth(eviction_class, 1000, 500) for eviction_class in EvictionClass]
    assert values == sorted(values)
    assert len(set(values)) == len(values)


def test_a_side_request_evicts_no_conversation() -> None:
    tier = MemoryTier(3 * COST)
    main = store(tier, parts(1, 2, 3), talk("main"))
    assert store(tier, parts(9), TITLE) == []
    assert all(name in tier for name in main)
    assert tier.evicted == 0


def test_finished_side_requests_go_before_conversations_however_old() -> None:
    tier = MemoryTier(3 * COST)
    main = store(tier, parts(1), talk("main"))
    side = store(tier, parts(8, 9), TITLE)
    assert len(side) == 2
    store(tier, parts(5, 6), talk("other"))
    assert main[0] in tier
    assert not any(name in tier for name in side)
    assert tier.evicted_as == {"side": 2}


def test_what_a_conversation_left_goes_first_once_it_went_on() -> None:
    """An edit: the line before it is worth nothing when the new one is gone on with."""
    tier = MemoryTier(5 * COST)
    left = store(tier, parts(1, 2, 3), talk("main"))
    store(tier, parts(1, 7), talk("main"))
    assert tier.eviction.class_of(left[1]) is EvictionClass.CONVERSATION
    store(tier, parts(1, 7, 8), talk("main"))
    assert tier.eviction.class_of(left[1]) is EvictionClass.SUPERSEDED
    assert tier.eviction.class_of(left[0]) is EvictionClass.CONVERSATION
    store(tier, parts(4, 5), talk("other"))
    assert left[0] in tier
    assert not any(name in tier for name in left[1:])
    assert tier.evicted_as == {"superseded": 2}


def test_a_reply_that_is_read_otherwise_is_left_at_once() -> None:
    """The prompt is all there: only what was written behind it is not."""
    rule = Eviction()
    prompt, whole = chained(parts(1, 2)), chained(parts(1, 2, 3))
    rule.use(prompt, talk("main"))
    rule.write(whole, [], talk("main"))
    assert rule.use(chained(parts(1, 2, 4)), talk("main")) == [whole[2]]
    assert rule.class_of(whole[2]) is EvictionClass.SUPERSEDED


def test_what_was_left_is_worth_something_again_when_it_is_gone_back_to() -> None:
    rule = Eviction()
    rule.use(chained(parts(1, 2, 3)), talk("main"))
    rule.use(chained(parts(1, 5)), talk("main"))
    rule.use(chained(parts(1, 5, 6)), talk("main"))
    names = chained(parts(1, 2, 3))
    assert rule.class_of(names[2]) is EvictionClass.SUPERSEDED
    assert names[2] in rule.use(names, talk("main"))
    assert rule.class_of(names[2]) is EvictionClass.CONVERSATION


def test_a_title_under_the_name_of_a_conversation_leaves_that_as_it_is() -> None:
    """Nobody said that it is a side request: it is never gone on with."""
    rule = Eviction()
    main = chained(parts(1, 2, 3))
    rule.use(main, talk("main"))
    rule.use(chained(parts(9)), talk("main"))
    rule.use(chained(parts(1, 2, 3, 4)), talk("main"))
    assert {rule.class_of(name) for name in main} == {EvictionClass.CONVERSATION}
    assert rule.class_of(chained(parts(9))[0]) is EvictionClass.SUPERSEDED


def test_a_shared_beginning_outlasts_conversations_that_are_younger_but_not_for_ever() -> None:
    tier = MemoryTier(4 * COST)
    [beginning, *_] = store(tier, parts(1, 2), talk("one"))
    store(tier, parts(1, 3), talk("two"))
    assert tier.eviction.class_of(beginning) is EvictionClass.SHARED
    for number in range(10, 14):
        store(tier, parts(number), talk(f"later {number}"))
    assert beginning in tier
    for number in range(20, 60):
        store(tier, parts(number), talk(f"later {number}"))
    assert beginning not in tier
    assert tier.evicted_as["shared"] == 1


def test_a_warmed_prefix_outlasts_shared_beginnings() -> None:
    tier = MemoryTier(2 * COST)
    [warmed] = store(tier, parts(1), talk("one"))
    tier.eviction.keep([warmed])
    tier.revalue([warmed])
    for number in range(10, 14):
        store(tier, parts(number), talk(f"later {number}"))
    assert warmed in tier
    tier.eviction.release([warmed])
    tier.revalue([warmed])
    for number in range(20, 24):
        store(tier, parts(number), talk(f"later {number}"))
    assert warmed not in tier


def test_what_is_known_of_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.cache.eviction._BLOCKS", 64)
    monkeypatch.setattr("perdure.cache.eviction._NAMES", 64)
    rule = Eviction()
    sizes = []
    for number in range(400):
        rule.use(chained(parts(number, 1, 2)), talk(f"talk {number}"))
        sizes.append(size_of(rule))
    assert max(sizes[100:]) <= 1.1 * max(sizes[:100])


# Shares.


def test_a_namespace_takes_no_more_than_its_share_from_another() -> None:
    tier = MemoryTier(8 * COST)
    anns = store(tier, parts(1, 2, 3), talk("main"))
    for number in range(10, 40):
        store(tier, parts(number), talk(f"talk {number}", "bob"))
    assert all(name in tier for name in anns)
    assert tier.nbytes == 8 * COST


def test_a_namespace_that_nobody_asks_for_loses_its_share() -> None:
    tier = MemoryTier(4 * COST)
    anns = store(tier, parts(1, 2), talk("main"))
    for number in range(10, 40):
        store(tier, parts(number), talk(f"talk {number}", "bob"))
    assert not any(name in tier for name in anns)


def on_disk(tier: DiskTier | SharedTier, tokens: Sequence[int], use: Use) -> list[BlockId]:
    """The same on a disk."""
    root, ids, names = told(tier, tokens, use)
    blocks = [
        Block.make(parent, start, ids[start : start + SIZE], np.ones((SIZE, 100), np.uint8), None)
        for parent, start in zip([root, *names], range(0, len(ids), SIZE), strict=False)
    ]
    tier.store(blocks)
    return [name for name in names if tier.lookup(name) is not None]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_namespace_takes_no_more_than_its_share_of_a_disk_from_another(
    tmp_path: Path, restarts: bool
) -> None:
    """Also where it fills the disk in one go, and where whose the blocks are is read from the disk."""
    [one] = on_disk(DiskTier(tmp_path / "a", budget=10**6), parts(1), talk("main"))
    assert one
    size = DiskTier(tmp_path / "a", budget=10**6, readonly=True).nbytes
    tier = DiskTier(tmp_path / "b", budget=8 * size + size // 2)
    anns = on_disk(tier, parts(1, 2, 3), talk("main"))
    assert len(anns) == 3
    for number in range(10, 24):
        if restarts:
            tier.close()
            tier = DiskTier(tmp_path / "b", budget=tier.budget)
            tier.eviction.owns(ROOTS["ann"], "ann")
        on_disk(tier, parts(number), talk(f"talk {number}", "bob"))
    on_disk(tier, parts(*range(30, 38)), talk("long", "bob"))
    assert all(tier.lookup(name) is not None for name in anns)
    assert 7 * size <= tier.nbytes <= tier.budget
    tier.close()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Callable[[int], SharedTier]]:
    from perdure.ext.cluster.places import DirectoryPlace
    from perdure.ext.cluster.shared import SharedTier

    with ExitStack() as held:

        def opened(budget: int) -> SharedTier:
            place = DirectoryPlace(tmp_path / str(budget))
            return held.enter_context(closing(SharedTier(place, key=b"k" * 32, identity=b"i", budget=budget)))

        yield opened


@pytest.mark.extension("cluster")
def test_a_namespace_takes_no_more_than_its_share_of_a_shared_tier_from_another(
    shared: Callable[[int], SharedTier],
) -> None:
    """And one that is not known here is an owner by itself; a title evicts nobody's conversation."""
    plenty = shared(10**6)
    assert on_disk(plenty, parts(1), talk("main"))
    size = plenty.nbytes
    tier = shared(8 * size + size // 2)
    anns = on_disk(tier, parts(1, 2, 3), talk("main"))
    assert len(anns) == 3
    for number in range(10, 24):
        on_disk(tier, parts(number), talk(f"talk {number}", "bob"))
    on_disk(tier, parts(*range(30, 38)), talk("long", "bob"))
    assert all(tier.lookup(name) is not None for name in anns)
    assert 7 * size <= tier.nbytes <= tier.budget
    assert on_disk(tier, parts(99), Use("bob", side=True)) == []
    assert tier.written > tier.nbytes


def test_a_namespace_on_a_disk_that_nobody_asks_for_loses_its_share(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, budget=10**6)
    anns = on_disk(tier, parts(1, 2), talk("main"))
    tier.budget = 2 * tier.nbytes
    for number in range(10, 40):
        on_disk(tier, parts(number), talk(f"talk {number}", "bob"))
    assert not any(tier.lookup(name) for name in anns)
    tier.close()


def chained(tokens: Sequence[int]) -> list[BlockId]:
    return list(chain(ROOTS["ann"], np.array(tokens, np.int32), SIZE))


class EvictionMachine(RuleBasedStateMachine):
    """Conversations of three namespaces, with edits and titles, in a tier that is too small."""

    @initialize(budget=st.integers(2, 24))
    def open(self, budget: int) -> None:
        self.tier = MemoryTier(budget * COST)
        self.budget = budget * COST

    @rule(
        who=st.sampled_from(sorted(ROOTS)),
        which=st.integers(0, 2),
        tokens=st.lists(st.integers(1, 3), min_size=1, max_size=6),
        side=st.booleans(),
    )
    def ask(self, who: str, which: int, tokens: list[int], side: bool) -> None:
        tier = self.tier
        before = dict(tier.owner_bytes)
        wanted = {name for name in nodes_of(tier) if not tier.eviction.class_of(name).is_unwanted}
        names = list(chain(ROOTS[who], np.array(parts(*tokens), np.int32), SIZE))
        store(tier, parts(*tokens), Use(who, "" if side else f"talk {which}", side))
        if side and all(tier.eviction.class_of(name).is_unwanted for name in names):
            # Else it brings back what a conversation had before.
            assert wanted <= nodes_of(tier).keys()
        share = self.budget // len({*before, who})
        for other, nbytes in before.items():
            if other != who and nbytes <= share and self.is_active(other):
                assert tier.owner_bytes.get(other) == nbytes

    def is_active(self, owner: str) -> bool:
        return self.tier.clock - self.tier.owner_used.get(owner, -(10**9)) < 3 * self.budget

    @invariant()
    def it_adds_up(self) -> None:
        if hasattr(self, "tier"):
            tier = self.tier
            assert tier.nbytes <= self.budget
            assert sum(tier.owner_bytes.values()) == tier.nbytes
            assert sum(tier.evicted_as.values()) == tier.evicted
            sizes: dict[str, int] = {}
            for node in nodes_of(tier).values():
                sizes[node.owner] = sizes.get(node.owner, 0) + node.block.nbytes
                assert not node.block.start or node.parent in nodes_of(tier)
            assert sizes == tier.owner_bytes


def test_no_history_has_a_namespace_or_a_side_request_push_out_what_it_may_not() -> None:
    run_state_machine_as_test(
        EvictionMachine, settings=settings(max_examples=25, stateful_step_count=30, deadline=None)
    )


# Slots.


def serve(cache: SlotCache, context: Context, tokens: Sequence[int], use: Use) -> SlotAssignment:
    ids = np.array(tokens, np.int32)
    place = cache.acquire(ids, namespace=use.namespace, conversation=use.conversation, side=use.side)
    assert isinstance(place, SlotAssignment)
    context.decode(ids[place.cached :], place.seq, rows="none")
    cache.release(place.seq)
    return place


def test_a_side_request_gives_its_slot_first() -> None:
    with ToyModel().context(n_ctx=512, n_seq=2) as context:
        cache = SlotCache(context, budget=1 << 20, block_size=SIZE)
        main = serve(cache, context, parts(1, 2), talk("main"))
        title = serve(cache, context, parts(*range(20, 60)), TITLE)
        assert title.seq != main.seq
        # A conversation that is shorter and older would be cheaper to move.
        assert serve(cache, context, parts(5, 6), talk("other")).seq == title.seq
        assert serve(cache, context, parts(1, 2, 3), talk("main")).cached == len(parts(1, 2))


def test_a_compaction_takes_the_slot_of_what_it_replaces() -> None:
    with ToyModel().context(n_ctx=512, n_seq=2) as context:
        cache = SlotCache(context, budget=1, block_size=SIZE)
        old = serve(cache, context, parts(1, 2, 3, 4, 5, 6), talk("main"))
        new = serve(cache, context, parts(1, 9), talk("main"))
        serve(cache, context, parts(1, 9, 8), talk("main"))
        assert new.seq != old.seq
        assert serve(cache, context, parts(70, 71), talk("other")).seq == old.seq
