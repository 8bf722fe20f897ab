"""The native calls of the toy engine.

It is as treacherous as the real one: a cut through a lost window looks fine, a recurrent state ignores a
partial cut, a failed decode leaves what it leaves, state bytes are believed, and rows of logits lie in one
buffer that the next decode overwrites and sometimes moves.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure.engine.batch import Batch
from perdure.engine.contract import Adapter, Capture, Floats, Outcome
from perdure.errors import EngineError
from perdure.memory import MemorySpec
from perdure.testing.toy.cells import Held, mix
from perdure.testing.toy.faults import Faults, PlannedFault, Trouble

WIDTH = 16
"""Numbers of a hidden state."""
_NOISE = np.float32(1e30)
"""What is found in memory that was freed or half written."""


class ToyAbort(AssertionError):
    """The real engine would have ended the process here."""


class ToyAdapter:
    """A change of the toy weights. It fits only the model that made it."""

    def __init__(self, weights: str, digest: str) -> None:
        self.weights = weights
        self.digest = digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """When a text ends: `length` tokens after the token `opened`, the logit of `end` is higher by `by`."""

    opened: int
    end: int
    length: int
    by: float


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
        ending: Ending | None = None,
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
        self._held = [Held(memory) for _ in range(n_seq)]
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
        for seq in range(len(self._held)) if self._shared else {seq for seq, _, _ in entries}:
            self._held[seq].expire()
        for index, (seq, pos, token) in enumerate(entries):
            outcome = self._interruption(mishap, index)
            if outcome is not Outcome.DONE:
                self._leave(entries, index)
                return outcome
            value = self._held[seq].compute(pos, token, self._salt)
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
            if not 0 <= seq < len(self._held) or not 0 <= token < self.n_vocab:
                raise ToyAbort(f"token {token} in sequence {seq}")

    def _continues(self, entries: list[tuple[int, int, int]]) -> bool:
        """Whether each sequence goes on where it ends. One that holds nothing may start anywhere."""
        ends = {seq: self._held[seq].newest() for seq, _, _ in entries}
        for seq, pos, _ in entries:
            if ends[seq] >= 0 and pos != ends[seq] + 1:
                return False
            ends[seq] = pos
        return True

    def _fits(self, entries: list[tuple[int, int, int]]) -> bool:
        if self._shared:
            held = sum(len(each.base) for each in self._held if each.base is not None)
            return held + len(entries) <= self._cells
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
            if self._held[seq].rolling is not None:
                self._held[seq].spoil(pos, token)
        touched = {seq for seq, _, _ in entries}
        for seq, held in enumerate(self._held):
            if len(touched) > 1 and seq not in touched:
                held.mislay()

    def _logits(self, value: int) -> Floats:
        bits = np.uint64(value) ^ self._ramp
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return unit * np.float32(8) - np.float32(4) + self._bias

    def _is_over(self, seq: int, ending: Ending) -> bool:
        base = self._held[seq].base
        since = base.since(ending.opened) if base is not None else None
        return since is not None and since >= ending.length

    # Sequences.

    def newest(self, seq: int) -> int:
        return self._at(seq).newest() + self.faults.newest()

    def oldest(self, seq: int) -> int:
        return self._at(seq).oldest()

    def remove(self, seq: int, start: int) -> None:
        held = self._at(seq)
        if not self.faults.strikes():
            held.remove(start)

    def copy(self, src: int, dst: int) -> None:
        held = self._at(src)
        self._at(dst)
        if not self.faults.strikes():
            self._held[dst] = held.copy()

    def clear(self) -> None:
        self._check_open()
        if not self.faults.strikes():
            self._held = [Held(self._memory) for _ in self._held]

    # State.

    def read(self, seq: int, *, partial: bool) -> NDArray[np.uint8]:
        held = self._at(seq)
        if self.faults.strikes():
            raise EngineError(f"the engine gave no state for sequence {seq}")
        return np.frombuffer(held.pack(partial=partial), np.uint8).copy()

    def write(self, seq: int, state: NDArray[np.uint8], *, partial: bool) -> bool:
        held = self._at(seq)
        if self.faults.write() or not held.unpack(memoryview(state.tobytes()), partial=partial):
            self._held[seq] = Held(self._memory)
            return False
        return True

    def capture(self, seq: int) -> Capture:
        return self._at(seq).capture()

    def assemble(self, seq: int, pieces: Sequence[NDArray[np.uint8]], rest: NDArray[np.uint8] | None) -> bool:
        held = self._at(seq)
        if self.faults.write() or not held.assemble(pieces, rest):
            self._held[seq] = Held(self._memory)
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
            self.faults.gate.nudge()

    def rearm(self) -> None:
        self._stop.clear()

    def close(self) -> None:
        self._closed = True
        self._buffer[:] = _NOISE
        self._held = []

    def _at(self, seq: int) -> Held:
        self._check_open()
        if not 0 <= seq < len(self._held):
            raise ToyAbort(f"sequence {seq} of {len(self._held)}")
        return self._held[seq]

    def _check_open(self) -> None:
        if self._closed:
            raise ToyAbort("used after it was freed")
