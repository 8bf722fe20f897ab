"""Candidates: the few tokens of a row of logits that can still be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats
from perdure.engine.parallel import spread
from perdure.errors import EngineError

Ids = NDArray[np.intp]

_LINES = 32
"""A row is seen as so many lines; a block is a column of them. Columns let NumPy take maxima line by line."""
_LONG = 1 << 16
"""A row longer than this is seen as twice as many lines."""
_SMALL = 4096
"""Rows up to this length are searched as a whole."""
_THREADS = 4


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
    size = len(row)
    if k >= size:
        order = np.argsort(-row, kind="stable")
        return order, row[order]
    lines = _lines(size)
    width = size // lines
    if size <= _SMALL or k * 2 > width:
        ids: Ids = np.flatnonzero(row >= np.partition(row, size - k)[size - k])
        values = row[ids]
    else:
        body = row[: width * lines].reshape(lines, width)
        maxima = body.max(axis=0)
        # At least k blocks reach the k-th largest maximum, so what is below it is not among the k largest.
        bound = np.partition(maxima, width - k)[width - k]
        blocks = (maxima >= bound).nonzero()[0]
        pool = body.take(blocks, axis=1).reshape(-1)
        hits = (pool >= bound).nonzero()[0]
        values = pool[hits]
        ids = hits // len(blocks) * width + blocks[hits % len(blocks)]
        if rest := size - width * lines:
            values = np.concatenate((values, row[size - rest :]))
            ids = np.concatenate((ids, np.arange(size - rest, size)))
    if len(values) < k:
        # Nothing compares with what is no number.
        raise EngineError("the engine's logits are no numbers")
    # The ids rise, so that of equals the lower one stays first.
    order = (-values).argsort(kind="stable")[:k]
    return ids[order], values[order]


def top_of_rows(rows: Floats, k: int) -> tuple[NDArray[np.intp], Floats]:
    """What `top` finds in each row of a table: the places, and what is there."""
    count, size = rows.shape
    lines = _lines(size)
    width = size // lines
    if size <= _SMALL or k * 2 > width or count == 1:
        found = [top(row, k) for row in rows]
        return np.array([ids for ids, _ in found]), np.array([values for _, values in found])
    body = rows[:, : width * lines].reshape(count, lines, width)
    maxima = _maxima(body)
    bounds = np.partition(maxima, width - k, axis=1)[:, width - k]
    if np.isnan(bounds).any():
        raise EngineError("the engine's logits are no numbers")
    row, block = (maxima >= bounds[:, None]).nonzero()
    pool = body[row, :, block]
    which, line = (pool >= bounds[row, None]).nonzero()
    values, owners = pool[which, line], row[which]
    ids = line * width + block[which]
    if rest := size - width * lines:
        values = np.concatenate((values, rows[:, size - rest :].reshape(-1)))
        ids = np.concatenate((ids, np.tile(np.arange(size - rest, size), count)))
        owners = np.concatenate((owners, np.repeat(np.arange(count), rest)))
    order = np.lexsort((ids, -values, owners))
    starts = np.searchsorted(owners[order], np.arange(count))
    chosen = order[starts[:, None] + np.arange(k)]
    return ids[chosen], values[chosen]


def _maxima(body: Floats) -> Floats:
    """The largest of each block of each row. All else looks at a few numbers, this at every one: it is spread
    over threads that do nothing else, so that none waits for Python's lock."""
    found = np.empty((body.shape[0], body.shape[2]), np.float32)
    parts = np.array_split(np.arange(len(body)), min(len(body), _THREADS))
    pairs = [(body[part[0] : part[-1] + 1], found[part[0] : part[-1] + 1]) for part in parts]
    for _ in spread(lambda pair: np.maximum.reduce(pair[0], axis=1, out=pair[1]), pairs, body.nbytes):
        pass
    return found


def _lines(size: int) -> int:
    return _LINES * (1 if size <= _LONG else 2)


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
