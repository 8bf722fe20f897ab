"""A block: a run of tokens with its state, named by everything that the state depends on.

As a file, or in whatever other place outside the process, it is bytes that describe and prove themselves:

    magic 8 | version u32 | tokens u32 | start u64 | row bytes u64 | rows u8 | tail bytes u64 (2**64-1: none)
    | id 32 | parent 32 | checksum 16
    token ids i32 each | rows | tail state

All little-endian. The checksum (XXH3-128) is over every other byte of the file. The id is the SHA-256 of
parent and tokens, so a file under another block's name proves itself wrong.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NewType, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from perdure.errors import CorruptStateError, InvalidInputError
from perdure.identity import Identity

BlockId = NewType("BlockId", bytes)

BLOCK = 64
"""Tokens in a whole block."""
NO_TAIL = 2**64 - 1
"""In place of the tail state's length, where there is none."""
HEADER = struct.Struct("<8sIIQQBQ32s32s")
MAGIC = b"PERDBLK\x00"
VERSION = 1
_HEAD = HEADER.size + 16
_OVERHEAD = 512
"""What a block costs besides its bytes: objects, table entries."""


def root_id(identity: Identity, *, block_size: int, mode: str, namespace: str) -> BlockId:
    """Where every chain starts: what the state depends on besides the tokens, and whose it is."""
    if block_size < 1 or not mode:
        raise InvalidInputError(f"a chain needs a block size and a mode, got {block_size} and {mode!r}")
    digest = hashlib.sha256(b"perdure/block/1\0" + identity.digest)
    for text in (str(block_size), mode, namespace):
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return BlockId(digest.digest())


def cost(count: int, row_bytes: int, tail_bytes: int) -> int:
    """What keeping a block of `count` tokens costs in bytes."""
    return _OVERHEAD + count * cost_of_token(row_bytes) + tail_bytes


def cost_of_token(row_bytes: int) -> int:
    return 4 + row_bytes


def block_id(parent: BlockId, tokens: NDArray[np.int32]) -> BlockId:
    """The name of the block that follows `parent` with `tokens`."""
    return block_id_of(parent, tokens.astype("<i4").tobytes())


def block_id_of(parent: bytes, tokens: bytes) -> BlockId:
    """The same, for tokens as a file has them."""
    return BlockId(hashlib.sha256(parent + tokens).digest())


def chain(root: BlockId, tokens: NDArray[np.int32], size: int) -> Iterator[BlockId]:
    """The names of the whole blocks of `tokens`, from the first on."""
    name, data = root, tokens.astype("<i4").tobytes()
    for start in range(0, len(tokens) // size * size * 4, size * 4):
        name = BlockId(hashlib.sha256(name + data[start : start + size * 4]).digest())
        yield name


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Tokens `start` to `end` of a sequence, with the rows of their state.

    `tail_state` is the part of the state that cannot be cut by token, as it was at `end`; where a kind of
    memory has such a part, a sequence can be put back only to the end of a block that has it. A block shorter
    than its siblings is the tail of a sequence.
    """

    id: BlockId
    parent: BlockId
    start: int
    tokens: NDArray[np.int32]
    rows: NDArray[np.uint8] | None
    tail_state: NDArray[np.uint8] | None
    checksum: bytes

    tier: ClassVar[str] = "memory"
    """Where its state is, as `BlockMeta.tier` says it of others."""

    @classmethod
    def make(
        cls,
        parent: BlockId,
        start: int,
        tokens: NDArray[np.int32],
        rows: NDArray[np.uint8] | None,
        tail_state: NDArray[np.uint8] | None,
    ) -> Block:
        made = cls(block_id(parent, tokens), parent, start, tokens, rows, tail_state, b"")
        # Set once, here: a copy of it would cost as much as the rest.
        object.__setattr__(made, "checksum", made.digest())
        return made

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def has_tail_state(self) -> bool:
        return self.tail_state is not None

    @property
    def nbytes(self) -> int:
        """What keeping it costs."""
        return cost(len(self.tokens), 0, self.state_bytes)

    @property
    def state_bytes(self) -> int:
        rows, tail_state = self.rows, self.tail_state
        return (0 if rows is None else rows.nbytes) + (0 if tail_state is None else tail_state.nbytes)

    def beginning(self, count: int) -> Block:
        """A copy of its first `count` tokens. Only of a block whose whole state is rows."""
        assert self.rows is not None
        return Block.make(self.parent, self.start, self.tokens[:count].copy(), self.rows[:count].copy(), None)

    def header(self) -> bytes:
        """What its file begins with, and its checksum covers first: its shape, its name, its parent."""
        return HEADER.pack(
            MAGIC,
            VERSION,
            len(self.tokens),
            # A block that was damaged in memory may be anything: its checksum shows that.
            self.start % 2**64,
            0 if self.rows is None else self.rows.nbytes // max(1, len(self.tokens)),
            self.rows is not None,
            NO_TAIL if self.tail_state is None else self.tail_state.nbytes,
            self.id,
            self.parent,
        )

    def parts(self) -> Iterator[bytes | memoryview]:
        """What follows the header in its file: tokens, rows, tail state."""
        yield self.tokens.astype("<i4").tobytes()
        for part in (self.rows, self.tail_state):
            if part is not None:
                yield part.reshape(-1).data

    @property
    def file_size(self) -> int:
        """How long its file is."""
        return _HEAD + 4 * len(self.tokens) + self.state_bytes

    def pack(self) -> list[bytes | memoryview]:
        """The parts of its file, in order. Its checksum goes with it, so that damage in memory is damage in
        the file."""
        return [self.header() + self.checksum, *self.parts()]

    @staticmethod
    def unpack(data: bytes | memoryview, expected: BlockId | None = None) -> Block:
        """The block in `data`, all of it verified; `expected` is the id that it must have."""
        view = memoryview(data)
        if len(view) < _HEAD or view[:8] != MAGIC:
            raise CorruptStateError(f"not a block file: {len(view)} bytes without its mark at the start")
        _, version, n_tokens, start, row_bytes, has_rows, n_tail, name, parent = HEADER.unpack_from(view)
        if version != VERSION:
            raise CorruptStateError(f"a block file of format {version}; this perdure reads format {VERSION}")
        rows_end = _HEAD + 4 * n_tokens + (n_tokens * row_bytes if has_rows else 0)
        end = rows_end + (0 if n_tail == NO_TAIL else n_tail)
        if len(view) != end:
            raise CorruptStateError(f"a block file has {len(view)} bytes, its header says {end}")
        checksum = bytes(view[HEADER.size : _HEAD])
        digest = xxhash.xxh3_128(view[: HEADER.size])
        digest.update(view[_HEAD:])
        if digest.digest() != checksum:
            raise CorruptStateError("a block file is damaged: its checksum does not match")
        tokens = np.frombuffer(view[_HEAD : _HEAD + 4 * n_tokens], "<i4").astype(np.int32)
        if block_id(BlockId(parent), tokens) != name or (expected is not None and name != expected):
            raise CorruptStateError("a block file is not the block that it is named")
        if not n_tokens or start >= 2**63:
            raise CorruptStateError(f"a block file claims to hold {n_tokens} tokens from token {start}")
        rows = tail_state = None
        if has_rows:
            body = view[_HEAD + 4 * n_tokens : rows_end]
            rows = np.frombuffer(body, np.uint8).reshape(n_tokens, row_bytes)
        if n_tail != NO_TAIL:
            tail_state = np.frombuffer(view[rows_end:], np.uint8)
        block = Block(BlockId(name), BlockId(parent), start, tokens, rows, tail_state, checksum)
        if block.header() != view[: HEADER.size]:
            raise CorruptStateError("a block file is damaged: its header says the same in other words")
        return block

    def digest(self) -> bytes:
        """The checksum of what it holds now. It is the one of its file: a block is hashed once when it is
        made or read, and its file not again when it is written."""
        digest = xxhash.xxh3_128(self.header())
        for part in self.parts():
            digest.update(part)
        return digest.digest()

    def verify(self) -> None:
        """Raise unless every byte is as it was when the block was made, its own name included."""
        if self.digest() != self.checksum:
            raise CorruptStateError(f"the state of tokens {self.start} to {self.end} is damaged")
        if block_id(self.parent, self.tokens) != self.id:
            raise CorruptStateError(f"the block of tokens {self.start} to {self.end} is not what it is named")


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What a tier knows of a block without its state."""

    id: BlockId
    parent: BlockId
    start: int
    tokens: NDArray[np.int32]
    has_tail_state: bool
    nbytes: int
    tier: str
    """The name of the tier that has it."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


AnyBlock: TypeAlias = Block | BlockMeta
"""A block whose state is at hand, or one whose state must be read from a tier."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A prefix that is kept: whole blocks, and of the last one the first `last_length` tokens."""

    blocks: tuple[AnyBlock, ...] = ()
    last_length: int = 0

    @property
    def length(self) -> int:
        return self.blocks[-1].start + self.last_length if self.blocks else 0

    def in_blocks(self, size: int) -> PrefixHit:
        """The same prefix without a last block that is used in part, or is shorter than `size`."""
        if not self.blocks or self.last_length == size:
            return self
        return PrefixHit(self.blocks[:-1], size if len(self.blocks) > 1 else 0)

    def lengths(self) -> Iterator[tuple[AnyBlock, int]]:
        """Its blocks, each with the number of tokens that are used of it."""
        for block in self.blocks:
            yield block, self.last_length if block is self.blocks[-1] else len(block.tokens)


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """A prefix with its state, all of it verified."""

    blocks: tuple[Block, ...] = ()
    last_length: int = 0
    tiers: Mapping[str, int] = field(default_factory=dict)
    """Its tokens by the tier that they came from."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each tier took."""

    @property
    def length(self) -> int:
        return self.blocks[-1].start + self.last_length if self.blocks else 0

    @property
    def pieces(self) -> list[NDArray[np.uint8]]:
        rows = [block.rows for block in self.blocks if block.rows is not None]
        return [*rows[:-1], rows[-1][: self.last_length]] if rows else []

    @property
    def tail_state(self) -> NDArray[np.uint8] | None:
        return self.blocks[-1].tail_state if self.blocks else None
