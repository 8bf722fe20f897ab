"""Positions: the place of a token in time follows from the ids alone, also where an image takes fewer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from perdure.engine.context.ledger import Ledger
from perdure.engine.media import FIRST_ID, NEXT_ID, are_first, positions_of

Ids = NDArray[np.int32]


def text(count: int) -> Ids:
    return np.arange(7, 7 + count, dtype=np.int32)


def image(count: int, n_pos: int) -> Ids:
    """Ids of an image that takes `n_pos` positions; 0: one a token."""
    ids = np.full(count, NEXT_ID | 0x2AAAAAAA, np.uint32)
    ids[0] = FIRST_ID | n_pos << 14 | 0x1FFF
    return ids.view(np.int32)


parts = st.one_of(
    st.builds(text, st.integers(1, 9)),
    st.builds(image, st.integers(8, 30), st.integers(0, 8)),
)


def places_of(tokens: Ids) -> list[int]:
    """The position of every token and of the next one, walked one by one."""
    places, at, last, n_pos = [], 0, 0, 0
    for token, first in zip(tokens.tolist(), are_first(tokens).tolist(), strict=True):
        if n_pos and (token >= 0 or first):
            at, n_pos = last + n_pos, 0
        if first:
            last, n_pos = at, positions_of(token)
        places.append(last if n_pos else at)
        at += not n_pos
    return [*places, last + n_pos if n_pos else at]


@given(st.lists(parts, min_size=1, max_size=8), st.data())
def test_k4_positions_follow_from_the_ids(given: list[Ids], data: st.DataObject) -> None:
    """However a sequence came to hold its tokens: part by part, at once, as a copy, or cut and read on."""
    ledger = Ledger(3)
    for ids in given:
        if ids[0] >= 0:
            ledger.append(0, ids)
            continue
        # A large one is read in several steps.
        cut = data.draw(st.integers(0, len(ids)))
        for part in (ids[:cut], ids[cut:]):
            if len(part):
                ledger.append_medium(0, part)
    tokens = ledger.array(0)
    ledger.replace(1, tokens)
    ledger.copy(0, 2)
    for seq in range(3):
        check(ledger, seq)
    length = data.draw(st.integers(0, len(tokens)))
    ledger.cut(0, length)
    whole = ledger.cut_point(1, length)
    assert whole <= length
    assert whole == length or ledger.position(1, whole) == ledger.position(1, length)
    assert ledger.cut_point(1, whole) == whole
    check(ledger, 0)
    ledger.cut(0, whole)
    ledger.append(0, text(3))
    check(ledger, 0)
    ledger.cut(1, 0)
    assert not ledger.spans.get(1)


def check(ledger: Ledger, seq: int) -> None:
    tokens = ledger.array(seq)
    places = places_of(tokens)
    for index, place in enumerate(places):
        assert ledger.position(seq, index) == place
        if ledger.cut_point(seq, index) == index:
            assert ledger.index_of(seq, place) == index
    for length in range(1, len(tokens) + 1):
        assert ledger.newest(seq, length) == places[length - 1]
    assert ledger.newest(seq, 0) == -1


@pytest.mark.parametrize("n_pos", [0, 10])
def test_an_image_says_how_many_positions_it_takes(n_pos: int) -> None:
    ledger = Ledger(1)
    ledger.append(0, text(5))
    ledger.append_medium(0, image(80, n_pos))
    ledger.append(0, text(2))
    assert ledger.position(0, 85) == 5 + (n_pos or 80)
    assert bool(ledger.spans) == bool(n_pos)
    assert ledger.cut_point(0, 40) == (5 if n_pos else 40)
