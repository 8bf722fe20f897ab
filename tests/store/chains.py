"""Chains of small blocks, and what tests ask of a folder that holds some."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from perdure.cache.block import Block, BlockId, block_id

SIZE = 4
"""Tokens in a whole block here."""


def root(name: str = "") -> BlockId:
    return BlockId(hashlib.sha256(f"root {name}".encode()).digest())


def block(
    tokens: Sequence[int],
    after: Block | BlockId | None = None,
    *,
    row_bytes: int | None = 24,
    tail_state: int | None = None,
) -> Block:
    """A block whose bytes are a function of its name: any two that are called alike are alike."""
    parent = after.id if isinstance(after, Block) else after or root()
    start = after.end if isinstance(after, Block) else 0
    ids = np.array(tokens, np.int32)
    dice = np.random.default_rng(list(block_id(parent, ids)))
    rows = None if row_bytes is None else dice.integers(0, 256, (len(ids), row_bytes), np.uint8)
    state = None if tail_state is None else dice.integers(0, 256, tail_state, np.uint8)
    return Block.make(parent, start, ids, rows, state)


def chain(tokens: Sequence[int], name: str = "", *, tail_state: int | None = None) -> list[Block]:
    """The blocks of a sequence, the last one perhaps a tail."""
    made: list[Block] = []
    for at in range(0, len(tokens), SIZE):
        after = made[-1] if made else root(name)
        made.append(block(tokens[at : at + SIZE], after, tail_state=tail_state))
    return made


def size(blocks: Iterable[Block]) -> int:
    return sum(each.file_size for each in blocks)


def same(one: Block | None, other: Block) -> bool:
    """Whether two blocks are one in every byte."""
    return one is not None and b"".join(one.pack()) == b"".join(other.pack())


def files(folder: Path) -> list[Path]:
    """The files under blocks/, whatever they are."""
    return sorted(path for path in (folder / "blocks").rglob("*") if path.is_file())


def file_of(folder: Path, wanted: Block) -> Path:
    name = wanted.id.hex()
    return folder / "blocks" / name[:2] / name
