"""The k largest of rows of logits, in compiled code: the one pass over a whole vocabulary that every token
takes, and four times as fast as NumPy's (`python -m bench.sampling`). `tools/build_hook.py` compiles it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats
from perdure.engine.parallel import share
from perdure.errors import EngineError

_FILE = Path(__file__).with_name("libtop_k.so")
_VERSION = 1
_BLOCK = 128
_SHARED = 4 << 20
"""Bytes of rows from which on several threads look through them."""


def top_k(rows: Floats, k: int) -> tuple[NDArray[np.int64], Floats]:
    """The places of the `k` largest in each row of a table, and what is there: largest first; of equals, the
    lower place first. Python's lock is free meanwhile."""
    count, size = rows.shape
    if rows.dtype != np.float32 or rows.strides[1] != 4 or rows.strides[0] % 4 or not 1 <= k <= size:
        raise ValueError(f"{k} of rows of shape {rows.shape}, type {rows.dtype} and strides {rows.strides}")
    ids, values = np.empty((count, k), np.int64), np.empty((count, k), np.float32)
    stride, blocks = rows.strides[0] // 4, -(-size // _BLOCK)

    def look(part: slice) -> None:
        # For a heap of as many as are wanted, and the maxima of blocks.
        room = np.empty(k + blocks, np.int64)
        some = rows[part]
        done = _find(
            some.ctypes.data, len(some), stride, size, k,
            ids[part].ctypes.data, values[part].ctypes.data, room.ctypes.data,
        )  # fmt: skip
        if done < len(some):
            raise EngineError("the engine's logits are no numbers")

    share(look, count, count * size * 4, large=_SHARED)
    return ids, values


def _load() -> ctypes._NamedFuncPointer:
    advice = "install perdure again (in a checkout: pip install -e .)"
    try:
        library = ctypes.CDLL(str(_FILE))
        version = int(library.perdure_top_k_version())
    except (OSError, AttributeError) as error:
        raise EngineError(f"perdure's compiled part {_FILE} cannot be loaded: {error}; {advice}") from None
    if version != _VERSION:
        raise EngineError(f"perdure's compiled part {_FILE} has version {version}, not {_VERSION}; {advice}")
    find = library.perdure_top_k
    find.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4, *[ctypes.c_void_p] * 3]
    find.restype = ctypes.c_int64
    return find


_find = _load()
