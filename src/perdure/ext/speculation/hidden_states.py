"""Hidden states: what a model gives out behind each token, and what guesses from them.

StatesCore  a context of the model, which gives one out for each token of a step
DraftCore   a context of what guesses: next-token layers of the model, or a drafter from another file
LastStep    the model's last step, until its hidden states are taken
Recent      those behind the last tokens of a sequence
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from perdure import MemorySpec
from perdure.spi.engine import Batch, Floats
from perdure.spi.llama import CoreKeywords, LlamaCore, LlamaWeights

_DRAFTS = 1
"""The library's number for a context that guesses from hidden states."""
_RECENT = 64
"""Hidden states of a sequence that are kept: the last tokens may be cut back by fewer."""


def _hidden_at(address: int | None, width: int) -> Floats:
    """A hidden state over engine memory."""
    assert address
    return np.frombuffer(memoryview((ctypes.c_float * width).from_address(address)), np.float32)


class DraftCore(LlamaCore):
    """What guesses from hidden states: each token goes in with one, and another comes out with its row."""

    def __init__(self, weights: LlamaWeights, params: Any, memory: MemorySpec) -> None:
        super().__init__(weights, params, memory, causal=True)
        self._inputs = self.inputs = np.zeros((params.n_batch, self.width), np.float32)
        """The hidden states for the next step, one a token."""
        self._hidden_address = self._lib.quick("llama_get_embeddings_nextn_ith")
        self._lib.llama_set_embeddings_nextn(self._context, True, True)

    def hidden_behind(self, index: int) -> Floats:
        """The hidden state behind a token of the last step whose row was asked for."""
        return _hidden_at(self._hidden_address(self._context, index), self.width)


class StatesCore(LlamaCore):
    """The model, which gives out a hidden state for each token."""

    def __init__(
        self, weights: LlamaWeights, params: Any, memory: MemorySpec, **options: Unpack[CoreKeywords]
    ) -> None:
        super().__init__(weights, params, memory, **options)
        self._hidden_address = self._lib.quick("llama_get_embeddings_nextn_ith")
        self._lib.llama_set_embeddings_nextn(self._context, True, False)

    def hidden_states(self, count: int) -> Floats:
        """Those of all tokens of the last step, over engine memory: there is a row for each, in their order.
        The next step overwrites them."""
        self.synchronize()
        first = self._hidden_address(self._context, 0)
        return _hidden_at(first, count * self.width).reshape(count, self.width)

    def open_draft(self, weights: LlamaWeights, params: Any, memory: MemorySpec) -> DraftCore:
        """What guesses for this context: next-token layers of the model, or another model."""
        params.ctx_type, params.ctx_other = _DRAFTS, self._context
        return DraftCore(weights, params, memory)


class LastStep:
    """The last step of a model, as long as its hidden states have to be taken."""

    def __init__(self, capacity: int) -> None:
        self._batch = Batch(capacity)

    def note(self, batch: Batch) -> None:
        """This step was computed. A device may be at it still: nobody waits for it here."""
        self._batch.size = size = batch.size
        self._batch.tokens[:size] = batch.tokens[:size]
        self._batch.positions[:size] = batch.positions[:size]
        self._batch.seqs[:size] = batch.seqs[:size]

    def parts(self, model: StatesCore) -> Iterator[tuple[int, int, NDArray[np.int32], Floats]]:
        """What each sequence had in it: the sequence, its first position, the tokens, and the hidden states
        behind them, over engine memory."""
        batch, size = self._batch, self._batch.size
        if not size:
            return
        states = model.hidden_states(size)
        if batch.seqs[0] == batch.seqs[size - 1]:
            # The tokens of a sequence lie together, and most steps are of one.
            yield int(batch.seqs[0]), int(batch.positions[0]), batch.tokens[:size], states
            return
        starts = [0, *(np.flatnonzero(np.diff(batch.seqs[:size])) + 1).tolist()]
        for start, end in zip(starts, [*starts[1:], size], strict=True):
            at = slice(start, end)
            yield int(batch.seqs[start]), int(batch.positions[start]), batch.tokens[at], states[at]

    def forget(self) -> None:
        self._batch.size = 0


class Recent:
    """The last tokens of a sequence and the hidden states behind them, by position."""

    def __init__(self, width: int) -> None:
        self._tokens = np.empty(2 * _RECENT, np.int32)
        self._states = np.empty((2 * _RECENT, width), np.float32)
        self._first = 0
        """The position of the first one."""
        self._count = 0

    def state_before(self, position: int) -> Floats | None:
        """The hidden state behind the token before a position; None where it is not there."""
        place = position - 1 - self._first
        return self._states[place] if 0 <= place < self._count else None

    def last(self, count: int, end: int) -> tuple[NDArray[np.int32], Floats]:
        """At most `count` tokens before the position `end`, and what goes in beside each: the hidden state
        behind the token before it."""
        stop = end - self._first
        start = max(1, stop - count)
        return self._tokens[start:stop], self._states[start - 1 : stop - 1]

    def add(self, position: int, tokens: NDArray[np.int32], states: Floats) -> None:
        """Those from a position on; what was there is dropped."""
        count = position - self._first
        skipped = max(0, len(states) - _RECENT)
        if skipped or not 0 <= count <= self._count:
            position, tokens, states, count = position + skipped, tokens[skipped:], states[skipped:], 0
        if count + len(states) > len(self._states):
            # Now and then the last ones move to the front.
            for each in (self._tokens, self._states):
                each[:_RECENT] = each[count - _RECENT : count]
            count = _RECENT
        end = count + len(states)
        self._tokens[count:end], self._states[count:end] = tokens, states
        self._first, self._count = position - count, end

    def copy(self) -> Recent:
        other = Recent(self._states.shape[1])
        other.add(self._first, self._tokens[: self._count], self._states[: self._count])
        return other
