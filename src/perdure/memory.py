"""The kinds of memory that models have, and their rules."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class MemoryKind(enum.Enum):
    """How a model remembers, which decides how it can go back."""

    FULL = "full"
    """Every token has its own cells: a sequence can be cut anywhere."""
    SLIDING = "sliding"
    """Some layers keep only the last tokens: a cut is safe while the window before it is there."""
    RECURRENT = "recurrent"
    """One state for all tokens so far: it can only be cleared, or restored from a checkpoint."""
    HYBRID = "hybrid"
    """Attention and recurrent layers together: as strict as recurrent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A kind of memory with its figures. `keeps_window` says whether cells outside the window stay."""

    kind: MemoryKind
    window: int | None = None
    keeps_window: bool = True

    @property
    def cuts(self) -> bool:
        """Whether a sequence can ever be cut short without a checkpoint."""
        return self.kind in (MemoryKind.FULL, MemoryKind.SLIDING)

    def can_cut(self, keep: int, oldest: int) -> bool:
        """Whether a sequence that holds the positions from `oldest` on can be cut to `keep` tokens.

        The token after the cut sees `window - 1` tokens before it, so those must be there.
        """
        if self.kind is MemoryKind.FULL:
            return True
        if self.kind is MemoryKind.SLIDING and self.window is not None:
            return oldest <= max(0, keep - self.window + 1)
        return False

    def shortest_cut(self, length: int, oldest: int) -> int:
        """The shortest length that a sequence of `length` tokens can be cut to, short of clearing it."""
        if not self.cuts:
            return length
        if self.kind is MemoryKind.FULL or self.window is None or oldest <= 0:
            return 1
        return min(length, oldest + self.window - 1)
