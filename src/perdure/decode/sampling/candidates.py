"""Candidates: the few tokens of a row of logits that can still be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats

Ids = NDArray[np.intp]

_LINES = 64
"""A row is seen as so many lines; a block is a column of them. Columns let NumPy take maxima line by line."""
_LONG = 1 << 16
"""A row longer than this is seen as twice as many lines."""
_SMALL = 4096
"""Rows up to this length are searched as a whole."""


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
    """The `k` largest of a row, largest first."""
    size = len(row)
    if k >= size:
        order = np.argsort(-row, kind="stable")
        return order, row[order]
    lines = _LINES * (1 if size <= _LONG else 2)
    width = size // lines
    if size <= _SMALL or k * 2 > width:
        ids: Ids = np.argpartition(row, size - k)[size - k :]
        values = row[ids]
    else:
        body = row[: width * lines].reshape(lines, width)
        maxima = body.max(axis=0)
        # At least k blocks reach the k-th largest maximum, so what is below it is not among the k largest.
        bound = np.partition(maxima, width - k)[width - k]
        blocks = np.flatnonzero(maxima >= bound)
        pool = body.take(blocks, axis=1).reshape(-1)
        hits = np.flatnonzero(pool >= bound)
        values = pool[hits]
        line, column = np.divmod(hits, len(blocks))
        ids = line * width + blocks[column]
        if rest := size - width * lines:
            values = np.concatenate((values, row[size - rest :]))
            ids = np.concatenate((ids, np.arange(size - rest, size)))
    order = np.argsort(-values, kind="stable")[:k]
    return ids[order], values[order]


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
        ids, values = top(row, min(k, len(row)))
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
