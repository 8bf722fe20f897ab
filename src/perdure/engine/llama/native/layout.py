"""The bytes of a sequence's state, taken apart by token and put together again.

    magic u32, sequence i32
    streams u32, then for each stream: cells u32, and where that is not 0
        cell by cell: position i32, owners u32 (1), extension (M-RoPE and the like), owner i32
        transposed u32 (0), layers u32, since 0.6 figures of 8 bytes (rotations of K and V)
        layer by layer: type i32, row bytes u64, one row of K a cell
        layer by layer, where the model keeps V: type i32, row bytes u64, one row of V a cell
    then, for kinds of memory that have one, the tail state: the window's cells or the recurrent state

This layout is the library's own and may change with any build. So it is not assumed: `discover` finds the
reading under which every byte is accounted for, and proves it by rebuilding the same bytes.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure.engine.parallel import spread

Bytes = NDArray[np.uint8]
Rows = NDArray[np.void]
"""An element is what one layer keeps of one token. Moved whole, it takes less than half the time."""

_OPENING = struct.Struct("<II")
_LAYER = struct.Struct("<iQ")
_EXTENSIONS = (0, 8, 12, 16)
_FIGURES = (0, 8)
"""Bytes that may stand between the number of layers and the first one."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """How one context writes the part of a state that has a row a token."""

    opening: bytes
    streams: int
    extension: int
    layers: int
    regions: tuple[tuple[int, int], ...]
    """(type, row bytes) of each layer's K, then of each layer's V."""
    figures: bytes = b""
    """What stands behind the number of layers; the same in every state of one context."""

    @property
    def row_bytes(self) -> int:
        """The bytes that belong to one token."""
        return self.place_bytes + sum(size for _, size in self.regions)

    @property
    def place_bytes(self) -> int:
        """Of them, what says where the token is: its position and the extension, where there is one."""
        return 4 + self.extension if self.extension else 0

    @property
    def cell_bytes(self) -> int:
        return 12 + self.extension

    def size(self, length: int) -> int:
        """The bytes of this part for `length` tokens, with its opening."""
        head = 8 + 4 + 4 * self.streams + 8 + len(self.figures)
        return head + length * (self.cell_bytes + self.row_bytes - self.place_bytes) + 12 * len(self.regions)

    def rows(self, state: Bytes) -> StateRows | None:
        """The rows of `state`, or None where its cells are not just the positions from 0 on. With an
        extension two cells may have one position in time: their order is then by time, row and column."""
        cells, at = self._cells(state)
        if cells is None:
            return None
        counts = len(cells)
        at += 8 + len(self.figures)
        positions = np.ascontiguousarray(cells[:, :4]).view("<i4").reshape(-1)
        order = None
        if self.extension:
            places = np.concatenate([cells[:, :4], cells[:, 8 : 8 + self.extension]], axis=1)
            time, column, row = places[:, :12].view("<i4").astype(np.int64).T
            if not _rises(time, row, column):
                order = np.lexsort((column, row, time))
                if not _rises(time[order], row[order], column[order]):
                    return None
            if time.min():
                return None
            return StateRows(places, self._runs(state, at, counts), order)
        if not np.array_equal(positions, np.arange(counts)):
            order = np.argsort(positions)
            if not np.array_equal(positions[order], np.arange(counts)):
                return None
        return StateRows(cells[:, :0], self._runs(state, at, counts), order)

    def build(self, seq: int, pieces: Sequence[Bytes], tail_state: Bytes | None, out: Bytes) -> Bytes:
        """The state of `seq` with the rows of `pieces`, in the front of `out`."""
        length = sum(len(piece) for piece in pieces)
        home = seq if self.streams > 1 else 0
        tail = 0 if tail_state is None else len(tail_state)
        state = out[: self.size(length) + tail]
        state[:4] = np.frombuffer(self.opening[:4], np.uint8)
        state[4:12] = np.frombuffer(struct.pack("<iI", seq, self.streams), np.uint8)
        state[12 : 12 + 4 * home] = 0
        at = 12 + 4 * home
        state[at : at + 4] = np.frombuffer(struct.pack("<I", length), np.uint8)
        at += 4
        cells = state[at : at + length * self.cell_bytes].reshape(length, self.cell_bytes)
        meta = np.empty((length, 3), "<i4")
        meta[:, 0] = np.arange(length)
        meta[:, 1] = 1
        meta[:, 2] = seq
        raw = meta.view(np.uint8).reshape(length, 12)
        cells[:, :8], cells[:, 8 + self.extension :] = raw[:, :8], raw[:, 8:]
        at += cells.size
        counts = struct.pack("<II", 0, self.layers) + self.figures
        state[at : at + len(counts)] = np.frombuffer(counts, np.uint8)
        at += len(counts)
        runs = self._runs(state, at, length)
        ends = list(itertools.accumulate(len(piece) for piece in pieces))

        def place(number: int) -> None:
            piece, last = pieces[number], ends[number]
            first = last - len(piece)
            if self.extension:
                cells[first:last, :4] = piece[:, :4]
                cells[first:last, 8 : 8 + self.extension] = piece[:, 4 : self.place_bytes]
            for run, columns in zip(runs, _columns(piece, self.place_bytes, runs), strict=True):
                run[:, first:last] = columns.T

        for _ in spread(place, range(len(pieces)), state.nbytes):
            pass
        for kind, size in self.regions:
            state[at : at + _LAYER.size] = np.frombuffer(_LAYER.pack(kind, size), np.uint8)
            at += _LAYER.size + length * size
        after = 4 * (self.streams - 1 - home)
        state[at : at + after] = 0
        if tail_state is not None:
            state[at + after :] = tail_state
        return state

    def _cells(self, state: Bytes) -> tuple[Bytes | None, int]:
        """The cells of `state`, and where they end."""
        counts = np.frombuffer(state[12 : 12 + 4 * self.streams].tobytes(), "<u4")
        homes = np.flatnonzero(counts)
        if not len(homes):
            return None, 0
        at, count = 16 + 4 * int(homes[0]), int(counts[homes[0]])
        end = at + count * self.cell_bytes
        return state[at:end].reshape(count, self.cell_bytes), end

    def _proves(self, state: Bytes, tail_state: Bytes | None, seq: int) -> bool:
        """Whether this layout accounts for every byte of `state`."""
        rows = self.rows(state)
        if rows is None:
            return False
        stored = rows.as_stored()
        again = self.build(seq, [stored.cut(0, len(stored))], tail_state, np.empty(len(state), np.uint8))
        theirs, ours = self._cells(state)[0], self._cells(again)[0]
        assert theirs is not None
        assert ours is not None
        # Cells may lie in any order: their positions are all there, as `rows` found.
        ours[:, :4] = theirs[:, :4]
        return np.array_equal(again, state)

    def _runs(self, state: Bytes, at: int, length: int) -> list[Rows]:
        """The rows from `at` on, by region and token: a run for regions that follow evenly on each other."""
        runs = []
        for size, regions in itertools.groupby(size for _, size in self.regions):
            count, step = len(list(regions)), _LAYER.size + length * size
            runs.append(np.ndarray((count, length), f"V{size}", state, at + _LAYER.size, (step, size)))
            at += count * step
        return runs


class StateRows:
    """The rows of one state, over its bytes: cut what you need before those change."""

    def __init__(self, places: Bytes, runs: Sequence[Rows], order: NDArray[np.intp] | None) -> None:
        """`places` are the positions and extensions of the cells, where the layout has any."""
        self._places = places
        self._runs = runs
        self._order = order
        self.row_bytes = places.shape[1] + sum(len(run) * run.itemsize for run in runs)

    def __len__(self) -> int:
        return len(self._places)

    def as_stored(self) -> StateRows:
        """The same rows in the order in which their cells lie."""
        return StateRows(self._places, self._runs, None)

    def cut(self, start: int, stop: int) -> Bytes:
        """The rows of tokens `start` to `stop`, one a token, in an array of their own."""
        out = np.empty((stop - start, self.row_bytes), np.uint8)
        which = slice(start, stop) if self._order is None else self._order[start:stop]
        width = self._places.shape[1]
        out[:, :width] = self._places[which]
        for run, columns in zip(self._runs, _columns(out, width, self._runs), strict=True):
            columns[...] = run[:, which].T
        return out


def discover(state: Bytes, tail_state: Bytes | None, seq: int, streams: int) -> StateLayout | None:
    """The layout of `state`, which ends in `tail_state`; None where no reading accounts for every byte."""
    end = len(state) - (0 if tail_state is None else len(tail_state))
    if tail_state is not None and not np.array_equal(state[end:], tail_state):
        return None
    for extension, figures in itertools.product(_EXTENSIONS, _FIGURES):
        layout = _read(state[:end], seq, streams, extension, figures)
        if layout is not None and layout._proves(state, tail_state, seq):
            return layout
    return None


def window_rows(tail_state: Bytes, streams: int) -> tuple[StateLayout, int, StateRows] | None:
    """The rows of a window's cells, which a tail state has behind a separate header, in the order of their
    positions, with the first position; None where no reading accounts for every byte and position."""
    (seq,) = struct.unpack_from("<i", tail_state.tobytes()[:8], 4)
    for extension, figures in itertools.product(_EXTENSIONS, _FIGURES):
        layout = _read(tail_state, seq, streams, extension, figures)
        cells, at = (None, 0) if layout is None else layout._cells(tail_state)
        if layout is None or cells is None:
            continue
        positions = np.ascontiguousarray(cells[:, :4]).view("<i4").reshape(-1)
        order = np.argsort(positions)
        if not np.array_equal(positions[order], positions.min() + np.arange(len(cells))):
            continue
        runs = layout._runs(tail_state, at + 8 + len(layout.figures), len(cells))
        return layout, int(positions.min()), StateRows(cells[:, 8 : 8 + extension], runs, order)
    return None


def _rises(*numbers: NDArray[np.int64]) -> bool:
    """Whether each tuple of these numbers is larger than the one before it."""
    larger, equal = np.zeros(len(numbers[0]) - 1, np.bool_), np.ones(len(numbers[0]) - 1, np.bool_)
    for each in numbers:
        steps = np.diff(each)
        larger |= equal & (steps > 0)
        equal &= steps == 0
    return bool(larger.all())


def _read(body: Bytes, seq: int, streams: int, extension: int, figures: int) -> StateLayout | None:
    data = memoryview(body)  # type: ignore[arg-type]
    try:
        at = 8
        (stream_count,) = struct.unpack_from("<I", data, at)
        at += 4
        count = 0
        seen = 0
        while count == 0:
            (count,) = struct.unpack_from("<I", data, at)
            at += 4
            seen += 1
        at += count * (12 + extension)
        transposed, layers = _OPENING.unpack_from(data, at)
        at += 8 + figures
        between = bytes(data[at - figures : at])
        end = len(body) - 4 * (streams - seen)
        regions: list[tuple[int, int]] = []
        while at < end:
            kind, size = _LAYER.unpack_from(data, at)
            at += _LAYER.size + count * size
            regions.append((kind, size))
        elsewhere = seen != (seq + 1 if streams > 1 else 1)
        if (
            stream_count != streams
            or elsewhere
            or transposed
            or at != end
            or not layers <= len(regions) <= 2 * layers
        ):
            return None
        return StateLayout(bytes(data[:8]), streams, extension, layers, tuple(regions), between)
    except struct.error:
        return None


def _columns(piece: Bytes, column: int, runs: Sequence[Rows]) -> Iterator[Rows]:
    """The rows of `piece` from `column` on, by token and region: one element a row, as in `runs`."""
    for run in runs:
        shape, strides = (len(piece), len(run)), (piece.shape[1], run.itemsize)
        yield np.ndarray(shape, run.dtype, np.ascontiguousarray(piece), column, strides)
        column += len(run) * run.itemsize
