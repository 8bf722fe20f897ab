"""Block files prove themselves: P2."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
import xxhash

from perdure.cache.block import Block, BlockId, block_id
from perdure.errors import CorruptStateError
from store.chains import block, chain, root, same

HEAD = 8 + 4 + 4 + 8 + 8 + 1 + 8 + 32 + 32 + 16

SHAPES = {
    "rows": block([1, 2, 3]),
    "rows and rest": block([1, 2, 3], tail_state=40),
    "rest only": block([1, 2, 3], row_bytes=None, tail_state=40),
    "neither": block([1, 2, 3], row_bytes=None),
    "empty rest": block([1, 2, 3], tail_state=0),
    "empty rows": block([1, 2, 3], row_bytes=0),
    "one token": block([-1]),
    "later": chain(list(range(11)), tail_state=5)[-1],
}


def packed(wanted: Block) -> bytes:
    return b"".join(wanted.pack())


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_packed_comes_back_in_every_byte(shape: str) -> None:
    before = SHAPES[shape]
    data = packed(before)
    after = Block.unpack(data, before.id)
    assert same(after, before)
    assert (after.id, after.parent, after.start, after.end) == (
        before.id,
        before.parent,
        before.start,
        before.end,
    )
    assert after.tokens.tolist() == before.tokens.tolist()
    for one, other in ((after.rows, before.rows), (after.tail_state, before.tail_state)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.shape == other.shape
            assert np.array_equal(one, other)
    assert after.checksum == before.checksum
    after.verify()


class CountedHash:
    """XXH3-128 that counts the bytes which it is given."""

    counted = 0

    def __init__(self, data: bytes | memoryview = b"") -> None:
        self._hash = _XXH3(data)
        CountedHash.counted += memoryview(data).nbytes

    def update(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        CountedHash.counted += memoryview(data).nbytes

    def digest(self) -> bytes:
        return self._hash.digest()


_XXH3 = xxhash.xxh3_128


def test_a_block_is_hashed_once_when_it_is_read_and_not_again_when_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = block([1, 2, 3], row_bytes=4096, tail_state=5000)
    monkeypatch.setattr(xxhash, "xxh3_128", CountedHash)
    CountedHash.counted = 0
    data = packed(before)
    assert CountedHash.counted == 0
    Block.unpack(data, before.id)
    assert CountedHash.counted == len(data) - 16


def test_p2_what_was_damaged_in_memory_before_it_was_written_is_refused_when_it_is_read() -> None:
    rows = block([1, 2, 3]).rows
    assert rows is not None
    wrong = rows.copy()
    wrong[1, 1] ^= 4
    with pytest.raises(CorruptStateError, match="checksum"):
        Block.unpack(packed(dataclasses.replace(block([1, 2, 3]), rows=wrong)))


@pytest.mark.parametrize("shape", SHAPES)
def test_its_size_is_known_before_it_is_made(shape: str) -> None:
    assert SHAPES[shape].file_size == len(packed(SHAPES[shape]))
    assert [len(part) for part in SHAPES[shape].pack()] == [
        memoryview(part).nbytes for part in SHAPES[shape].pack()
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_p2_a_flip_of_any_bit_of_any_header_byte_is_refused(shape: str) -> None:
    data = packed(SHAPES[shape])
    for place in range(HEAD):
        for bit in range(8):
            bad = bytearray(data)
            bad[place] ^= 1 << bit
            with pytest.raises(CorruptStateError):
                Block.unpack(bytes(bad))


def test_p2_a_flip_in_500_places_of_the_payload_is_refused() -> None:
    big = block(list(range(64)), row_bytes=300, tail_state=5000)
    data = packed(big)
    dice = np.random.default_rng(5)
    places = {HEAD, HEAD + 4 * 64, len(data) - 5000, len(data) - 1}
    places |= {int(place) for place in dice.choice(np.arange(HEAD, len(data)), 500, replace=False)}
    assert len(places) >= 500
    for place in places:
        bad = bytearray(data)
        bad[place] ^= 1 << int(dice.integers(8))
        with pytest.raises(CorruptStateError):
            Block.unpack(bytes(bad), big.id)


@pytest.mark.parametrize("shape", SHAPES)
def test_p2_a_file_cut_anywhere_is_refused(shape: str) -> None:
    data = packed(SHAPES[shape])
    for length in range(len(data)):
        with pytest.raises(CorruptStateError):
            Block.unpack(data[:length])


@pytest.mark.parametrize("more", [b"\0", b"x" * 100])
def test_p2_a_file_with_more_behind_it_is_refused(more: bytes) -> None:
    with pytest.raises(CorruptStateError):
        Block.unpack(packed(SHAPES["rows"]) + more)


def test_p2_another_whole_block_under_this_name_is_refused() -> None:
    first, second = chain(list(range(8)))
    Block.unpack(packed(second), second.id)
    with pytest.raises(CorruptStateError, match="not the block that it is named"):
        Block.unpack(packed(second), first.id)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("tokens", 0),
        ("tokens", 2**32 - 1),
        ("start", 2**63),
        ("start", 2**64 - 1),
        ("row_bytes", 2**63),
        ("rows", 2),
        ("tail_state", 2**64 - 2),
        ("id", bytes(32)),
        ("parent", bytes(32)),
    ],
)
def test_a_header_that_lies_is_refused_also_with_a_right_checksum(field: str, value: int | bytes) -> None:
    good = block([1, 2, 3], tail_state=40)
    names = ["magic", "version", "tokens", "start", "row_bytes", "rows", "tail_state", "id", "parent"]
    head = struct.Struct("<8sIIQQBQ32s32s")
    data = packed(good)
    values = dict(zip(names, head.unpack_from(data), strict=True)) | {field: value}
    start, body = head.pack(*values.values()), data[HEAD:]
    with pytest.raises(CorruptStateError):
        Block.unpack(start + xxhash.xxh3_128(start + body).digest() + body)


def test_no_tokens_at_all_are_no_block() -> None:
    none = np.empty(0, np.int32)
    name = block_id(root(), none)
    head = struct.pack("<8sIIQQBQ32s32s", b"PERDBLK\0", 1, 0, 0, 0, 0, 2**64 - 1, name, root())
    with pytest.raises(CorruptStateError, match="0 tokens"):
        Block.unpack(head + xxhash.xxh3_128(head).digest(), BlockId(name))
