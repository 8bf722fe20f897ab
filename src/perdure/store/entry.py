"""Index entry: what the index says of a block, as a row and as an object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import BlockId, block_id

SELECT = "SELECT id, parent, start, tokens, has_rest, nbytes FROM block"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """What the index says of a block; its state is still on the disk."""

    id: BlockId
    parent: BlockId
    start: int
    tokens: NDArray[np.int32]
    has_tail_state: bool
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def row_of(entry: IndexEntry) -> tuple[Any, ...]:
    tokens = entry.tokens.astype("<i4").tobytes()
    return entry.id, entry.parent, entry.start, tokens, int(entry.has_tail_state), entry.nbytes


def entries_of(rows: Iterable[tuple[Any, ...]]) -> Iterator[IndexEntry]:
    """The entries in `rows`. SQLite has no checksums: a row that does not prove itself is not believed."""
    for name, parent, start, tokens, has_rest, nbytes in rows:
        words = all(isinstance(value, bytes) for value in (name, parent, tokens))
        numbers = all(isinstance(value, int) for value in (start, has_rest, nbytes))
        if not words or not numbers or len(tokens) % 4:
            continue
        ids = np.frombuffer(tokens, "<i4").astype(np.int32)
        if block_id(BlockId(parent), ids) == name:
            yield IndexEntry(BlockId(name), BlockId(parent), start, ids, bool(has_rest), nbytes)
