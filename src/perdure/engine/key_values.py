"""Keys and values of a cache as numbers, and the rotation of keys by their positions (RoPE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyValues:
    """What the cache holds of some tokens: `k` and `v` by (layer, token, head, number).

    Layers are those that were asked for, in their order; the first token is at position `start`.
    """

    k: Floats
    v: Floats
    layers: tuple[int, ...]
    start: int
    rotated: bool
    """Whether the keys are as attention sees them, rotated by their positions."""

    @property
    def tokens(self) -> int:
        return int(self.k.shape[1])


@runtime_checkable
class KeyValueCore(Protocol):
    """A core whose rows by token can be read as numbers. It checks nothing: `Context` does."""

    @property
    def kv_layers(self) -> int:
        """How many layers its rows have keys and values of; 0 where they cannot be told apart."""
        ...

    def key_values(self, rows: NDArray[np.uint8], layer: int) -> tuple[Floats, Floats]:
        """Keys and values of a layer by (token, head, number), out of rows that were captured."""
        ...

    def rope(self) -> Rope | str:
        """How keys are rotated; a text says why that cannot be undone."""
        ...


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotation of pairs of numbers by an angle that grows with the position, slower from pair to pair."""

    size: int
    """How many numbers of a head are rotated; 0: none."""
    base: float
    scale: float
    halves: bool
    """Whether a pair is a number of the first half and one of the second, and not two neighbours."""

    def undo(self, k: Floats, start: int) -> Floats:
        """Keys by (token, head, number) as they were before; the first token is at position `start`."""
        return self._turn(k, start, -1.0)

    def apply(self, k: Floats, start: int) -> Floats:
        """The same in the other direction."""
        return self._turn(k, start, 1.0)

    def _turn(self, k: Floats, start: int, sign: float) -> Floats:
        if not self.size:
            return k
        half = self.size // 2
        steps = self.base ** (-2.0 * np.arange(half) / self.size)
        positions = np.arange(start, start + len(k)) * self.scale
        angles = positions[:, None, None] * steps
        cos, sin = np.cos(angles), sign * np.sin(angles)
        found = k.astype(np.float64)
        if self.halves:
            first, second = slice(0, half), slice(half, self.size)
        else:
            first, second = slice(0, self.size, 2), slice(1, self.size, 2)
        a, b = found[..., first].copy(), found[..., second].copy()
        found[..., first], found[..., second] = a * cos - b * sin, a * sin + b * cos
        return found.astype(np.float32)
