"""Row kernels: what is done with whole rows of logits for every token, in C.

`tools/build_hook.py` compiles them when perdure is installed.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats
from perdure.engine.parallel import assist
from perdure.errors import EngineError, SamplingError

_FILE = Path(__file__).with_name("librow_kernels.so")
VERSION = 4
_SHARED = 1 << 20
"""Bytes of rows from which on several threads look through them."""
_NO_NUMBER, _NOTHING_TO_DRAW = 1, 2
_FIELDS = 13
"""Of a job, as the kernel sees it, with 8 bytes each; the outcome is the last one."""
_HEAD_FIELDS = 10
"""Those that do not change from draw to draw."""
_HEAD = struct.Struct(f"={_HEAD_FIELDS}q")
_MEASURE_FIELDS = 11
"""The same of measures, the last three of which change."""
_MEASURE_HEAD = struct.Struct(f"={_MEASURE_FIELDS - 3}q")
_MEASURE_BEGIN = struct.Struct("=3q")

Cut: TypeAlias = tuple[float, float, float, float]
"""How one row is drawn from: the limit of top-p, the depth of min-p below the largest, the temperature, and a
number from 0 to 1 that decides."""


class NothingToDraw(SamplingError):
    """Every token is ruled out."""


class RowBias:
    """What is added to some values of every row. Checked here once, since it is used at every token."""

    def __init__(self, ids: NDArray[np.int64], values: Floats) -> None:
        """`ids` rise, and have no gaps in memory, as `values` have none."""
        if len(ids) != len(values):
            raise ValueError(f"{len(ids)} biased tokens with {len(values)} biases")
        # Copies: nobody changes them while native code reads them.
        self._ids, self._values = np.array(ids, np.int64), np.array(values, np.float32)
        self.count = len(self._ids)
        self.addresses = _address(self._ids), _address(self._values)
        self.lowest = int(self._ids[0]) if self.count else 0
        self.highest = int(self._ids[-1]) if self.count else 0


def top_k(rows: Floats, k: int) -> tuple[NDArray[np.int64], Floats]:
    """The places of the `k` largest in each row of a table, and what is there: largest first; of equals, the
    lower place first."""
    table, count, stride, size = _place_of(rows)
    if not 1 <= k <= size:
        raise ValueError(f"{k} of rows of shape {rows.shape}")
    ids, values = np.empty((count, k), np.int64), np.empty((count, k), np.float32)
    room = np.empty(k + size // _BLOCK + 1, np.int64)
    _raise(_top_k(table, count, stride, size, k, _address(ids), _address(values), _address(room)))
    return ids, values


def draw(rows: Floats, k: int, cuts: Sequence[Cut], bias: RowBias) -> list[int]:
    """A token for each row of a table, out of its `k` largest after `bias`; of all, where it has less."""
    table, count, stride, size = _place_of(rows)
    k = min(k, size)
    if k < 1:
        raise ValueError(f"{k} of rows of shape {rows.shape}")
    if len(cuts) != count:
        raise ValueError(f"{len(cuts)} cuts for {count} rows")
    if not 0 <= bias.lowest <= bias.highest < size:
        raise ValueError(f"biased tokens from {bias.lowest} to {bias.highest} in rows of {size}")
    shared = 4 * count * size >= _SHARED
    where = (table, count, stride, size, k, bias.addresses)
    # Most draws are of the rows that the last one was of, with other values, and their job is at hand.
    job = None if shared else _jobs.pop(where, None)
    if job is None:
        job = _Job(where, bias)
    tokens = job.draw(cuts, shared=shared)
    if not shared:
        _jobs.clear()
        _jobs[where] = job
    return tokens


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
        table, count, stride, size = _place_of(rows)
        self._k = k = min(k, size)
        if k < 1 or count < 1:
            raise ValueError(f"{k} of rows of shape {rows.shape}")
        shared = 4 * count * size >= _SHARED
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
        room = k + size // _BLOCK + 1
        self._room = _memory_of(room)
        self._memory = memory = _memory_of(room_at + room)()
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
            _raise(outcome)
        return self._numbers.unpack_from(memory, 8 * _MEASURE_FIELDS)

    def _help(self) -> None:
        own = self._room()
        # A thread that comes late finds no row left, and touches nothing but the job, which it holds.
        _measure(self._address, ctypes.addressof(own))


class _Job:
    """Draws from the rows of one table.

    One piece of memory for the job, the cuts, the tokens, and room to work in: at every token, each piece
    more is felt (`python -m bench.decode`).
    """

    def __init__(self, where: _Where, bias: RowBias) -> None:
        table, count, stride, size, k, (ids, values) = where
        self._bias = bias
        self._count = count
        self._room = 2 * k + bias.count + size // _BLOCK + 1
        self._drawn_at = _FIELDS + 4 * count
        self._memory = _memory_of(self._drawn_at + count + self._room)()
        self._address = at = ctypes.addressof(self._memory)
        self._begin = _begin_of(count)
        head = (table, count, stride, size, k, bias.count, ids, values)
        _HEAD.pack_into(self._memory, 0, *head, at + 8 * _FIELDS, at + 8 * self._drawn_at)

    def draw(self, cuts: Sequence[Cut], *, shared: bool) -> list[int]:
        """A token for each row. `shared`: threads that are idle help."""
        memory, job, count, drawn_at = self._memory, self._address, self._count, self._drawn_at
        self._begin.pack_into(memory, _HEAD.size, 0, 0, 0, *itertools.chain.from_iterable(cuts))

        def work() -> None:
            own = _memory_of(self._room)()
            # A thread that comes late finds no row left, and touches nothing but the job, which it holds.
            _draw(job, ctypes.addressof(own))

        try:
            if shared:
                assist(work, count - 1)
        finally:
            # Whatever comes between: nobody may be left with memory that is given up here.
            _draw(job, job + 8 * (drawn_at + count))
            while not _drawn(job):
                # Another thread has begun with a row, and lost the processor.
                time.sleep(0)
        if outcome := memory[_FIELDS - 1]:
            _raise(outcome)
        return memory[drawn_at : drawn_at + count]


_Place: TypeAlias = tuple[int, int, int, int]
"""Of a table of rows: its address, how many there are, from one to the next, and the size of each."""
_Table: TypeAlias = tuple[int, int, int, int, int]
"""The same, and how many of each row are reported."""
_Where: TypeAlias = tuple[int, int, int, int, int, tuple[int, int]]
"""A table, how many of each row are looked at, and where the bias lies."""


def _place_of(rows: Floats) -> _Place:
    """Where a table lies. Native code reads that memory unchecked."""
    global _last
    seen, place = _last
    if seen() is rows:
        # An engine mostly gives the table of the last step again, with other values.
        return place
    if rows.ndim != 2 or rows.dtype != np.float32 or rows.strides[1] != 4 or rows.strides[0] % 4:
        raise ValueError(f"rows of shape {rows.shape}, type {rows.dtype} and strides {rows.strides}")
    place = (_address(rows), len(rows), rows.strides[0] // 4, rows.shape[1])
    _last = weakref.ref(rows), place
    return place


@functools.lru_cache(maxsize=128)
def _begin_of(count: int) -> struct.Struct:
    """What a job of so many rows begins with: how far it is, and their cuts."""
    return struct.Struct(f"={_FIELDS - _HEAD_FIELDS}q{4 * count}d")


@functools.lru_cache(maxsize=128)
def _memory_of(count: int) -> type[ctypes.Array[ctypes.c_int64]]:
    """Memory for so many numbers. Kept, since to make a type takes longer than to draw."""
    return ctypes.c_int64 * count


def _raise(outcome: int) -> None:
    if outcome == _NOTHING_TO_DRAW:
        raise NothingToDraw("every token is ruled out")
    if outcome == _NO_NUMBER:
        raise EngineError("the engine's logits are no numbers")


def _address(array: NDArray[Any]) -> int:
    # Half of what `array.ctypes.data` takes.
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def _load() -> ctypes.CDLL:
    advice = "install perdure again (in a checkout: pip install -e .)"
    try:
        library = ctypes.CDLL(str(_FILE))
        version = int(library.perdure_row_kernels_version())
    except (OSError, AttributeError) as error:
        raise EngineError(f"perdure's kernels {_FILE} cannot be loaded: {error}; {advice}") from None
    if version != VERSION:
        raise EngineError(f"perdure's kernels {_FILE} have version {version}, not {VERSION}; {advice}")
    return library


def _function(name: str, *arguments: type[Any]) -> Callable[..., int]:
    function = getattr(_library, name)
    function.argtypes, function.restype = arguments, ctypes.c_int64
    return function  # type: ignore[no-any-return]


_last: tuple[weakref.ref[Floats], _Place] = weakref.ref(np.empty((1, 1), np.float32)), (0, 0, 0, 0)
"""The table that was looked at last. One object, so that threads never see the half of it."""
_jobs: dict[_Where, _Job] = {}
"""The job of the last draw, while nobody draws with it."""
_measuring: dict[_Table, _Measuring] = {}
"""The same for measures."""
_library = _load()
_BLOCK = int(_library.perdure_row_kernels_block())
"""Values of a row of which the largest is kept in passing."""
_memory, _count = ctypes.c_void_p, ctypes.c_int64
_top_k = _function("perdure_top_k", _memory, *[_count] * 4, *[_memory] * 3)
_draw = _function("perdure_draw", _memory, _memory)
_drawn = _function("perdure_drawn", _memory)
_measure = _function("perdure_measure", _memory, _memory)
_measured = _function("perdure_measured", _memory)
