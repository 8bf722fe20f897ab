"""Sliding window: some layers see only the last tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.memory.spec import MemorySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(MemorySpec):
    """A cut is safe while the window before it is there.

    The token after a cut sees `window - 1` tokens before it, so those must be held.
    """

    name: ClassVar[str] = "sliding"
    has_rows: ClassVar[bool] = True
    has_window: ClassVar[bool] = True

    @property
    def cuts(self) -> bool:
        return True

    @property
    def forks_in_pool(self) -> bool:
        # Cells of a lost window can be used again only while one sequence has them: two copies would keep
        # each other from going on.
        return self.keeps_window

    @property
    def restores_bits(self) -> bool:
        # A window that is not kept comes back in another order.
        return self.keeps_window

    def can_cut(self, keep: int, oldest: int) -> bool:
        return self.window is not None and oldest <= max(0, keep - self.window + 1)

    def shortest_cut(self, length: int, oldest: int) -> int:
        if self.window is None or oldest <= 0:
            return 1
        return min(length, oldest + self.window - 1)

    def loses(self, count: int, steps: int) -> bool:
        # One step overwrites only what no later token sees; several lose it.
        return steps > 1 and not self.keeps_window
