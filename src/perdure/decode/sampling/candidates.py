"""Candidates: the few tokens of a row of logits that can still be drawn."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats
from perdure.engine.parallel import share
from perdure.errors import EngineError

Ids = NDArray[np.intp]

_LINES = 16
"""A row is seen as so many lines; a block is a column of them. Columns let NumPy take maxima line by line."""
_GROUPS = 3
"""The bound is looked for among groups of blocks, at least so many for each token that is wanted."""
_SMALL = 4096
"""Rows up to this length are searched as a whole."""
_SHARED = 6 << 20
"""Bytes of rows from which on several threads look for their maxima."""
_VALUE = operator.itemgetter(0)


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
    width = size // _LINES
    if size <= _SMALL or k * 2 > width:
        ids: Ids = np.flatnonzero(row >= np.partition(row, size - k)[size - k])
        values = row[ids]
    else:
        pool, hits, blocks = _reaching(row, k, width)
        values = pool[hits]
        ids = hits // len(blocks) * width + blocks[hits % len(blocks)]
        if rest := size - width * _LINES:
            values = np.concatenate((values, row[size - rest :]))
            ids = np.concatenate((ids, np.arange(size - rest, size)))
    if len(values) < k:
        # Nothing compares with what is no number.
        raise EngineError("the engine's logits are no numbers")
    # The ids rise, so that of equals the lower one stays first.
    order = (-values).argsort(kind="stable")[:k]
    return ids[order], values[order]


def _reaching(row: Floats, k: int, width: int) -> tuple[Floats, Ids, Ids]:
    """The blocks of a row that may have some of its `k` largest: their values line by line, the places among
    those of at least `k` that reach some bound, and which blocks they are."""
    body = row[: width * _LINES].reshape(_LINES, width)
    maxima = np.maximum.reduce(body, axis=0)
    bound = _bounds(maxima[None], k)[0]
    blocks = (maxima >= bound).nonzero()[0]
    pool = body.take(blocks, axis=1).reshape(-1)
    return pool, (pool >= bound).nonzero()[0], blocks


def top_listed(row: Floats, k: int) -> tuple[list[int], list[float]]:
    """What `top` finds, as lists: for the few numbers of one row, and a draw from them, those are faster."""
    size = len(row)
    width = size // _LINES
    if size <= _SMALL or k * 2 > width or size > width * _LINES:
        ids, values = top(row, k)
        return ids.tolist(), values.tolist()
    pool, hits, blocks = _reaching(row, k, width)
    if len(hits) < k:
        raise EngineError("the engine's logits are no numbers")
    places, count = blocks.tolist(), len(blocks)
    # The ids rise, and sorting keeps the order of equals.
    pairs = [
        (value, hit // count * width + places[hit % count])
        for value, hit in zip(pool[hits].tolist(), hits.tolist(), strict=True)
    ]
    pairs.sort(key=_VALUE, reverse=True)
    return [token for _, token in pairs[:k]], [value for value, _ in pairs[:k]]


def top_of_rows(rows: Floats, k: int) -> tuple[NDArray[np.intp], Floats]:
    """What `top` finds in each row of a table: the places, and what is there."""
    count, size = rows.shape
    width = size // _LINES
    if size <= _SMALL or k * 2 > width or count == 1:
        found = [top(row, k) for row in rows]
        return np.array([ids for ids, _ in found]), np.array([values for _, values in found])
    maxima = _maxima(rows[:, : width * _LINES].reshape(count, _LINES, width))
    bounds = _bounds(maxima, k)
    if np.isnan(bounds).any():
        raise EngineError("the engine's logits are no numbers")
    # In one dimension, where NumPy skips what is false many at a time.
    row, block = np.divmod((maxima >= bounds[:, None]).reshape(-1).nonzero()[0], width)
    places = (row * size + block)[:, None] + np.arange(0, _LINES * width, width)
    pool = rows.reshape(-1).take(places)
    hits = (pool >= bounds[row, None]).reshape(-1).nonzero()[0]
    owners, values = row[hits // _LINES], pool.reshape(-1)[hits]
    ids = places.reshape(-1)[hits] - owners * size
    if rest := size - width * _LINES:
        values = np.concatenate((values, rows[:, size - rest :].reshape(-1)))
        ids = np.concatenate((ids, np.tile(np.arange(size - rest, size), count)))
        owners = np.concatenate((owners, np.repeat(np.arange(count), rest)))
        order = owners.argsort(kind="stable")
        values, ids, owners = values[order], ids[order], owners[order]
    return _largest(values, ids, owners, count, k)


def _largest(
    values: Floats, ids: NDArray[np.intp], owners: NDArray[np.intp], count: int, k: int
) -> tuple[NDArray[np.intp], Floats]:
    """The `k` largest of each of `count` owners, which rise, and their ids; of equals the lower first."""
    counts = np.bincount(owners, minlength=count)
    if counts.min() < k:
        # Nothing compares with what is no number.
        raise EngineError("the engine's logits are no numbers")
    starts = np.cumsum(counts) - counts
    table = np.full((count, counts.max()), np.inf, np.float32)
    table[owners, np.arange(len(owners)) - starts[owners]] = -values
    chosen = table.argsort(axis=1)[:, : k + 1]
    found = np.take_along_axis(table, chosen, axis=1)
    if (found[:, 1:] == found[:, :-1]).any():
        # Equals need their ids compared: rare, and so not done for all.
        chosen = np.lexsort((ids, -values, owners))[starts[:, None] + np.arange(k)]
    else:
        chosen = chosen[:, :k] + starts[:, None]
    return ids[chosen], values[chosen]


def _bounds(maxima: Floats, k: int) -> Floats:
    """For each row of block maxima a number that at least `k` values of the row reach, and not many more.

    It is the k-th largest of the maxima of groups of blocks: with three groups for each of the k that is
    hardly lower than the k-th largest of the blocks themselves, and found among far fewer numbers.
    """
    count, width = maxima.shape
    groups = max(_GROUPS * k, 64)
    if size := width // groups:
        # A group is a column again. What is left over can only raise the number of those that reach it.
        found = np.maximum.reduce(maxima[:, : size * groups].reshape(count, size, groups), axis=1)
    else:
        found, groups = maxima.copy(), width
    found.partition(groups - k, axis=1)
    bounds: Floats = found[:, groups - k]
    return bounds


def _maxima(body: Floats) -> Floats:
    """The largest of each block of each row. All else looks at a few numbers, this at every one: it is spread
    over threads that do nothing else, so that none waits for Python's lock."""
    found = np.empty((body.shape[0], body.shape[2]), np.float32)
    share(
        lambda part: np.maximum.reduce(body[part], axis=1, out=found[part]),
        len(body),
        body.nbytes,
        large=_SHARED,
    )
    return found


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
