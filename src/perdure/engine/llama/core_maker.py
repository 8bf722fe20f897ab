"""What extensions bring for contexts on llama.cpp: cores that compute more, and what reads their state."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from perdure.engine.core import Core
from perdure.engine.llama.core import CachedState, CoreKeywords
from perdure.engine.llama.weights import LlamaWeights
from perdure.memory import MemorySpec


@runtime_checkable
class CachedStateCore(Protocol):
    """A core whose state can be read as numbers."""

    def cached_state(self) -> CachedState | None:
        """None before state was captured, and where it has no rows by token."""
        ...


class ContextCore(Core, Protocol):
    """A core of this engine: what `Model.context` asks of one besides the calls of `Core`."""

    n_ctx_seq: int
    """Cells of a sequence."""

    @property
    def two_dimensions(self) -> bool:
        """Whether positions have two dimensions besides time (M-RoPE)."""
        ...

    def can_shift(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class CoreSetup:
    """What a context of llama.cpp is opened with."""

    path: Path
    weights: LlamaWeights
    params: Any
    """The library's own parameters of a context."""
    memory: MemorySpec
    keywords: CoreKeywords
    tensors: Callable[[], Container[str]]
    """The names of the tensors in the file."""
    loaded_with: Mapping[str, Any]
    """The options of extensions that the model was loaded with."""


class CoreMaker(Protocol):
    """What an extension brings for one of its options (`Extension.cores`): contexts that compute more."""

    @property
    def layout(self) -> str:
        """What a state has besides the model's own part, for its identity; "" for nothing."""
        ...

    def load(self, params: Any) -> None:
        """Change the library's own parameters of a model that is loaded with the option."""
        ...

    def open(self, setup: CoreSetup, value: Any) -> ContextCore:
        """A context's core where the option has this value."""
        ...
