"""What slots hold, and the checkpoints of one."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from perdure.cache.slots.checkpoint_store import CheckpointList, PrefixHash
from perdure.cache.slots.checkpoints import Point
from perdure.cache.slots.placement import SlotTable
from perdure.engine.adapters import PLAIN
from perdure.testing.toy import ToyModel

TEXT = st.lists(st.integers(0, 2), max_size=8)
CHANGES = st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab"), TEXT), max_size=30)


@example([(0, "a", [0] * 8), (1, "a", [0] * 6 + [1]), (2, "a", [0] * 3)], [0] * 7, 4)
@given(CHANGES, TEXT, st.sampled_from([4, 16]))
def test_what_slots_share_with_a_prompt_is_what_they_begin_alike_with_in_its_namespace(
    changes: list[tuple[int, str, list[int]]], text: list[int], n_ctx: int
) -> None:
    """Also where they are longer than the beginning that is compared at once."""
    with ToyModel().context(n_ctx=n_ctx, n_seq=6) as context:
        table = SlotTable(context, swap_slots=0)
    held = dict[int, tuple[str, list[int]]]()
    for seq, namespace, tokens in changes:
        table.acquire(table.all[seq], namespace)
        table.put(seq, np.array(tokens, np.int32))
        held[seq] = namespace, tokens
    for namespace in "ab":
        expected = [
            next((at for at in range(9) if held[seq][1][: at + 1] != text[: at + 1] or at == len(text)), 0)
            if seq in held and held[seq][0] == namespace
            else 0
            for seq in range(6)
        ]
        assert table.shared(namespace, np.array(text, np.int32), PLAIN).tolist() == expected
    assert table.lengths.tolist() == [len(held.get(seq, ("", []))[1]) for seq in range(6)]


def test_checkpoints_hold_no_tokens_and_are_known_by_their_hash() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    passed, points = PrefixHash(b"identity"), CheckpointList()
    for length in range(100, 1001, 100):
        digest = passed.advance(tokens[passed.length : length])
        points.add(Point(length, digest, np.zeros(10, np.uint8)))
    # The size of each is that of its state, however many tokens came before.
    assert points.nbytes == 10 * points.last.nbytes if points.last else False
    assert [point.length for point in points.on_path(b"identity", tokens[:555])] == [100, 200, 300, 400, 500]
    changed = tokens.copy()
    changed[250] = 7
    assert [point.length for point in points.on_path(b"identity", changed)] == [100, 200]
    assert not len(points.on_path(b"another", tokens))
    points.thin_out()
    assert [point.length for point in points] == [200, 400, 600, 800, 1000]
