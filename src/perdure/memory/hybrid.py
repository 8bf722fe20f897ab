"""Hybrid memory: attention layers and recurrent layers together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.memory.spec import MemorySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid(MemorySpec):
    """As strict as a recurrent memory; only the recurrent layers' state is in a checkpoint."""

    name: ClassVar[str] = "hybrid"
    has_rows: ClassVar[bool] = True
    has_recurrent_state: ClassVar[bool] = True
