"""A block's name says all that its state depends on, and its checksum covers all that it is."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from perdure import CorruptStateError, InvalidInputError
from perdure.cache.block import Block, BlockId, block_id, chain, root_id
from perdure.cache.block_cache import BlockNames
from perdure.identity import Identity

FIELDS = [field.name for field in dataclasses.fields(Identity)]
IDENTITY = Identity(**{name: f"some {name}" for name in FIELDS})


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def root(identity: Identity = IDENTITY, **changed: Any) -> BlockId:
    return root_id(identity, **{"block_size": 64, "mode": "full", "namespace": "", **changed})


def made(
    tokens: Sequence[int] = (1, 2, 3), *, start: int = 0, rows: bool = True, tail_state: bool = True
) -> Block:
    data = np.random.default_rng(len(tokens)).integers(0, 256, (len(tokens), 40), np.uint8)
    extra = np.random.default_rng(7).integers(0, 256, 90, np.uint8)
    return Block.make(root(), start, ids(*tokens), data if rows else None, extra if tail_state else None)


# Names.


@pytest.mark.parametrize("field", FIELDS)
def test_p1_another_identity_is_another_chain(field: str) -> None:
    """P1."""
    other = dataclasses.replace(IDENTITY, **{field: "another"})
    assert root(other) != root()
    assert block_id(root(other), ids(1, 2)) != block_id(root(), ids(1, 2))


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 1), max_size=12), st.integers(0, 6)))
)
def test_p1_remembered_names_are_those_that_a_hash_gives(asked: list[tuple[str, list[int], int]]) -> None:
    """P1. Whatever was asked before, in whatever namespace, and whenever the rest of it is taken."""
    names, begun = BlockNames(2), []
    for namespace, tokens, count in asked:
        start = root(namespace=namespace)
        expected = list(chain(start, ids(*tokens), 2))
        found = names.of(start, ids(*tokens))
        assert list(itertools.islice(found, count)) == expected[:count]
        begun.append((found, expected[count:]))
    for found, rest in begun:
        assert list(found) == rest


def test_p1_two_fields_that_trade_their_words_are_another_identity() -> None:
    assert root(dataclasses.replace(IDENTITY, k_type="a", v_type="b")) != root(
        dataclasses.replace(IDENTITY, k_type="b", v_type="a")
    )


@pytest.mark.parametrize("field", FIELDS)
def test_p1_an_empty_field_has_no_name_at_all(field: str) -> None:
    with pytest.raises(InvalidInputError, match=field):
        dataclasses.replace(IDENTITY, **{field: ""})


def test_p1_p7_block_size_mode_and_namespace_are_in_the_name() -> None:
    names = {
        root(),
        root(block_size=32),
        root(mode="sliding"),
        root(namespace="a"),
        root(namespace="b"),
        # What is split elsewhere must not read the same.
        root(mode="full2", block_size=6),
        root(mode="ab", namespace="c"),
        root(mode="a", namespace="bc"),
    }
    assert len(names) == 8


@pytest.mark.parametrize(("block_size", "mode"), [(0, "full"), (-1, "full"), (64, "")])
def test_p1_a_chain_without_a_size_or_a_mode_is_refused(block_size: int, mode: str) -> None:
    with pytest.raises(InvalidInputError, match="a chain needs"):
        root(block_size=block_size, mode=mode)


def test_p1_parent_and_tokens_are_in_the_name() -> None:
    first = block_id(root(), ids(1, 2))
    assert block_id(first, ids(3)) != block_id(root(), ids(3))
    assert block_id(root(), ids(1)) != first
    assert block_id(root(), ids(2, 1)) != first
    assert block_id(block_id(root(), ids(1)), ids(2)) != first


@given(
    one=st.lists(st.integers(0, 2**31 - 1), max_size=4), other=st.lists(st.integers(0, 2**31 - 1), max_size=4)
)
def test_p1_the_same_name_means_the_same_tokens(one: list[int], other: list[int]) -> None:
    assert (block_id(root(), ids(*one)) == block_id(root(), ids(*other))) == (one == other)


def test_p1_names_are_the_same_in_another_process() -> None:
    """Python's `hash` differs in each, so nothing of it can be in a name."""
    script = f"""
import numpy as np
from perdure.cache.block import block_id, root_id
from perdure.identity import Identity
identity = Identity(**{dataclasses.asdict(IDENTITY)!r})
root = root_id(identity, block_size=64, mode="full", namespace="")
print(block_id(root, np.array([1, 2], np.int32)).hex())
"""
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        assert done.stdout.decode().strip() == block_id(root(), ids(1, 2)).hex()


def test_p1_the_width_of_the_integers_does_not_matter() -> None:
    wide: NDArray[Any] = np.array([1, 2], np.int64)
    assert block_id(root(), wide) == block_id(root(), ids(1, 2))


# Checksums.


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("tail_state", [True, False])
def test_p2_a_block_as_it_was_made_is_sound(rows: bool, tail_state: bool) -> None:
    made(rows=rows, tail_state=tail_state).verify()


@pytest.mark.parametrize(
    "changed",
    [
        {"id": block_id(root(), ids(9))},
        {"parent": root(namespace="another")},
        {"start": 64},
        {"start": -1},
        {"tokens": ids(1, 2, 4)},
        {"tokens": ids(1, 2)},
        {"rows": None},
        {"tail_state": None},
        {"rows": made().tail_state, "tail_state": made().rows},
        {"checksum": bytes(16)},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_p2_a_changed_part_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CorruptStateError):
        dataclasses.replace(made(), **changed).verify()


def test_p2_the_state_of_another_block_is_refused_even_with_its_own_checksum() -> None:
    mine, other = made((1, 2, 3)), made((1, 2, 4))
    with pytest.raises(CorruptStateError):
        dataclasses.replace(
            mine, rows=other.rows, tail_state=other.tail_state, checksum=other.checksum
        ).verify()


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7), part=st.sampled_from(["rows", "tail_state"]))
def test_p2_any_flipped_bit_of_the_state_is_seen(place: int, bit: int, part: str) -> None:
    block = made()
    data = getattr(block, part).copy()
    data.reshape(-1)[place % data.size] ^= 1 << bit
    with pytest.raises(CorruptStateError, match="tokens 0 to 3"):
        dataclasses.replace(block, **{part: data}).verify()


def test_a_block_counts_all_that_it_keeps() -> None:
    block = made()
    assert block.rows is not None
    assert block.tail_state is not None
    assert block.state_bytes == block.rows.nbytes + block.tail_state.nbytes
    assert block.nbytes > block.state_bytes + block.tokens.nbytes
    assert (block.start, block.end) == (0, 3)
