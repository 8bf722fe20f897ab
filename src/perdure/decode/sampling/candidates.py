"""Candidates: the few tokens of a row of logits that can still be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats
from perdure.engine.row_kernels import top_k

Ids = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Tokens and their logits, likeliest first unless they are the whole row.

    `mass` is the sum of exp(logit - largest) over all tokens that the first cut weighs; None: over these.
    """

    ids: Ids
    logits: Floats
    mass: float | None = None

    def __len__(self) -> int:
        return len(self.ids)


def top(row: Floats, k: int) -> tuple[Ids, Floats]:
    """The `k` largest of a row, largest first; of equals, the lower id first."""
    ids, values = top_k(row[None], min(k, len(row)))
    return ids[0], values[0]


def at_least(row: Floats, bound: float) -> tuple[Ids, Floats]:
    """What of a row reaches `bound`, largest first."""
    ids = np.flatnonzero(row >= np.float32(bound))
    values = row[ids]
    order = np.argsort(-values, kind="stable")
    return ids[order], values[order]


def prefix(row: Floats, p: float) -> tuple[Ids, Floats, float]:
    """The largest of a row that make up the share `p` of it, largest first, and the mass of the whole row."""
    mass = total_mass(row)
    k = 256
    while True:
        ids, values = top(row, k)
        if k >= len(row) or float(np.exp(values - values[0]).sum(dtype=np.float64)) >= p * mass:
            return ids, values, mass
        k *= 8


def total_mass(row: Floats) -> float:
    """The sum of exp(logit - largest) over a row."""
    return float(np.exp(row - row.max()).sum(dtype=np.float64))


def allowed_by(mask: NDArray[np.uint8], ids: Ids) -> NDArray[np.bool_]:
    """Whether the bits of `mask` allow `ids`."""
    bits: NDArray[Any] = mask[ids >> 3] >> (ids & 7) & 1
    return bits.astype(np.bool_)


def masked(row: Floats, mask: NDArray[np.uint8]) -> Floats:
    """A copy of a row without what the bits of `mask` forbid."""
    allowed = np.unpackbits(mask, count=len(row), bitorder="little")
    return np.where(allowed, row, np.float32(-np.inf))
