"""The kinds of memory that a promise is tested on, and what a fresh context says of the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import subjects
from inside import core_of
from perdure import Context, Model

Row = NDArray[np.float32]


@dataclass(frozen=True)
class Kind:
    """A toy model, opened in one way."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join((self.name, *(f"{key}_{value}" for key, value in self.settings.items())))

    def open(self, model: Model, **settings: Any) -> Context:
        return model.context(
            **{"n_ctx": 256, "n_seq": 2, "n_batch": 16, "threads": 1} | self.settings | settings
        )


FULL = Kind("llama")
WINDOW = Kind("gemma3", {"swa_full": False})
KINDS = (
    FULL,
    Kind("gemma3", {"swa_full": True}),
    WINDOW,
    Kind("mamba"),
    Kind("jamba"),
    Kind("deepseek2"),
    Kind("llama", {"shared": True}),
    Kind("llama", {"k_type": "q8_0", "v_type": "q8_0"}),
)

MLX = tuple(
    Kind(name, settings)
    for name, settings in (
        ("mlx-llama", {}),
        ("mlx-llama", {"k_type": "q8_0", "v_type": "q8_0"}),
        ("mlx-gemma3", {"swa_full": True}),
        ("mlx-gemma3", {"swa_full": False}),
        ("mlx-mamba", {}),
        ("mlx-jamba", {}),
        ("mlx-qwen3moe", {}),
        ("mlx-llama4", {}),
    )
    if name in subjects.MLX
)
"""The same on the other engine."""


def every(kinds: Iterable[Kind]) -> list[Any]:
    """The parameters of a test over `kinds`: of those on MLX one is enough in every run."""
    return [
        pytest.param(kind, id=str(kind), marks=[pytest.mark.soak] if kind in MLX[1:] else [])
        for kind in kinds
    ]


def long(kinds: Iterable[Kind]) -> list[Any]:
    """The same for a test that takes hundreds of steps: each takes MLX milliseconds."""
    return [pytest.param(kind, id=str(kind), marks=pytest.mark.soak) for kind in kinds]


def prompt(count: int, salt: int = 0) -> list[int]:
    """`count` tokens without a short period; another `salt` gives others."""
    return [(7 * i * i + (3 + 2 * salt) * i + 11 + 5 * salt) % 380 for i in range(count)]


def row_after(kind: Kind, model: Model, pieces: Sequence[Sequence[int]], **settings: Any) -> Row:
    """The logits of a fresh context that decodes `pieces` one after the other."""
    with kind.open(model, **settings) as ctx:
        for piece in pieces:
            ctx.decode(piece)
        return ctx.logits().copy()


def positions(ctx: Context, seq: int) -> int:
    """How many positions the engine itself says that it holds for `seq`."""
    return core_of(ctx).newest(seq) + 1
