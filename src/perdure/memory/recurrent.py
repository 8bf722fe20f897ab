"""Recurrent memory: one state for all tokens so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.memory.spec import MemorySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent(MemorySpec):
    """A sequence can only be cleared, or restored from a checkpoint, which is its whole state."""

    name: ClassVar[str] = "recurrent"
    has_rows: ClassVar[bool] = False
    has_recurrent_state: ClassVar[bool] = True
