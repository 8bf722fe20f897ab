"""A context with the model's own next-token layers beside it (MTP), which guess what comes next.

    the model:              tokens 0 … n-1                              →  hidden states, logits
    its next-token layers:  each token p with the hidden state of p-1   →  logits for p+1

Both have a K/V cache. Every call here acts on both, so that a state that is captured, kept, put back, copied
or cut has both parts. What the layers hold changes guesses, and no reply.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Adapter, Batch, BatchPart, Capture, Floats, Outcome, TokenRows
from perdure.engine.key_values import Rope
from perdure.engine.llama.core import LlamaCore
from perdure.engine.llama.native import library
from perdure.engine.llama.weights import Weights
from perdure.errors import InvalidInputError
from perdure.memory import FullAttention, MemorySpec

_LAYERS = 1
"""The library's number for a context of the next-token layers alone."""
_KEPT = 64
"""Hidden states of a sequence that are kept: the last tokens may be cut back by fewer."""
_SIZE = 8
"""Bytes that say how long the model's part of a whole state is."""


_DENSE = frozenset({"qwen35"})
"""Architectures whose next-token layer has one feed-forward network."""
_EXPERTS = frozenset(
    {"deepseek2", "deepseek32", "glm4moe", "glm-dsa", "qwen3next", "qwen35moe", "hy-v3", "cohere2moe"}
)
"""Those where it has experts."""
_NEEDED = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")


def check_next_token(weights: Weights, memory: MemorySpec, name: str, tensors: Container[str]) -> None:
    """Refuse a model whose next-token layers cannot be used here: over some the library ends the process."""
    lib = library.load()
    if not hasattr(lib, "llama_get_embeddings_nextn_ith"):
        raise InvalidInputError(
            f"{library.build()} does not give out the hidden states that next-token layers need: leave mtp "
            "out, or guess with a draft model"
        )
    count = int(lib.llama_model_n_layer_nextn(weights.handle))
    if not count:
        raise InvalidInputError(f"{name} has no next-token layers (MTP); guess with a draft model instead")
    architecture = weights.metadata.get("general.architecture", "")
    if architecture not in _DENSE | _EXPERTS or count != 1:
        raise InvalidInputError(
            f"{name} has {count} next-token layers of {architecture}: one is known here, of "
            f"{', '.join(sorted(_DENSE | _EXPERTS))}; guess with a draft model instead"
        )
    block = f"blk.{int(lib.llama_model_n_layer(weights.handle))}"
    needed = (*_NEEDED, *(("ffn_gate_inp",) if architecture in _EXPERTS else ()))
    missing = [each for each in needed if f"{block}.{each}.weight" not in tensors]
    if missing:
        raise InvalidInputError(
            f"{name} lacks {', '.join(missing)} of its next-token layer; take a file that was converted with "
            "it, or guess with a draft model"
        )
    if not memory.has_rows or memory.window is not None:
        raise InvalidInputError(
            f"{name} has a sliding window, or no row for each token: its next-token layers cannot be used "
            "here; guess with a draft model instead"
        )


def _hidden_at(address: int | None, width: int) -> Floats:
    """A hidden state over engine memory."""
    assert address
    return np.frombuffer(memoryview((ctypes.c_float * width).from_address(address)), np.float32)


class _LayerCore(LlamaCore):
    """The next-token layers alone: each token goes in with a hidden state."""

    def __init__(self, weights: Weights, params: Any) -> None:
        super().__init__(weights, params, FullAttention(), causal=True)
        self._inputs = self.inputs = np.zeros((params.n_batch, self.width), np.float32)
        """The hidden states for the next step, one a token."""
        self._hidden_address = self._lib.quick("llama_get_embeddings_nextn_ith")
        self._lib.llama_set_embeddings_nextn(self._context, True, True)

    def hidden_behind(self) -> Floats:
        """The hidden state behind the only token of the last step."""
        return _hidden_at(self._hidden_address(self._context, 0), self.width)


class _ModelCore(LlamaCore):
    """The model, which gives out a hidden state for each token."""

    def __init__(self, weights: Weights, params: Any, memory: MemorySpec, **options: Any) -> None:
        super().__init__(weights, params, memory, **options)
        self._hidden_address = self._lib.quick("llama_get_embeddings_nextn_ith")
        self._lib.llama_set_embeddings_nextn(self._context, True, False)

    def hidden_states(self, count: int) -> Floats:
        """Those of all tokens of the last step."""
        self.synchronize()
        states = np.empty((count, self.width), np.float32)
        for index in range(count):
            states[index] = _hidden_at(self._hidden_address(self._context, index), self.width)
        return states

    def open_layers(self, weights: Weights, params: Any) -> _LayerCore:
        """The next-token layers for this context."""
        params.ctx_type, params.ctx_other = _LAYERS, self._context
        return _LayerCore(weights, params)


class NextTokenCore:
    """A model's context, and its next-token layers that follow it.

    Always holds: after each call both have the same positions of every sequence. The first token behind a
    state that was put back has no hidden state before it: zeros stand for that one.
    """

    def __init__(self, weights: Weights, params: Any, memory: MemorySpec, **options: Any) -> None:
        self.model = _ModelCore(weights, params, memory, **options)
        try:
            self.layers = self.model.open_layers(weights, params)
        except BaseException:
            self.model.close()
            raise
        self.n_vocab = self.model.n_vocab
        self.width = self.model.width
        self.n_ctx_seq = self.model.n_ctx_seq
        self._batch = Batch(params.n_batch)
        self._one = Batch(1)
        self._kept: dict[int, tuple[int, Floats]] = {}
        """By sequence, its last hidden states, and the position of the first of these."""

    # Computing.

    def decode(self, batch: Batch) -> Outcome:
        outcome = self.model.decode(batch)
        return self._read_on(batch) if outcome is Outcome.DONE else outcome

    def _read_on(self, batch: Batch) -> Outcome:
        """Have the layers read what the model has just read."""
        size, ours = batch.size, self._batch
        ours.size = size
        ours.tokens[:size] = batch.tokens[:size]
        ours.positions[:size] = batch.positions[:size]
        ours.seqs[:size] = batch.seqs[:size]
        states = self.model.hidden_states(size)
        self.layers.inputs[1:size] = states[:-1]
        starts = [0, *(np.flatnonzero(np.diff(batch.seqs[:size])) + 1).tolist()]
        for start in starts:
            before = self._state_before(int(batch.seqs[start]), int(batch.positions[start]))
            self.layers.inputs[start] = 0.0 if before is None else before
        outcome = self.layers.decode(ours)
        if outcome is Outcome.DONE:
            for start, end in zip(starts, [*starts[1:], size], strict=True):
                self._keep(int(batch.seqs[start]), int(batch.positions[start]), states[start:end])
        return outcome

    def _state_before(self, seq: int, position: int) -> Floats | None:
        """The hidden state of the token before a position; None where it is not there."""
        first, states = self._kept.get(seq, (position, ()))
        place = position - 1 - first
        return states[place] if 0 <= place < len(states) else None

    def _keep(self, seq: int, position: int, states: Floats) -> None:
        first, before = self._kept.get(seq, (position, states[:0]))
        if first <= position <= first + len(before):
            states = np.concatenate([before[: position - first], states])
            position = first
        dropped = max(0, len(states) - _KEPT)
        self._kept[seq] = position + dropped, states[dropped:].copy()

    def guess(self, seq: int, token: int, draw: Callable[[Floats, int], int], count: int) -> list[int]:
        """At most `count` tokens that the layers expect behind `token`, the next one of `seq`. `draw` takes a
        row and the position of the token that is to be drawn from it."""
        start = position = self.newest(seq) + 1
        state = self._state_before(seq, position)
        guesses: list[int] = []
        if state is None:
            return guesses
        try:
            while True:
                self.layers.inputs[0] = state
                self._one.fill([BatchPart(seq, position, np.array([token], np.int32), np.ones(1, np.int8))])
                if self.layers.decode(self._one) is not Outcome.DONE:
                    return guesses
                position += 1
                token = draw(self.layers.row(0), position)
                guesses.append(token)
                if len(guesses) == count:
                    return guesses
                state = self.layers.hidden_behind()
        finally:
            self.layers.remove(seq, start)

    def adapt(self, adapters: Mapping[Adapter, float]) -> bool:
        return self.model.adapt(adapters) and self.layers.adapt(adapters)

    # Both caches.

    def remove(self, seq: int, start: int) -> None:
        self.model.remove(seq, start)
        # Where the model could not do that, or dropped more, they go as far.
        self.layers.remove(seq, self.model.newest(seq) + 1)

    def copy(self, src: int, dst: int) -> None:
        self.model.copy(src, dst)
        self.layers.copy(src, dst)
        self._kept.pop(dst, None)
        if src in self._kept:
            self._kept[dst] = self._kept[src]

    def clear(self) -> None:
        self.model.clear()
        self.layers.clear()
        self._kept.clear()

    def read(self, seq: int, *, partial: bool) -> NDArray[np.uint8]:
        first = self.model.read(seq, partial=partial)
        if partial:
            return first
        size = np.frombuffer(len(first).to_bytes(_SIZE, "little"), np.uint8)
        return np.concatenate([size, first, self.layers.read(seq, partial=False)])

    def write(self, seq: int, state: NDArray[np.uint8], *, partial: bool) -> bool:
        self._kept.pop(seq, None)
        if partial:
            good = self.model.write(seq, state, partial=True)
            self.layers.remove(seq, self.model.newest(seq) + 1)
            return good
        end = _SIZE + int.from_bytes(state[:_SIZE].tobytes(), "little")
        return self.model.write(seq, state[_SIZE:end], partial=False) and self.layers.write(
            seq, state[end:], partial=False
        )

    def capture(self, seq: int) -> Capture:
        model, layers = self.model.capture(seq), self.layers.capture(seq)
        if model.rows is None or layers.rows is None:
            return Capture(None, self.read(seq, partial=False))
        return Capture(_JoinedRows(model.rows, layers.rows), model.tail_state)

    def assemble(self, seq: int, pieces: Sequence[NDArray[np.uint8]], rest: NDArray[np.uint8] | None) -> bool:
        if not pieces:
            return rest is not None and self.write(seq, rest, partial=False)
        self._kept.pop(seq, None)
        width = self.model.row_bytes(seq)
        return self.model.assemble(
            seq, [piece[:, :width] for piece in pieces], rest
        ) and self.layers.assemble(seq, [piece[:, width:] for piece in pieces], None)

    def row_bytes(self, seq: int) -> int | None:
        model, layers = self.model.row_bytes(seq), self.layers.row_bytes(seq)
        return None if model is None or layers is None else model + layers

    def prepare(self) -> None:
        self.model.prepare()
        self.layers.prepare()

    def limit_scratch(self, nbytes: int) -> int:
        return self.model.limit_scratch(nbytes) + self.layers.limit_scratch(nbytes)

    @property
    def scratch_bytes(self) -> int:
        return self.model.scratch_bytes + self.layers.scratch_bytes

    def stop(self) -> None:
        self.model.stop()
        self.layers.stop()

    def rearm(self) -> None:
        self.model.rearm()
        self.layers.rearm()

    def close(self) -> None:
        self.layers.close()
        self.model.close()

    # The model alone.

    @property
    def reads_on(self) -> bool:
        return self.model.reads_on

    @property
    def kv_layers(self) -> int:
        return self.model.kv_layers

    def key_values(self, rows: NDArray[np.uint8], layer: int) -> tuple[Floats, Floats]:
        return self.model.key_values(rows, layer)

    def rope(self) -> Rope | str:
        return self.model.rope()

    def row(self, index: int) -> Floats:
        return self.model.row(index)

    def rows(self, indices: Sequence[int]) -> Floats:
        return self.model.rows(indices)

    def synchronize(self) -> None:
        self.model.synchronize()

    def hidden(self, count: int) -> Floats:
        return self.model.hidden(count)

    def newest(self, seq: int) -> int:
        return self.model.newest(seq)

    def oldest(self, seq: int) -> int:
        return self.model.oldest(seq)

    def can_shift(self) -> bool:
        return self.model.can_shift()


class _JoinedRows:
    """The rows of both caches, side by side."""

    def __init__(self, model: TokenRows, layers: TokenRows) -> None:
        self._parts = (model, layers)
        self.row_bytes = model.row_bytes + layers.row_bytes

    def __len__(self) -> int:
        return len(self._parts[0])

    def cut(self, start: int, stop: int) -> NDArray[np.uint8]:
        return np.hstack([rows.cut(start, stop) for rows in self._parts])
