"""What slots hold, sorted: the same as a comparison with each of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from perdure.cache.siblings import common, key_of
from perdure.cache.slots.slot_checkpoints import Checkpoints, Point, PrefixHash
from perdure.cache.slots.slot_table import SlotIndex, common_tokens

TEXT = st.lists(st.integers(0, 2), max_size=8)
CHANGES = st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab"), TEXT), max_size=30)


@given(CHANGES, TEXT)
def test_what_slots_share_with_a_prompt_is_what_a_comparison_with_each_finds(
    changes: list[tuple[int, str, list[int]]], text: list[int]
) -> None:
    index, held = SlotIndex(6), dict[int, tuple[str, list[int]]]()
    for seq, space, tokens in changes:
        index.put(seq, space, np.array(tokens, np.int32))
        held[seq] = space, tokens
    wanted = np.array(text, np.int32)
    for asked in "ab":
        expected = [
            common(np.array(held[seq][1], np.int32), wanted) if seq in held and held[seq][0] == asked else 0
            for seq in range(6)
        ]
        assert index.shared(asked, wanted).tolist() == expected
    for seq in range(6):
        index.remove(seq)
    assert not index._spaces


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6),
    st.sampled_from([0, 1, 250, 255, 256, 300]),
)
def test_keys_of_any_length_share_what_their_tokens_do(
    first: list[int], second: list[int], same: int
) -> None:
    a, b = (np.array([*range(same), *rest], np.int32) for rest in (first, second))
    assert common_tokens(key_of(a), key_of(b)) == common(a, b)


def test_checkpoints_hold_no_tokens_and_are_known_by_their_hash() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    passed, points = PrefixHash(b"identity"), Checkpoints()
    for length in range(100, 1001, 100):
        digest = passed.advance(tokens[passed.length : length])
        points.add(Point(length, digest, np.zeros(10, np.uint8)))
    # The size of each is that of its state, however many tokens came before.
    assert points.nbytes == 10 * points.last.nbytes if points.last else False
    assert [point.length for point in points.along(b"identity", tokens[:555])] == [100, 200, 300, 400, 500]
    changed = tokens.copy()
    changed[250] = 7
    assert [point.length for point in points.along(b"identity", changed)] == [100, 200]
    assert not len(points.along(b"another", tokens))
    points.thin_out()
    assert [point.length for point in points] == [200, 400, 600, 800, 1000]
