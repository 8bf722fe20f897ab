"""What a look-up finds: a prefix by its entries, and the same with its state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import Block, Entry


@dataclass(frozen=True, slots=True)
class Found:
    """A prefix that is kept: whole blocks, and of the last one the first `keep` tokens."""

    entries: tuple[Entry, ...] = ()
    keep: int = 0

    @property
    def length(self) -> int:
        return self.entries[-1].start + self.keep if self.entries else 0

    def in_blocks(self, size: int) -> Found:
        """The same prefix without a block of which only a part is wanted, or which is shorter than `size`."""
        if not self.entries or self.keep == size:
            return self
        return Found(self.entries[:-1], size if len(self.entries) > 1 else 0)


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix with its state, all of it verified."""

    blocks: tuple[Block, ...] = ()
    keep: int = 0
    lower: int = 0
    """Tokens of it that came from the lower tier."""

    @property
    def length(self) -> int:
        return self.blocks[-1].start + self.keep if self.blocks else 0

    @property
    def pieces(self) -> list[NDArray[np.uint8]]:
        rows = [block.rows for block in self.blocks if block.rows is not None]
        return [*rows[:-1], rows[-1][: self.keep]] if rows else []

    @property
    def tail_state(self) -> NDArray[np.uint8] | None:
        return self.blocks[-1].tail_state if self.blocks else None
