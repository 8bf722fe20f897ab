"""The tokens of one native step, in arrays that NumPy owns.

No batch is ever allocated or freed by the engine, so none can be freed twice, leaked, or borrowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Tokens for one sequence, at the positions from `start` on; `outputs` marks wanted rows."""

    seq: int
    start: int
    tokens: NDArray[np.int32]
    outputs: NDArray[np.int8]


class Batch:
    """Arrays for up to `capacity` tokens, made once; the first `size` entries are filled."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self.tokens: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.positions: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.seqs: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.outputs: NDArray[np.int8] = np.zeros(capacity, np.int8)
        self._ramp: NDArray[np.int32] = np.arange(capacity, dtype=np.int32)
        # The same memory: one number is written through these in half the time (`python -m bench.decode`).
        self._by_number = (self.tokens.data, self.positions.data, self.seqs.data, self.outputs.data)

    def fill_tokens(self, seqs: Sequence[int], positions: Sequence[int], tokens: Sequence[int]) -> None:
        """Replace the contents by one token for each of some sequences, whose rows are all wanted."""
        at_tokens, at_positions, at_seqs, at_outputs = self._by_number
        for at, (token, position, seq) in enumerate(zip(tokens, positions, seqs, strict=True)):
            at_tokens[at], at_positions[at], at_seqs[at], at_outputs[at] = token, position, seq, 1
        self.size = len(tokens)

    def fill(self, parts: Sequence[BatchPart]) -> None:
        """Replace the contents by `parts`, one bulk write an array and part."""
        total = sum(len(part.tokens) for part in parts)
        if not 0 < total <= self.capacity:
            raise InvalidInputError(f"a step holds 1 to {self.capacity} tokens, got {total}")
        at = 0
        for part in parts:
            end = at + len(part.tokens)
            if end - at == 1:
                # Four numbers: cheaper one by one than as four arrays.
                self.tokens[at], self.positions[at] = part.tokens[0], part.start
                self.seqs[at], self.outputs[at] = part.seq, part.outputs[0]
                at = end
                continue
            self.tokens[at:end] = part.tokens
            np.add(self._ramp[: end - at], part.start, out=self.positions[at:end])
            self.seqs[at:end] = part.seq
            self.outputs[at:end] = part.outputs
            at = end
        self.size = total
