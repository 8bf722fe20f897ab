"""A block as bytes that describe and prove themselves.

    magic 8 | version u32 | tokens u32 | start u64 | row bytes u64 | rows u8 | rest bytes u64 (2**64-1: none)
    | id 32 | parent 32 | checksum 16
    token ids i32 each | rows | rest

All little-endian. The checksum (XXH3-128) is over every other byte of the file. The id is the SHA-256 of
parent and tokens, so a file under another block's name proves itself wrong.
"""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from perdure.cache.block import Block, BlockId, block_id
from perdure.errors import CorruptStateError

MAGIC = b"PERDBLK\x00"
VERSION = 1
_HEAD = struct.Struct("<8sIIQQBQ32s32s16s")
_CHECKSUM = slice(_HEAD.size - 16, _HEAD.size)
_NONE = 2**64 - 1


def size(block: Block) -> int:
    """How long the file of `block` is."""
    return _HEAD.size + 4 * len(block.tokens) + block.state_bytes


def pack(block: Block) -> list[bytes | memoryview]:
    """The parts of the file of `block`, in order."""
    rows, tail_state = block.rows, block.tail_state
    words: list[bytes | memoryview] = [block.tokens.astype("<i4").tobytes()]
    words += [part.reshape(-1).data for part in (rows, tail_state) if part is not None]
    head = _HEAD.pack(
        MAGIC,
        VERSION,
        len(block.tokens),
        block.start,
        0 if rows is None else rows.shape[1],
        rows is not None,
        _NONE if tail_state is None else tail_state.nbytes,
        block.id,
        block.parent,
        bytes(16),
    )
    digest = xxhash.xxh3_128(head[: _CHECKSUM.start])
    for part in words:
        digest.update(part)
    return [head[: _CHECKSUM.start] + digest.digest(), *words]


def unpack(data: bytes | memoryview, expected: BlockId | None = None) -> Block:
    """The block in `data`, all of it verified; `expected` is the id that it must have."""
    view = memoryview(data)
    if len(view) < _HEAD.size or view[:8] != MAGIC:
        raise CorruptStateError(f"not a block file: {len(view)} bytes without its mark at the start")
    fields = _HEAD.unpack_from(view)
    _, version, n_tokens, start, row_bytes, has_rows, n_tail, name, parent, checksum = fields
    if version != VERSION:
        raise CorruptStateError(f"a block file of format {version}; this perdure reads format {VERSION}")
    rows_end = _HEAD.size + 4 * n_tokens + (n_tokens * row_bytes if has_rows else 0)
    end = rows_end + (0 if n_tail == _NONE else n_tail)
    if len(view) != end:
        raise CorruptStateError(f"a block file has {len(view)} bytes, its header says {end}")
    digest = xxhash.xxh3_128(view[: _CHECKSUM.start])
    digest.update(view[_HEAD.size :])
    if digest.digest() != checksum:
        raise CorruptStateError("a block file is damaged: its checksum does not match")
    tokens = np.frombuffer(view[_HEAD.size : _HEAD.size + 4 * n_tokens], "<i4").astype(np.int32)
    if block_id(BlockId(parent), tokens) != name or (expected is not None and name != expected):
        raise CorruptStateError("a block file is not the block that it is named")
    if not n_tokens or start >= 2**63:
        raise CorruptStateError(f"a block file of {n_tokens} tokens from token {start} on cannot be")
    rows = tail_state = None
    if has_rows:
        body = view[_HEAD.size + 4 * n_tokens : rows_end]
        rows = np.frombuffer(body, np.uint8).reshape(n_tokens, row_bytes)
    if n_tail != _NONE:
        tail_state = np.frombuffer(view[rows_end:], np.uint8)
    return Block.make(BlockId(parent), start, tokens, rows, tail_state)
