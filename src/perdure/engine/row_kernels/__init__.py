"""Row kernels: what is done with whole rows of logits for every token, in C.

`tools/build_hook.py` compiles them when perdure is installed.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats
from perdure.errors import EngineError, SamplingError

_FILE = Path(__file__).with_name("librow_kernels.so")
VERSION = 4
SHARED = 1 << 20
"""Bytes of rows from which on several threads look through them."""
_NO_NUMBER, _NOTHING_TO_DRAW = 1, 2
_FIELDS = 13
"""Of a job, as the kernel sees it, with 8 bytes each; the outcome is the last one."""
_HEAD_FIELDS = 10
"""Those that do not change from draw to draw."""
_HEAD = struct.Struct(f"={_HEAD_FIELDS}q")
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
    table, count, stride, size = place_of(rows)
    if not 1 <= k <= size:
        raise ValueError(f"{k} of rows of shape {rows.shape}")
    ids, values = np.empty((count, k), np.int64), np.empty((count, k), np.float32)
    room = np.empty(k + size // BLOCK + 1, np.int64)
    check_outcome(_top_k(table, count, stride, size, k, _address(ids), _address(values), _address(room)))
    return ids, values


def draw(rows: Floats, k: int, cuts: Sequence[Cut], bias: RowBias) -> list[int]:
    """A token for each row of a table, out of its `k` largest after `bias`; of all, where it has less."""
    table, count, stride, size = place_of(rows)
    k = min(k, size)
    if k < 1:
        raise ValueError(f"{k} of rows of shape {rows.shape}")
    if len(cuts) != count:
        raise ValueError(f"{len(cuts)} cuts for {count} rows")
    if not 0 <= bias.lowest <= bias.highest < size:
        raise ValueError(f"biased tokens from {bias.lowest} to {bias.highest} in rows of {size}")
    shared = 4 * count * size >= SHARED
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


class _Job:
    """Draws from the rows of one table.

    One piece of memory for the job, the cuts, the tokens, and room to work in: at every token, each piece
    more is felt (`python -m bench.decode`).
    """

    def __init__(self, where: _Where, bias: RowBias) -> None:
        table, count, stride, size, k, (ids, values) = where
        self._bias = bias
        self._count = count
        self._room = 2 * k + bias.count + size // BLOCK + 1
        self._drawn_at = _FIELDS + 4 * count
        self._memory = memory_of(self._drawn_at + count + self._room)()
        self._address = at = ctypes.addressof(self._memory)
        self._begin = _begin_of(count)
        head = (table, count, stride, size, k, bias.count, ids, values)
        _HEAD.pack_into(self._memory, 0, *head, at + 8 * _FIELDS, at + 8 * self._drawn_at)

    def draw(self, cuts: Sequence[Cut], *, shared: bool) -> list[int]:
        """A token for each row. `shared`: threads that are idle help."""
        memory, job, count, drawn_at = self._memory, self._address, self._count, self._drawn_at
        self._begin.pack_into(memory, _HEAD.size, 0, 0, 0, *itertools.chain.from_iterable(cuts))

        def work() -> None:
            own = memory_of(self._room)()
            # A thread that comes late finds no row left, and touches nothing but the job, which it holds.
            _draw(job, ctypes.addressof(own))

        try:
            if shared:
                from perdure.engine.parallel import assist

                assist(work, count - 1)
        finally:
            # Whatever comes between: nobody may be left with memory that is given up here.
            _draw(job, job + 8 * (drawn_at + count))
            while not _drawn(job):
                # Another thread has begun with a row, and lost the processor.
                time.sleep(0)
        if outcome := memory[_FIELDS - 1]:
            check_outcome(outcome)
        return memory[drawn_at : drawn_at + count]


_Place: TypeAlias = tuple[int, int, int, int]
"""Of a table of rows: its address, how many there are, from one to the next, and the size of each."""
_Where: TypeAlias = tuple[int, int, int, int, int, tuple[int, int]]
"""A table, how many of each row are looked at, and where the bias lies."""


def place_of(rows: Floats) -> _Place:
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
def memory_of(count: int) -> type[ctypes.Array[ctypes.c_int64]]:
    """Memory for so many numbers. Kept, since to make a type takes longer than to draw."""
    return ctypes.c_int64 * count


def check_outcome(outcome: int) -> None:
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


def function(name: str, *arguments: type[Any]) -> Callable[..., int]:
    found = getattr(_library, name)
    found.argtypes, found.restype = arguments, ctypes.c_int64
    return found  # type: ignore[no-any-return]


_last: tuple[weakref.ref[Floats], _Place] = weakref.ref(np.empty((1, 1), np.float32)), (0, 0, 0, 0)
"""The table that was looked at last. One object, so that threads never see the half of it."""
_jobs: dict[_Where, _Job] = {}
"""The job of the last draw, while nobody draws with it."""
_library = _load()
BLOCK = int(_library.perdure_row_kernels_block())
"""Values of a row of which the largest is kept in passing."""
_pointer, _count = ctypes.c_void_p, ctypes.c_int64
_top_k = function("perdure_top_k", _pointer, *[_count] * 4, *[_pointer] * 3)
_draw = function("perdure_draw", _pointer, _pointer)
_drawn = function("perdure_drawn", _pointer)
