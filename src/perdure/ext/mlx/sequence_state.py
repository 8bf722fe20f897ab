"""The state of one sequence in all layers, and its bytes.

Rows by token are laid out as llama.cpp's are not: for a token, all layers' keys and values one after the
other. A window's rows, and states, are the tail state, which belongs to the end.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from perdure import FullAttention, Hybrid, MemorySpec, Recurrent, SlidingWindow
from perdure.ext.mlx.caches import Array, Leaf, RowCache, StateCache, leaves, mapped
from perdure.spi.engine import Capture

_HEAD = struct.Struct("<4sIqq")
"""A mark, a checksum of the layout, tokens, and the position of the tail's first row."""
_MAGIC = b"MLXS"

_TYPES: dict[Any, np.dtype[Any]] = {
    mx.float32: np.dtype(np.float32),
    mx.float16: np.dtype(np.float16),
    mx.bfloat16: np.dtype(np.uint16),
    mx.uint32: np.dtype(np.uint32),
    mx.uint8: np.dtype(np.uint8),
    mx.int32: np.dtype(np.int32),
}


def to_numpy(array: Array) -> NDArray[Any]:
    """The numbers of an array, over its own memory; NumPy has no bfloat16, so that it shows their bits."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def to_mlx(array: NDArray[Any], dtype: Any) -> Array:
    copy = mx.array(np.ascontiguousarray(array))
    return copy.view(mx.bfloat16) if dtype == mx.bfloat16 else copy


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """One array of a cache: its shape, without the tokens where it has rows of them."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _TYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """How a model's state is laid out, seen from a step of one token."""

    rows: tuple[tuple[ArrayShape, ...], ...]
    """Of the leaves that keep rows by token, in order."""
    window: tuple[tuple[ArrayShape, ...], ...]
    """Of those that are kept as a window."""
    states: tuple[tuple[ArrayShape, ...], ...]
    memory: MemorySpec

    @classmethod
    def of(cls, caches: Sequence[Any], keeps_window: bool) -> SequenceLayout:
        memory = kind_of(caches, keeps_window=keeps_window)
        rows: list[tuple[ArrayShape, ...]] = []
        window: list[tuple[ArrayShape, ...]] = []
        states: list[tuple[ArrayShape, ...]] = []
        for leaf in leaves(caches):
            if isinstance(leaf, StateCache):
                states.append(tuple(ArrayShape(tuple(part.shape), part.dtype) for part in leaf.cache))
            else:
                parts = tuple(ArrayShape((part.shape[1], part.shape[3]), part.dtype) for part in leaf.parts)
                (window if _in_tail(leaf, memory) else rows).append(parts)
        return cls(tuple(rows), tuple(window), tuple(states), memory)

    @property
    def row_bytes(self) -> int:
        return sum(part.nbytes for leaf in self.rows for part in leaf)

    @property
    def tail_row_bytes(self) -> int:
        return sum(part.nbytes for leaf in self.window for part in leaf)

    @property
    def state_bytes(self) -> int:
        return sum(part.nbytes for leaf in self.states for part in leaf)

    @property
    def mark(self) -> int:
        """Tells this layout from others."""
        return (self.row_bytes * 31 + self.tail_row_bytes * 17 + self.state_bytes) & 0xFFFFFFFF

    def __str__(self) -> str:
        return f"rows {self.row_bytes}, window {self.tail_row_bytes}, state {self.state_bytes} bytes"


def kind_of(caches: Sequence[Any], *, keeps_window: bool = True) -> MemorySpec:
    """The kind of memory that these caches make up."""
    all_leaves = leaves(caches)
    states = [leaf for leaf in all_leaves if isinstance(leaf, StateCache)]
    windows = {leaf.window for leaf in all_leaves if isinstance(leaf, RowCache) and leaf.window}
    full = [leaf for leaf in all_leaves if isinstance(leaf, RowCache) and not leaf.window]
    if states:
        return Recurrent() if len(states) == len(all_leaves) else Hybrid()
    if windows and full and len(windows) == 1:
        return SlidingWindow(window=windows.pop(), keeps_window=keeps_window)
    # Layers that are windows alone keep all of their rows, and can be cut anywhere.
    return FullAttention()


def _in_tail(leaf: RowCache, memory: MemorySpec) -> bool:
    return memory.has_window and leaf.window > 0


class LayerRows:
    """Rows by token of all layers, over the engine's memory."""

    def __init__(self, arrays: Sequence[NDArray[Any]], count: int, row_bytes: int) -> None:
        self._arrays = arrays
        self._count = count
        self.row_bytes = row_bytes

    def __len__(self) -> int:
        return self._count

    def cut(self, start: int, stop: int) -> NDArray[np.uint8]:
        out = np.empty((stop - start, self.row_bytes), np.uint8)
        at = 0
        for array in self._arrays:
            heads, _, numbers = array.shape
            width = heads * numbers * array.itemsize
            rows = np.ascontiguousarray(array[:, start:stop].transpose(1, 0, 2))
            out[:, at : at + width] = rows.reshape(stop - start, -1).view(np.uint8)
            at += width
        return out


class SequenceState:
    """The caches of one sequence. `length` is what all of them hold.

    Always holds: between calls every array is computed, and nothing else has a handle of it. After a step
    that failed or was interrupted, there may be rows behind the length, and states may be any: `Context` cuts
    the rows, and replaces or empties the states.
    """

    def __init__(self, caches: list[Any], layout: SequenceLayout | None = None) -> None:
        self.caches = caches
        self.layout = layout
        self.leaves = leaves(caches)
        self.length = 0

    def recover(self) -> None:
        """After a step that failed: hold nothing where arrays were lost with it."""
        try:
            # Rows of the step may wait in the same arrays as those before it.
            mx.eval(self.arrays())
        except (RuntimeError, ValueError, MemoryError):
            self.empty()

    def arrays(self) -> list[Array]:
        """All that has to be computed for it to be whole."""
        return [part for leaf in self.leaves for part in leaf.state_arrays()]

    # What it holds.

    def newest(self) -> int:
        ends = [leaf.offset for leaf in self.leaves if isinstance(leaf, RowCache)]
        return min([*ends, self.length]) - 1

    def oldest(self) -> int:
        if not self.length:
            return -1
        if any(isinstance(leaf, StateCache) for leaf in self.leaves):
            return self.length - 1
        return max(leaf.base for leaf in self.leaves if isinstance(leaf, RowCache))

    def remove(self, start: int) -> None:
        if start <= 0:
            self.empty()
            return
        states = any(isinstance(leaf, StateCache) for leaf in self.leaves)
        if states and start < self.length:
            return
        for leaf in self.leaves:
            if isinstance(leaf, RowCache):
                leaf.cut(start)
        self.length = min(self.length, start)

    def empty(self) -> None:
        self.replace(mapped(self.caches, lambda leaf: leaf.fresh()))
        self.length = 0

    def handles(self) -> list[Any]:
        """The same caches, for a step that is built while these do not change."""
        return mapped(self.caches, lambda leaf: leaf.handle())

    def replace(self, caches: list[Any]) -> None:
        self.caches = caches
        self.leaves = leaves(caches)

    def copy(self) -> SequenceState:
        twin = SequenceState(mapped(self.caches, lambda leaf: leaf.twin()), self.layout)
        twin.length = self.length
        # A handle that waits to be computed would keep both from being written in place.
        mx.eval(twin.arrays())
        return twin

    # Bytes.

    def _row_leaves(self, *, tail: bool) -> list[RowCache]:
        assert self.layout is not None
        memory = self.layout.memory
        rows = [leaf for leaf in self.leaves if isinstance(leaf, RowCache)]
        return [leaf for leaf in rows if _in_tail(leaf, memory) is tail]

    def _read_rows(self, caches: Sequence[RowCache], start: int, width: int) -> LayerRows:
        arrays = [part for leaf in caches for part in leaf.rows(start, self.length)]
        mx.eval(arrays)
        return LayerRows([to_numpy(part)[0] for part in arrays], self.length - start, width)

    def rows(self) -> LayerRows | None:
        assert self.layout is not None
        if not self.layout.rows:
            return None
        return self._read_rows(self._row_leaves(tail=False), 0, self.layout.row_bytes)

    def tail(self) -> NDArray[np.uint8] | None:
        """The window's rows and the states, with how far they reach."""
        layout = self.layout
        assert layout is not None
        if not layout.window and not layout.states:
            return None
        first = self.length
        if layout.window:
            leaf = self._row_leaves(tail=True)[0]
            first = max(leaf.base, self.length - leaf.window)
        parts: list[NDArray[np.uint8]] = [
            np.frombuffer(_HEAD.pack(_MAGIC, layout.mark, self.length, first), np.uint8)
        ]
        if layout.window:
            rows = self._read_rows(self._row_leaves(tail=True), first, layout.tail_row_bytes)
            parts.append(rows.cut(0, len(rows)).reshape(-1))
        for state in self.leaves:
            if isinstance(state, StateCache):
                parts += [
                    np.ascontiguousarray(to_numpy(part)).reshape(-1).view(np.uint8) for part in state.cache
                ]
        return np.concatenate(parts)

    def tail_bytes(self, state: NDArray[np.uint8]) -> int | None:
        """How many bytes at the start of a whole state are its tail; None where they make no sense."""
        layout = self.layout
        assert layout is not None
        if state.nbytes < _HEAD.size:
            return None
        magic, mark, length, first = _HEAD.unpack(state[: _HEAD.size].tobytes())
        if magic != _MAGIC or mark != layout.mark or not 0 <= first <= length:
            return None
        nbytes = _HEAD.size + (length - first) * layout.tail_row_bytes + layout.state_bytes
        return int(nbytes) if nbytes <= state.nbytes else None

    def put(self, pieces: Sequence[NDArray[np.uint8]], tail: NDArray[np.uint8] | None) -> bool:
        """Hold what was captured. False: its shape is wrong, and nothing is held."""
        self.empty()
        layout = self.layout
        assert layout is not None
        count = sum(len(piece) for piece in pieces)
        if layout.rows:
            if any(piece.ndim != 2 or piece.shape[1] != layout.row_bytes for piece in pieces) or not count:
                return False
            table = pieces[0] if len(pieces) == 1 else np.concatenate(list(pieces))
            self._put_rows(self._row_leaves(tail=False), layout.rows, table, 0, count)
        self.length = count
        if layout.window or layout.states:
            good = tail is not None and self.put_tail(tail)
            if not good or (layout.rows and self.length != count):
                self.empty()
                return False
        return True

    def put_tail(self, tail: NDArray[np.uint8]) -> bool:
        """Replace the window and the states. Rows behind their end are for `remove` to cut."""
        layout = self.layout
        assert layout is not None
        if tail.nbytes < _HEAD.size:
            return False
        magic, mark, length, first = _HEAD.unpack(tail[: _HEAD.size].tobytes())
        if magic != _MAGIC or mark != layout.mark or not 0 <= first <= length or length < 1:
            return False
        rows = (length - first) * layout.tail_row_bytes
        if tail.nbytes != _HEAD.size + rows + layout.state_bytes:
            return False
        at = _HEAD.size
        if layout.window:
            table = tail[at : at + rows].reshape(length - first, layout.tail_row_bytes)
            self._put_rows(self._row_leaves(tail=True), layout.window, table, first, length)
            at += rows
        waiting = iter(layout.states)
        for leaf in self.leaves:
            if not isinstance(leaf, StateCache):
                continue
            arrays: list[Array] = []
            for part in next(waiting):
                values = tail[at : at + part.nbytes].copy().view(_TYPES[part.dtype])
                arrays.append(to_mlx(values.reshape(part.shape), part.dtype))
                at += part.nbytes
            leaf.cache = arrays
        mx.eval(self.arrays())
        self.length = length
        return True

    def _put_rows(
        self,
        caches: Sequence[RowCache],
        layout: Sequence[Sequence[ArrayShape]],
        table: NDArray[np.uint8],
        base: int,
        end: int,
    ) -> None:
        at = 0
        for leaf, parts in zip(caches, layout, strict=True):
            arrays: list[Array] = []
            for part in parts:
                heads, numbers = part.shape
                values = np.ascontiguousarray(table[:, at : at + part.nbytes]).view(_TYPES[part.dtype])
                values = values.reshape(len(table), heads, numbers).transpose(1, 0, 2)[None]
                arrays.append(to_mlx(values, part.dtype))
                at += part.nbytes
            mx.eval(arrays)
            leaf.put(arrays, base, end)

    def capture(self) -> Capture:
        return Capture(self.rows(), self.tail())


__all__ = ["LayerRows", "Leaf", "SequenceLayout", "SequenceState", "kind_of"]
