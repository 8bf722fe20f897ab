"""Row kernels: what is done with whole rows of logits for every token, in C.

`tools/build_hook.py` compiles them when perdure is installed.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats
from perdure.engine.parallel import assist
from perdure.errors import EngineError, SamplingError

_FILE = Path(__file__).with_name("librow_kernels.so")
_VERSION = 1
_SHARED = 2 << 20
"""Bytes of rows from which on several threads look through them."""
_NO_NUMBER, _NOTHING_TO_DRAW = 1, 2


class NothingToDraw(SamplingError):
    """Every token is ruled out."""


class _Job(ctypes.Structure):
    """Rows to draw from, as the kernel sees them."""

    _fields_: ClassVar = [
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "stride", "size", "k", "n")),
        *((name, ctypes.c_void_p) for name in ("biased", "bias", "cuts", "tokens")),
        *((name, ctypes.c_int64) for name in ("next", "done", "outcome")),
    ]


def top_k(rows: Floats, k: int) -> tuple[NDArray[np.int64], Floats]:
    """The places of the `k` largest in each row of a table, and what is there: largest first; of equals, the
    lower place first."""
    count, size = _checked(rows, k)
    ids, values = np.empty((count, k), np.int64), np.empty((count, k), np.float32)
    room = np.empty(k + size // _BLOCK + 1, np.int64)
    stride = rows.strides[0] // 4
    _raise(_top_k(_address(rows), count, stride, size, k, _address(ids), _address(values), _address(room)))
    return ids, values


def draw(
    rows: Floats, k: int, cuts: NDArray[np.float64], biased: NDArray[np.int64], bias: Floats
) -> list[int]:
    """A token for each row of a table, out of its `k` largest after the `bias` of those that are `biased`.

    `cuts` has for each row the limit of top-p, the depth of min-p below the largest, the temperature, and a
    number from 0 to 1 that decides. The biased ones rise.
    """
    count, size = _checked(rows, k)
    n = len(biased)
    if cuts.shape != (count, 4) or cuts.dtype != np.float64 or not cuts.flags.c_contiguous:
        raise ValueError(f"cuts of shape {cuts.shape} and type {cuts.dtype} for {count} rows")
    if biased.dtype != np.int64 or bias.dtype != np.float32 or len(bias) != n:
        raise ValueError(f"{n} biased tokens with {len(bias)} biases")
    if n and not 0 <= biased[0] <= biased[-1] < size:
        raise ValueError(f"biased tokens from {biased[0]} to {biased[-1]} in rows of {size}")
    tokens = np.empty(count, np.int64)
    job = _Job(
        _address(rows), count, rows.strides[0] // 4, size, k, n,
        _address(biased), _address(bias), _address(cuts), _address(tokens),
    )  # fmt: skip
    room = np.empty(2 * k + n + size // _BLOCK + 1, np.int64)

    def work() -> None:
        own = np.empty_like(room)
        # A thread that comes late finds no row left, and touches nothing but the job, which it holds.
        _draw(ctypes.byref(job), _address(own))

    try:
        if 4 * count * size >= _SHARED:
            assist(work, count - 1)
    finally:
        # Whatever comes between: nobody may be left with memory that is given up here.
        _draw(ctypes.byref(job), _address(room))
        while not _drawn(ctypes.byref(job)):
            # Somebody has begun with a row, and lost the processor.
            time.sleep(0)
    _raise(job.outcome)
    return tokens.tolist()


def _checked(rows: Floats, k: int) -> tuple[int, int]:
    """The shape of a table. Native code reads where it is told to."""
    if rows.ndim != 2 or rows.dtype != np.float32 or rows.strides[1] != 4 or rows.strides[0] % 4:
        raise ValueError(f"rows of shape {rows.shape}, type {rows.dtype} and strides {rows.strides}")
    count, size = rows.shape
    if not 1 <= k <= size:
        raise ValueError(f"{k} of rows of shape {rows.shape}")
    return count, size


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
    if version != _VERSION:
        raise EngineError(f"perdure's kernels {_FILE} have version {version}, not {_VERSION}; {advice}")
    return library


def _function(name: str, *arguments: type[Any]) -> Callable[..., int]:
    found = getattr(_library, name)
    found.argtypes, found.restype = arguments, ctypes.c_int64
    return found  # type: ignore[no-any-return]


_library = _load()
_BLOCK = int(_library.perdure_row_kernels_block())
"""Values of a row of which the largest is kept in passing."""
_memory, _count = ctypes.c_void_p, ctypes.c_int64
_top_k = _function("perdure_top_k", _memory, *[_count] * 4, *[_memory] * 3)
_draw = _function("perdure_draw", _memory, _memory)
_drawn = _function("perdure_drawn", _memory)
