"""The bytes of a sequence's state, taken apart by token and put together again.

    magic u32, sequence i32
    streams u32, then for each stream: cells u32, and where that is not 0
        cell by cell: position i32, owners u32 (1), extension (M-RoPE and the like), owner i32
        transposed u32 (0), layers u32
        layer by layer: type i32, row bytes u64, one row of K a cell
        layer by layer, where the model keeps V: type i32, row bytes u64, one row of V a cell
    then, for kinds of memory that have one, the rest: the window's cells or the recurrent state

This layout is the library's own and may change with any build. So it is not assumed: `discover` finds the
reading under which every byte is accounted for, and proves it by rebuilding the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_OPENING = struct.Struct("<II")
_LAYER = struct.Struct("<iQ")
_EXTENSIONS = (0, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class Layout:
    """How one context writes the part of a state that has a row a token."""

    opening: bytes
    streams: int
    extension: int
    layers: int
    regions: tuple[tuple[int, int], ...]
    """(type, row bytes) of each layer's K, then of each layer's V."""

    @property
    def row_bytes(self) -> int:
        """The bytes that belong to one token."""
        return self.extension + sum(size for _, size in self.regions)

    @property
    def cell_bytes(self) -> int:
        return 12 + self.extension

    def size(self, length: int) -> int:
        """The bytes of this part for `length` tokens, with its opening."""
        head = 8 + 4 + 4 * self.streams + 8
        return head + length * (self.cell_bytes + self.row_bytes - self.extension) + 12 * len(self.regions)

    def rows(self, state: Bytes) -> TokenRows | None:
        """The rows of `state`, or None where its cells are not just the positions from 0 on."""
        at = 12
        counts = 0
        while counts == 0:
            if at + 4 > len(state):
                return None
            counts = int(state[at : at + 4].view("<u4")[0])
            at += 4
        cells = state[at : at + counts * self.cell_bytes].reshape(counts, self.cell_bytes)
        at += cells.size + 8
        positions = np.ascontiguousarray(cells[:, :4]).view("<i4").reshape(-1)
        order = None
        if not np.array_equal(positions, np.arange(counts)):
            order = np.argsort(positions)
            if not np.array_equal(positions[order], np.arange(counts)):
                return None
        parts = [cells[:, 8 : 8 + self.extension]] if self.extension else []
        for _, size in self.regions:
            at += _LAYER.size
            parts.append(state[at : at + counts * size].reshape(counts, size))
            at += counts * size
        return TokenRows(tuple(parts), self.row_bytes, order)

    def build(self, seq: int, pieces: Sequence[Bytes], rest: Bytes | None, out: Bytes) -> Bytes:
        """The state of `seq` with the rows of `pieces`, in the front of `out`."""
        length = sum(len(piece) for piece in pieces)
        home = seq if self.streams > 1 else 0
        tail = 0 if rest is None else len(rest)
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
        state[at : at + 8] = np.frombuffer(struct.pack("<II", 0, self.layers), np.uint8)
        at += 8
        if self.extension:
            _fill(cells[:, 8 : 8 + self.extension], pieces, 0)
        column = self.extension
        for kind, size in self.regions:
            state[at : at + _LAYER.size] = np.frombuffer(_LAYER.pack(kind, size), np.uint8)
            at += _LAYER.size
            _fill(state[at : at + length * size].reshape(length, size), pieces, column)
            at += length * size
            column += size
        after = 4 * (self.streams - 1 - home)
        state[at : at + after] = 0
        if rest is not None:
            state[at + after :] = rest
        return state


class TokenRows:
    """The rows of one state, over its bytes: cut what you need before those change."""

    def __init__(self, parts: tuple[Bytes, ...], row_bytes: int, order: NDArray[np.intp] | None) -> None:
        self._parts = parts
        self._order = order
        self.row_bytes = row_bytes

    def __len__(self) -> int:
        return len(self._parts[0])

    def cut(self, start: int, stop: int) -> Bytes:
        """The rows of tokens `start` to `stop`, one a token, in an array of their own."""
        out = np.empty((stop - start, self.row_bytes), np.uint8)
        which = slice(start, stop) if self._order is None else self._order[start:stop]
        column = 0
        for part in self._parts:
            out[:, column : column + part.shape[1]] = part[which]
            column += part.shape[1]
        return out


def discover(state: Bytes, rest: Bytes | None, seq: int, streams: int) -> Layout | None:
    """The layout of `state`, whose last bytes are `rest`; None where no reading accounts for every byte."""
    end = len(state) - (0 if rest is None else len(rest))
    if rest is not None and not np.array_equal(state[end:], rest):
        return None
    for extension in _EXTENSIONS:
        layout = _read(state[:end], streams, extension)
        if layout is None:
            continue
        rows = layout.rows(state)
        if rows is None:
            continue
        again = layout.build(seq, [rows.cut(0, len(rows))], rest, np.empty(len(state), np.uint8))
        if np.array_equal(again, state):
            return layout
    return None


def _read(body: Bytes, streams: int, extension: int) -> Layout | None:
    data = memoryview(body)  # type: ignore[arg-type]
    try:
        at = 8
        (said,) = struct.unpack_from("<I", data, at)
        at += 4
        count = 0
        seen = 0
        while count == 0:
            (count,) = struct.unpack_from("<I", data, at)
            at += 4
            seen += 1
        at += count * (12 + extension)
        transposed, layers = _OPENING.unpack_from(data, at)
        at += 8
        end = len(body) - 4 * (streams - seen)
        regions: list[tuple[int, int]] = []
        while at < end:
            kind, size = _LAYER.unpack_from(data, at)
            at += _LAYER.size + count * size
            regions.append((kind, size))
        if said != streams or transposed or at != end or not layers <= len(regions) <= 2 * layers:
            return None
        return Layout(bytes(data[:8]), streams, extension, layers, tuple(regions))
    except struct.error:
        return None


def _fill(region: Bytes, pieces: Sequence[Bytes], column: int) -> None:
    at = 0
    for piece in pieces:
        region[at : at + len(piece)] = piece[:, column : column + region.shape[1]]
        at += len(piece)
