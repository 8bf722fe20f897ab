"""Full attention: every token has rows of its own in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.memory.spec import MemorySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention(MemorySpec):
    """A sequence can be cut anywhere, and no step overwrites anything."""

    name: ClassVar[str] = "full"
    has_rows: ClassVar[bool] = True

    @property
    def cuts(self) -> bool:
        return True

    def can_cut(self, keep: int, oldest: int) -> bool:
        return True

    def shortest_cut(self, length: int, oldest: int) -> int:
        return 1

    def loses(self, count: int, steps: int) -> bool:
        return False
