"""The native calls of the toy engine.

It is as treacherous as the real one: a cut through a lost window looks fine, a recurrent state ignores a
partial cut, a failed decode leaves what it leaves, state bytes are believed, and rows of logits lie in one
buffer that the next decode overwrites and sometimes moves.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Batch, Capture, Floats, Outcome
from perdure.engine.core import Adapter
from perdure.errors import EngineError
from perdure.memory import MemorySpec
from perdure.testing.toy.faults import Faults, PlannedFault

WIDTH = 16
"""Numbers of a hidden state."""
_NOISE = np.float32(1e30)
"""What is found in memory that was freed or half written."""


class ToyAbort(AssertionError):
    """The real engine would have ended the process here."""


class ToyAdapter:
    """A change of the toy weights. It fits only the model that made it."""

    def __init__(self, weights: str, digest: str, invocation: tuple[int, ...] = ()) -> None:
        self.weights = weights
        self.digest = digest
        self.invocation = invocation


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEnding:
    """When a text ends: `length` tokens after the token `opened`, the logit of `end` is higher by `by`."""

    opened: int
    end: int
    length: int
    by: float


class Trouble:
    """The faults still to come in one context, and the calls counted so far. Tests may add to it."""

    def __init__(self, faults: Faults) -> None:
        self.calls = set(faults.calls)
        self.decodes = dict(faults.decodes)
        self.writes = set(faults.writes)
        self.lies = dict(faults.lies)
        self.pace = faults.pace
        self.gate = faults.gate
        self.n_calls = self.n_decodes = self.n_writes = self.n_questions = 0

    # Adding to it.

    def fail_call(self, ahead: int = 1) -> None:
        """Let the native call that is `ahead` calls from now fail."""
        self.calls.add(self.n_calls + ahead)

    def fail_decode(self, outcome: Outcome = Outcome.FAILED, *, after: int = 0, ahead: int = 1) -> None:
        """Let the decode that is `ahead` decodes from now end with `outcome` after so many tokens."""
        self.decodes[self.n_decodes + ahead] = PlannedFault(outcome, after)

    def refuse_write(self, ahead: int = 1) -> None:
        self.writes.add(self.n_writes + ahead)

    def lie(self, by: int, ahead: int = 1) -> None:
        self.lies[self.n_questions + ahead] = by

    def forget(self) -> None:
        """Let nothing go wrong from here on."""
        self.calls.clear()
        self.decodes.clear()
        self.writes.clear()
        self.lies.clear()

    # Asked by the core, once a call.

    def strikes(self) -> bool:
        self.n_calls += 1
        return self.n_calls in self.calls

    def decode(self) -> PlannedFault | None:
        struck = self.strikes()
        self.n_decodes += 1
        return PlannedFault() if struck else self.decodes.get(self.n_decodes)

    def write(self) -> bool:
        struck = self.strikes()
        self.n_writes += 1
        return struck or self.n_writes in self.writes

    def newest(self) -> int:
        self.n_questions += 1
        return self.lies.get(self.n_questions, 0)


class ToyCore:
    """Sequences of cells, and logits computed from exactly those cells."""

    def __init__(
        self,
        *,
        memory: MemorySpec,
        weights: str,
        bias: Floats,
        n_seq: int,
        n_batch: int,
        cells: int,
        max_outputs: int,
        shared: bool,
        faults: Faults,
        ending: TextEnding | None = None,
    ) -> None:
        self.n_vocab = len(bias)
        self.width = WIDTH
        self.faults = Trouble(faults)
        self._memory = memory
        self._weights = weights
        self._bias = bias
        self._ending = ending
        self._n_batch = n_batch
        self._cells = cells
        self._max_outputs = max_outputs
        self._shared = shared
        self._salt = self._plain = mix(int(weights[:16], 16))
        self._states = [ToySequenceState(memory) for _ in range(n_seq)]
        self._ramp = (np.arange(1, self.n_vocab + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        self._buffer: Floats = np.full((1, self.n_vocab), _NOISE, np.float32)
        self._places: dict[int, int] = {}
        self._values: list[int] = []
        self._stop = threading.Event()
        self._closed = False

    # Decoding.

    def decode(self, batch: Batch) -> Outcome:
        self._check_open()
        mishap = self.faults.decode()
        entries = list(
            zip(
                batch.seqs[: batch.size].tolist(),
                batch.positions[: batch.size].tolist(),
                batch.tokens[: batch.size].tolist(),
                strict=True,
            )
        )
        self._check_batch(batch, entries)
        if mishap and mishap.outcome in (Outcome.FULL, Outcome.REJECTED):
            return mishap.outcome
        if not self._continues(entries):
            return Outcome.REJECTED
        if not self._fits(entries):
            return Outcome.FULL
        self._reserve(np.flatnonzero(batch.outputs[: batch.size]).tolist())
        for seq in range(len(self._states)) if self._shared else {seq for seq, _, _ in entries}:
            self._states[seq].expire()
        for index, (seq, pos, token) in enumerate(entries):
            outcome = self._interruption(mishap, index)
            if outcome is not Outcome.DONE:
                self._leave(entries, index)
                return outcome
            value = self._states[seq].compute(pos, token, self._salt)
            self._values.append(value)
            if index in self._places:
                row = self._buffer[self._places[index]]
                row[:] = self._logits(value)
                if self._ending is not None and self._is_over(seq, self._ending):
                    row[self._ending.end] += self._ending.by
        if mishap and mishap.outcome is not Outcome.DONE:
            self._leave(entries, len(entries) - 1)
            return mishap.outcome
        return Outcome.DONE

    def row(self, index: int) -> Floats:
        self._check_open()
        if index not in self._places:
            raise EngineError(f"the engine has no logits for batch entry {index}")
        row: Floats = self._buffer[self._places[index]]
        return row

    def rows(self, indices: Sequence[int]) -> Floats:
        return np.array([self.row(index) for index in indices])

    def synchronize(self) -> None:
        pass

    def hidden(self, count: int) -> Floats:
        self._check_open()
        rows = [[mix(value, place) for place in range(self.width)] for value in self._values[:count]]
        return np.array([[(word >> 40) * 2.0**-23 - 1.0 for word in row] for row in rows], np.float32)

    def _check_batch(self, batch: Batch, entries: list[tuple[int, int, int]]) -> None:
        if not 0 < batch.size <= self._n_batch:
            raise ToyAbort(f"a batch of {batch.size} tokens where {self._n_batch} fit")
        if int(batch.outputs[: batch.size].sum()) > self._max_outputs:
            raise ToyAbort(f"more than {self._max_outputs} rows in one batch")
        for seq, _, token in entries:
            if not 0 <= seq < len(self._states) or not 0 <= token < self.n_vocab:
                raise ToyAbort(f"token {token} in sequence {seq}")

    def _continues(self, entries: list[tuple[int, int, int]]) -> bool:
        """Whether each sequence goes on where it ends. One that holds nothing may start anywhere."""
        ends = {seq: self._states[seq].newest() for seq, _, _ in entries}
        for seq, pos, _ in entries:
            if ends[seq] >= 0 and pos != ends[seq] + 1:
                return False
            ends[seq] = pos
        return True

    def _fits(self, entries: list[tuple[int, int, int]]) -> bool:
        if self._shared:
            used = sum(len(each.base) for each in self._states if each.base is not None)
            return used + len(entries) <= self._cells
        return all(pos < self._cells for _, pos, _ in entries)

    def _reserve(self, outputs: list[int]) -> None:
        """Room for these rows. What was there is lost; a larger buffer lies elsewhere."""
        self._buffer[:] = _NOISE
        if len(outputs) > len(self._buffer):
            self._buffer = np.full((len(outputs), self.n_vocab), _NOISE, np.float32)
        self._places = {index: place for place, index in enumerate(outputs)}
        self._values.clear()

    def _interruption(self, mishap: PlannedFault | None, index: int) -> Outcome:
        if mishap and mishap.outcome is not Outcome.DONE and index == mishap.after:
            return mishap.outcome
        if self.faults.gate is not None:
            self.faults.gate.wait(self._stop)
        if self.faults.pace > 0:
            self._stop.wait(self.faults.pace)
        return Outcome.ABORTED if self._stop.is_set() else Outcome.DONE

    def _leave(self, entries: list[tuple[int, int, int]], done: int) -> None:
        """What an interrupted decode leaves: the tokens before it, and of a rolling state no good one.

        Rolling states are moved about for a step of several sequences, so it can hit any of them.
        """
        for seq, pos, token in entries[done:]:
            if self._states[seq].rolling is not None:
                self._states[seq].spoil(pos, token)
        touched = {seq for seq, _, _ in entries}
        for seq, state in enumerate(self._states):
            if len(touched) > 1 and seq not in touched:
                state.mislay()

    def _logits(self, value: int) -> Floats:
        bits = np.uint64(value) ^ self._ramp
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return unit * np.float32(8) - np.float32(4) + self._bias

    def _is_over(self, seq: int, ending: TextEnding) -> bool:
        base = self._states[seq].base
        since = base.since(ending.opened) if base is not None else None
        return since is not None and since >= ending.length

    # Sequences.

    def newest(self, seq: int) -> int:
        return self._at(seq).newest() + self.faults.newest()

    def oldest(self, seq: int) -> int:
        return self._at(seq).oldest()

    def tokens(self, seq: int) -> list[int] | None:
        """What the rows of a sequence are of, cell by cell; None where its memory has none."""
        base = self._at(seq).base
        return None if base is None else base.tokens()

    def remove(self, seq: int, start: int) -> None:
        sequence = self._at(seq)
        if not self.faults.strikes():
            sequence.remove(start)

    def copy(self, src: int, dst: int) -> None:
        sequence = self._at(src)
        self._at(dst)
        if not self.faults.strikes():
            self._states[dst] = sequence.copy()

    def clear(self) -> None:
        self._check_open()
        if not self.faults.strikes():
            self._states = [ToySequenceState(self._memory) for _ in self._states]

    # State.

    def read(self, seq: int, *, partial: bool) -> NDArray[np.uint8]:
        sequence = self._at(seq)
        if self.faults.strikes():
            raise EngineError(f"the engine gave no state for sequence {seq}")
        return np.frombuffer(sequence.pack(partial=partial), np.uint8).copy()

    def write(self, seq: int, state: NDArray[np.uint8], *, partial: bool) -> bool:
        sequence = self._at(seq)
        if self.faults.write() or not sequence.unpack(memoryview(state.tobytes()), partial=partial):
            self._states[seq] = ToySequenceState(self._memory)
            return False
        return True

    def capture(self, seq: int) -> Capture:
        return self._at(seq).capture()

    def assemble(
        self, seq: int, pieces: Sequence[NDArray[np.uint8]], tail_state: NDArray[np.uint8] | None
    ) -> bool:
        sequence = self._at(seq)
        if self.faults.write() or not sequence.assemble(pieces, tail_state):
            self._states[seq] = ToySequenceState(self._memory)
            return False
        return True

    def row_bytes(self, seq: int) -> int | None:
        return self._at(seq).row_bytes

    def adapt(self, adapters: Mapping[Adapter, float]) -> bool:
        self._check_open()
        if self.faults.strikes():
            return False
        salt = self._plain
        for adapter, scale in sorted(adapters.items(), key=lambda item: item[0].digest):
            if not isinstance(adapter, ToyAdapter) or adapter.weights != self._weights:
                return False
            salt = mix(salt, int(adapter.digest[:16], 16), hash(float(scale)))
        self._salt = salt
        return True

    # Its own life.

    def prepare(self) -> None:
        pass

    def limit_scratch(self, nbytes: int) -> int:
        return 0

    @property
    def scratch_bytes(self) -> int:
        return 0

    def stop(self) -> None:
        self._stop.set()
        if self.faults.gate is not None:
            self.faults.gate.check_stop()

    def rearm(self) -> None:
        self._stop.clear()

    def close(self) -> None:
        self._closed = True
        self._buffer[:] = _NOISE
        self._states = []

    def _at(self, seq: int) -> ToySequenceState:
        self._check_open()
        if not 0 <= seq < len(self._states):
            raise ToyAbort(f"sequence {seq} of {len(self._states)}")
        return self._states[seq]

    def _check_open(self) -> None:
        if self._closed:
            raise ToyAbort("used after it was freed")


# What one sequence holds, and what can be computed from it.
#
# Each token leaves a cell whose value depends on everything that the token could see when it was computed,
# like the keys and values of a transformer. So a cell that is missing, foreign or half written shows in all
# that comes after it.

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

    def tokens(self) -> list[int]:
        return [self._at[pos].token for pos in sorted(self._at)]

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
        cells = cls()
        for pos, token, value in np.frombuffer(data[4:end], _CELL, count).tolist():
            cells.put(pos, Cell(token, value))
        return cells, data[end:]

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


class ToySequenceState:
    """The state of one sequence, in the parts that its kind of memory has.

    `base` where it has rows, `window` where it has one, `rolling` where it has a recurrent state.
    """

    def __init__(self, memory: MemorySpec) -> None:
        self._memory = memory
        self._needs_checkpoint = memory.needs_checkpoint
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

    def copy(self) -> ToySequenceState:
        twin = ToySequenceState(self._memory)
        twin.base = None if self.base is None else self.base.copy()
        twin.window = None if self.window is None else self.window.copy()
        twin.rolling = self.rolling
        return twin

    # Bytes: a mark, what kind they are of, and the parts. Nothing in them is checked for sense.

    def pack(self, *, partial: bool) -> bytes:
        whole = not partial or not self._needs_checkpoint
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
        whole = not partial or not self._needs_checkpoint
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
        """The base cells as rows; the window or the rolling state as the tail state."""
        tail_state = None
        if self._needs_checkpoint:
            tail_state = np.frombuffer(self.pack(partial=True), np.uint8)
        return Capture(None if self.base is None else CellRows(self.base.pack()[4:]), tail_state)

    def assemble(self, pieces: Sequence[NDArray[np.uint8]], tail_state: NDArray[np.uint8] | None) -> bool:
        parts = [self._head()]
        if self.base is not None:
            cells = b"".join(piece.tobytes() for piece in pieces)
            parts += [struct.pack("<I", len(cells) // _CELL.itemsize), cells]
        if tail_state is not None:
            parts.append(tail_state.tobytes()[_HEAD.size :])
        return self.unpack(memoryview(b"".join(parts)), partial=False)

    def _head(self) -> bytes:
        return _HEAD.pack(_MAGIC, zlib.crc32(self._memory.name.encode()), self._reach)
