"""What one sequence holds, and what can be computed from it.

Each token leaves a cell whose value depends on everything that the token could see when it was computed,
like the keys and values of a transformer. So a cell that is missing, foreign or half written shows in all
that comes after it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Capture
from perdure.memory import MemorySpec

_MASK = (1 << 64) - 1
_POISON = 0xBADC0FFEE0DDF00D
_HEAD = struct.Struct("<4sII")
_MAGIC = b"TOYS"
_CELL = np.dtype([("pos", "<i4"), ("token", "<i4"), ("value", "<u8")])
_ROLLING = struct.Struct("<iQ")


def mix(*words: int) -> int:
    """A 64-bit hash of numbers in their order, the same in every process."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = ((state ^ (word & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 29)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 32
    return state


class Cell(NamedTuple):
    token: int
    value: int


class Cells:
    """Cells by position. `total` is the sum of their values, whatever was put in or taken out."""

    def __init__(self) -> None:
        self.total = 0
        self._at: dict[int, Cell] = {}
        self._newest = -1

    def __len__(self) -> int:
        return len(self._at)

    def oldest(self) -> int:
        return min(self._at, default=-1)

    def newest(self) -> int:
        # Asked for at every token: what comes next is the newest, and what goes is looked at then.
        return self._newest

    def put(self, pos: int, cell: Cell) -> None:
        self._drop(pos)
        self._at[pos] = cell
        self._newest = max(self._newest, pos)
        self.total += cell.value

    def cut(self, start: int) -> None:
        """Drop the positions from `start` on."""
        self._drop_all([pos for pos in self._at if pos >= start])

    def expire(self, end: int) -> None:
        """Drop the positions before `end`."""
        self._drop_all([pos for pos in self._at if pos < end])

    def sum(self, start: int, end: int) -> int:
        """The values of the positions from `start` up to but not with `end`, as far as they are there."""
        return sum(self._at[pos].value for pos in range(start, end) if pos in self._at)

    def since(self, token: int) -> int | None:
        """How many cells follow the last one of a token, or None where there is none."""
        for pos in range(self._newest, -1, -1):
            if pos in self._at and self._at[pos].token == token:
                return self._newest - pos
        return None

    def copy(self) -> Cells:
        twin = Cells()
        twin._at = dict(self._at)
        twin._newest, twin.total = self._newest, self.total
        return twin

    def pack(self, start: int = 0) -> bytes:
        rows = [(pos, *cell) for pos, cell in sorted(self._at.items()) if pos >= start]
        return struct.pack("<I", len(rows)) + np.array(rows, _CELL).tobytes()

    @classmethod
    def unpack(cls, data: memoryview) -> tuple[Cells, memoryview]:
        """Cells from the front of `data`, and what follows them; struct.error or ValueError where short."""
        (count,) = struct.unpack_from("<I", data)
        end = 4 + count * _CELL.itemsize
        found = cls()
        for pos, token, value in np.frombuffer(data[4:end], _CELL, count).tolist():
            found.put(pos, Cell(token, value))
        return found, data[end:]

    def _drop_all(self, positions: list[int]) -> None:
        for pos in positions:
            self._drop(pos)
        if positions:
            self._newest = max(self._at, default=-1)

    def _drop(self, pos: int) -> None:
        if cell := self._at.pop(pos, None):
            self.total -= cell.value


class CellRows:
    """Packed cells, a row each."""

    row_bytes = _CELL.itemsize

    def __init__(self, cells: bytes) -> None:
        self._cells = np.frombuffer(cells, np.uint8).reshape(-1, self.row_bytes)

    def __len__(self) -> int:
        return len(self._cells)

    def cut(self, start: int, stop: int) -> NDArray[np.uint8]:
        return self._cells[start:stop].copy()


@dataclass(frozen=True, slots=True)
class Rolling:
    """All tokens so far in one number: it moves on, and cannot be taken apart."""

    pos: int = -1
    value: int = 0


class Held:
    """The state of one sequence, in the parts that its kind of memory has.

    `base` where it has rows, `window` where it has one, `rolling` where it has a recurrent state.
    """

    def __init__(self, memory: MemorySpec) -> None:
        self._memory = memory
        self._reach = memory.window or 0
        self.base = Cells() if memory.has_rows else None
        self.window = Cells() if memory.has_window else None
        self.rolling = Rolling() if memory.has_recurrent_state else None

    # Positions, as the parts have them.

    def newest(self) -> int:
        if self.window is not None:
            return self.window.newest()
        ends = [] if self.base is None else [self.base.newest()]
        return min(ends if self.rolling is None else [*ends, self.rolling.pos])

    def oldest(self) -> int:
        if self.rolling is not None:
            return self.rolling.pos
        part = self.base if self.window is None else self.window
        return -1 if part is None else part.oldest()

    # Tokens.

    def compute(self, pos: int, token: int, salt: int) -> int:
        """Take in `token` at `pos`; the value that its logits are made of."""
        seen = 0 if self.base is None else self.base.total
        near = 0 if self.window is None else self.window.sum(pos - self._reach + 1, pos)
        past = 0 if self.rolling is None else self.rolling.value
        value = mix(salt, token, pos, seen, near, past)
        self._put(pos, Cell(token, value))
        return value

    def expire(self) -> None:
        """Give up the cells that no later token can see."""
        if self.window is not None and not self._memory.keeps_window:
            self.window.expire(self.window.newest() + 2 - self._reach)

    def spoil(self, pos: int, token: int) -> None:
        """What an interrupted computation leaves where it cannot be undone: the position, not the value."""
        self._put(pos, Cell(token, _POISON))

    def mislay(self) -> None:
        """Lose a rolling state, but not its position."""
        if self.rolling is not None:
            self.rolling = replace(self.rolling, value=mix(self.rolling.value, _POISON))

    def _put(self, pos: int, cell: Cell) -> None:
        if self.base is not None:
            self.base.put(pos, cell)
        if self.window is not None:
            self.window.put(pos, cell)
        if self.rolling is not None:
            self.rolling = Rolling(pos, mix(self.rolling.value, cell.value))

    def remove(self, start: int) -> None:
        """Drop the positions from `start` on, where the memory can; a rolling state makes this a no-op."""
        if self.rolling is not None:
            if 0 < start <= self.rolling.pos:
                return
            self.rolling = Rolling() if start <= 0 else self.rolling
        if self.base is not None:
            self.base.cut(start)
        if self.window is not None:
            self.window.cut(start)

    def copy(self) -> Held:
        twin = Held(self._memory)
        twin.base = None if self.base is None else self.base.copy()
        twin.window = None if self.window is None else self.window.copy()
        twin.rolling = self.rolling
        return twin

    # Bytes: a mark, what kind they are of, and the parts. Nothing in them is checked for sense.

    def pack(self, *, partial: bool) -> bytes:
        whole = not partial or not self._memory.needs_checkpoint
        parts = [self._head()]
        if self.base is not None and whole:
            parts.append(self.base.pack())
        if self.window is not None:
            parts.append(self.window.pack(self.window.newest() + 1 - self._reach))
        if self.rolling is not None:
            parts.append(_ROLLING.pack(self.rolling.pos, self.rolling.value))
        return b"".join(parts)

    def unpack(self, data: memoryview, *, partial: bool) -> bool:
        """Take over what `data` says. False: its shape is wrong, and this is then half replaced."""
        whole = not partial or not self._memory.needs_checkpoint
        try:
            if data[: _HEAD.size] != self._head():
                return False
            data = data[_HEAD.size :]
            if self.base is not None and whole:
                self.base, data = Cells.unpack(data)
            if self.window is not None:
                self.window, data = Cells.unpack(data)
            if self.rolling is not None:
                self.rolling = Rolling(*_ROLLING.unpack_from(data))
                data = data[_ROLLING.size :]
        except (struct.error, ValueError):
            return False
        return not data

    @property
    def row_bytes(self) -> int | None:
        return None if self.base is None else CellRows.row_bytes

    def capture(self) -> Capture:
        """The base cells as rows; the window or the rolling state as the rest."""
        rest = None
        if self._memory.needs_checkpoint:
            rest = np.frombuffer(self.pack(partial=True), np.uint8)
        return Capture(None if self.base is None else CellRows(self.base.pack()[4:]), rest)

    def assemble(self, pieces: Sequence[NDArray[np.uint8]], rest: NDArray[np.uint8] | None) -> bool:
        parts = [self._head()]
        if self.base is not None:
            cells = b"".join(piece.tobytes() for piece in pieces)
            parts += [struct.pack("<I", len(cells) // _CELL.itemsize), cells]
        if rest is not None:
            parts.append(rest.tobytes()[_HEAD.size :])
        return self.unpack(memoryview(b"".join(parts)), partial=False)

    def _head(self) -> bytes:
        return _HEAD.pack(_MAGIC, zlib.crc32(self._memory.name.encode()), self._reach)
