"""Blocks that follow one block: found by two neighbours, whatever their number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from perdure.cache.block import Block, BlockId
from perdure.cache.prefix_search import (
    beginnings,
    best_child,
    common_prefix_length,
    continuations,
    key_of,
    merged,
)
from perdure.cache.sorted_keys import ChildIndex

ROOT = BlockId(bytes(32))
TEXTS = st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5), max_size=40)


@dataclass(frozen=True)
class Held:
    tokens: NDArray[np.int32]


class Shelf:
    """Blocks of one parent. It counts how many are looked at."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.siblings = ChildIndex()
        self.held = {}
        self.seen = 0
        for text in texts:
            ids = np.array(text, np.int32)
            name = BlockId(key_of(ids))
            self.siblings.add(key_of(ids), name)
            self.held[name] = Held(ids)

    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[Held]:
        for name in self.siblings.walk(start, back=back):
            self.seen += 1
            yield self.held[name]


def ids(text: list[int]) -> NDArray[np.int32]:
    return np.array(text, np.int32)


@given(TEXTS, st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_neighbours_tell_what_a_look_at_all_would(texts: list[list[int]], text: list[int]) -> None:
    shelf, wanted = Shelf(texts), ids(text)
    every = [each.tokens for each in shelf.held.values()]
    assert best_child(shelf, ROOT, wanted)[0] == max(
        (common_prefix_length(each, wanted) for each in every), default=0
    )
    found = [each.tokens.tolist() for each in beginnings(shelf, ROOT, wanted)]
    assert found == sorted(
        (each.tolist() for each in every if common_prefix_length(each, wanted) == len(each)),
        key=len,
        reverse=True,
    )
    longer = [each.tokens.tolist() for each in continuations(shelf, ROOT, wanted)]
    assert sorted(longer) == sorted(
        each.tolist()
        for each in every
        if len(each) >= len(text) and common_prefix_length(each, wanted) == len(text)
    )


@given(TEXTS, st.data())
def test_any_order_of_adding_and_removing_stays_sorted(texts: list[list[int]], data: st.DataObject) -> None:
    siblings, known = ChildIndex(), dict[bytes, bytes]()
    for text in texts:
        key = key_of(ids(text))
        if data.draw(st.booleans()) and known:
            gone = data.draw(st.sampled_from(sorted(known)))
            siblings.remove(gone)
            del known[gone]
        siblings.add(key, BlockId(key))
        known[key] = key
    assert list(siblings.walk()) == sorted(known)
    assert list(siblings.walk(b"\xff" * 40, back=True)) == sorted(known, reverse=True)
    assert len(siblings) == len(known)


def test_a_look_reads_as_many_of_ten_thousand_siblings_as_of_ten() -> None:
    dice = np.random.default_rng(7)
    looked = []
    for count in (10, 100, 10_000):
        # All share a beginning, as prompts under one system prompt do.
        shelf = Shelf([[1, 2, *dice.integers(0, 30_000, 4).tolist()] for _ in range(count)])
        for _ in range(50):
            best_child(shelf, ROOT, ids([1, 2, *dice.integers(0, 30_000, 4).tolist()]))
            next(beginnings(shelf, ROOT, ids([1, 2, 3, 4])), None)
            next(continuations(shelf, ROOT, ids([5])), None)
        looked.append(shelf.seen)
        for name in list(shelf.siblings.walk())[::2]:
            shelf.siblings.remove(name)
        assert len(shelf.siblings) == count // 2
    assert looked[2] <= 50 * 5


def test_what_both_tiers_hold_is_read_once_and_no_further_than_asked() -> None:
    read = 0

    def walk(count: int) -> Iterator[Block]:
        nonlocal read
        for number in range(count):
            read += 1
            yield Block.make(ROOT, 0, ids([number]), None, None)

    found = merged([walk(10_000), walk(10_000)], back=False)
    assert [int(next(found).tokens[0]) for _ in range(3)] == [0, 1, 2]
    assert read <= 8
    assert len(list(merged([walk(50), walk(70)], back=False))) == 70


def test_p5_of_what_several_tiers_hold_the_one_with_a_tail_state_counts() -> None:
    """P5: a tier that has more of a block's state than an earlier one is not hidden by it."""
    bare = Block.make(ROOT, 0, ids([1]), None, None)
    full = Block.make(ROOT, 0, ids([1]), None, np.zeros(3, np.uint8))
    for walks in ([bare], [full]), ([full], [bare]), ([bare], [bare], [full]):
        assert list(merged([iter(walk) for walk in walks], back=False)) == [full]
    assert list(merged([iter([bare]), iter([bare])], back=True)) == [bare]
