"""Measures of the tokens that are drawn: how likely each was, and which others were."""

from __future__ import annotations

import ctypes
import math
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from perdure.engine.contract import Floats
from perdure.engine.parallel import assist
from perdure.engine.row_kernels import BLOCK, SHARED, check_outcome, function, memory_of, place_of

_MEASURE_FIELDS = 11
"""The same of measures, the last three of which change."""
_MEASURE_HEAD = struct.Struct(f"={_MEASURE_FIELDS - 3}q")
_MEASURE_BEGIN = struct.Struct("=3q")

_Table: TypeAlias = tuple[int, int, int, int, int]
"""The same, and how many of each row are reported."""


class Measure(NamedTuple):
    """The measures of a token that was drawn from a row of logits."""

    token: int
    logprob: float
    """Natural log probability."""
    entropy: float
    """Of the whole row, in nats."""
    rank: int
    """1 for the likeliest; of equals, all have the same."""
    ids: list[int]
    """The likeliest tokens, best first."""
    probabilities: list[float]
    """Theirs."""


ALTERNATIVES = 5
"""The likeliest tokens that events report beside each."""


class Measures:
    """The measures of the tokens that are drawn from the rows of one table, as objects only when they are
    read: the rows themselves are looked at once, in one native call.

    Made before the draw: it computes while it waits for a row that is in no cache, which the draw then finds
    in one.
    """

    __slots__ = ("_k", "_numbers", "_others", "_tokens")

    def __init__(self, rows: Floats, k: int) -> None:
        """The `k` likeliest come beside each. Where there is much to do, threads that are idle help."""
        table, count, stride, size = place_of(rows)
        self._k = k = min(k, size)
        if k < 1 or count < 1:
            raise ValueError(f"{k} of rows of shape {rows.shape}")
        shared = 4 * count * size >= SHARED
        where = (table, count, stride, size, k)
        # As with draws: the job of the last time is mostly the next one too.
        job = None if shared else _measuring.pop(where, None)
        if job is None:
            job = _Measuring(where)
        self._numbers = job.measure(shared=shared)
        if not shared:
            _measuring.clear()
            _measuring[where] = job
        self._tokens: Sequence[int] = ()
        self._others: dict[int, tuple[float, int]] = {}
        """Logits and ranks of those tokens that are not among the likeliest."""

    def drawn(self, rows: Floats, tokens: Sequence[int]) -> None:
        """These tokens were drawn from the rows, which are still there to be read."""
        k, numbers = self._k, self._numbers
        if len(tokens) != len(rows):
            raise ValueError(f"{len(tokens)} tokens for {len(rows)} rows")
        for at, token in enumerate(tokens):
            if token not in numbers[k * at : k * at + k]:
                own = rows.item(at, token)
                self._others[at] = own, int(np.count_nonzero(rows[at] > own)) + 1
        self._tokens = tokens

    def tokens_of(self, at: int) -> tuple[int, ...]:
        """The token that was drawn from a row, and the likeliest ones."""
        return (self._tokens[at], *self._numbers[self._k * at : self._k * at + self._k])

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, at: int) -> Measure:
        count, k, numbers = len(self._tokens), self._k, self._numbers
        if not 0 <= at < count:
            raise IndexError(at)
        # Ids, sums and values of all rows.
        sums_at = k * count + 3 * at
        values_at = (k + 3) * count + k * at
        total, moment, reference = numbers[sums_at : sums_at + 3]
        norm = math.log(total)
        base = reference + norm
        token, ids = self._tokens[at], list(numbers[k * at : k * at + k])
        values = numbers[values_at : values_at + k]
        if at in self._others:
            own, rank = self._others[at]
        else:
            own = values[ids.index(token)]
            rank = values.index(own) + 1
        return Measure(
            token,
            own - base,
            max(0.0, norm - moment / total),
            rank,
            ids,
            [math.exp(value - base) for value in values],
        )


def measure(row: Floats, token: int, k: int) -> Measure:
    """The measures of `token`, which was drawn from `row`, with the `k` likeliest tokens beside it."""
    rows = row[None]
    measures = Measures(rows, k)
    measures.drawn(rows, [token])
    return measures[0]


class _Measuring:
    """Measures the rows of one table, in one piece of memory: the job, then ids and sums of all rows, of 8
    bytes each, the values, and room to work in."""

    def __init__(self, where: _Table) -> None:
        table, count, stride, size, k = where
        self._count = count
        ids_at = _MEASURE_FIELDS
        sums_at = ids_at + k * count
        values_at = sums_at + 3 * count
        room_at = values_at + (k * count + 1) // 2
        room = k + size // BLOCK + 1
        self._room = memory_of(room)
        self._memory = memory = memory_of(room_at + room)()
        self._address = at = ctypes.addressof(memory)
        self._room_address = at + 8 * room_at
        self._numbers = struct.Struct(f"={k * count}q{3 * count}d{k * count}f")
        places = (ids_at, values_at, sums_at)
        _MEASURE_HEAD.pack_into(memory, 0, table, count, stride, size, k, *(at + 8 * each for each in places))

    def measure(self, *, shared: bool) -> tuple[Any, ...]:
        """Ids, sums and values. `shared`: threads that are idle help."""
        memory, job = self._memory, self._address
        _MEASURE_BEGIN.pack_into(memory, _MEASURE_HEAD.size, 0, 0, 0)
        try:
            if shared:
                assist(self._help, self._count - 1)
        finally:
            _measure(job, self._room_address)
            while not _measured(job):
                time.sleep(0)
        if outcome := memory[_MEASURE_FIELDS - 1]:
            check_outcome(outcome)
        return self._numbers.unpack_from(memory, 8 * _MEASURE_FIELDS)

    def _help(self) -> None:
        own = self._room()
        # A thread that comes late finds no row left, and touches nothing but the job, which it holds.
        _measure(self._address, ctypes.addressof(own))


_measuring: dict[_Table, _Measuring] = {}
"""The job of the last measures, while nobody measures with it."""
_measure = function("perdure_measure", ctypes.c_void_p, ctypes.c_void_p)
_measured = function("perdure_measured", ctypes.c_void_p)
