"""A context with the model's own next-token layers beside it (MTP), which guess what comes next.

    the model:              tokens 0 … n-1                              →  hidden states, logits
    its next-token layers:  each token p with the hidden state of p-1   →  logits for p+1

Both have a K/V cache. Every call here acts on both, so that a state that is captured, kept, put back, copied
or cut has both parts. What the layers hold changes guesses, and no reply.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from perdure import EngineError, FullAttention, InvalidInputError, MemorySpec
from perdure.ext.speculation.hidden_states import LastStep, Recent, StatesCore
from perdure.spi.engine import (
    Adapter,
    Batch,
    BatchPart,
    Capture,
    Floats,
    Outcome,
    TokenRows,
)
from perdure.spi.llama import CachedState, CoreKeywords, CoreSetup, LlamaWeights, library

_UNREAD = 128
"""Tokens that the layers leave for later, at most."""
_SIZE = 8
"""Bytes that say how long the model's part of a whole state is."""


_DENSE = frozenset({"qwen35"})
"""Architectures whose next-token layer has one feed-forward network."""
_EXPERTS = frozenset(
    {"deepseek2", "deepseek32", "glm4moe", "glm-dsa", "qwen3next", "qwen35moe", "hy-v3", "cohere2moe"}
)
"""Those where it has experts."""
_WINDOWED = {
    "mimo2": ("attn_qkv", "ffn_gate", "ffn_up", "ffn_down"),
    "step35": ("attn_q", "attn_k", "attn_v"),
}
"""Those of models with a window, which may have several such layers: the first one guesses. And what theirs
has besides."""
_NEEDED = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")


def check_next_token(weights: LlamaWeights, memory: MemorySpec, name: str, tensors: Container[str]) -> None:
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
    known = _DENSE | _EXPERTS
    if architecture not in _WINDOWED and (architecture not in known or count != 1):
        raise InvalidInputError(
            f"{name} has {count} next-token layers of {architecture}: one is known here, of "
            f"{', '.join(sorted(known))}, or several of {', '.join(_WINDOWED)}; guess with a draft model "
            "instead"
        )
    block = f"blk.{int(lib.llama_model_n_layer(weights.handle))}"
    needed = (*_NEEDED, *_WINDOWED.get(architecture, ()))
    if architecture in _EXPERTS or (architecture == "step35" and f"{block}.ffn_up.weight" not in tensors):
        needed = (*needed, "ffn_gate_inp")
    missing = [each for each in needed if f"{block}.{each}.weight" not in tensors]
    if missing:
        raise InvalidInputError(
            f"{name} lacks {', '.join(missing)} of its next-token layer; take a file that was converted with "
            "it, or guess with a draft model"
        )
    if not memory.has_rows or (memory.window is not None and architecture not in _WINDOWED):
        raise InvalidInputError(
            f"{name} has no row for each token, or a sliding window that is not that of "
            f"{' or '.join(_WINDOWED)}: its next-token layers cannot be used here; guess with a draft model "
            "instead"
        )


class _Unread:
    """Tokens of a sequence that the layers have still to read, from a position on, and what goes in beside
    them."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.tokens: list[int] = []
        self._inputs: list[Floats] = []

    def add(self, position: int, tokens: NDArray[np.int32], inputs: Floats) -> None:
        self.cut(position)
        self._inputs.append(inputs)
        self.tokens += tokens.tolist()

    def inputs(self) -> Floats:
        return np.concatenate(self._inputs)

    def cut(self, length: int) -> None:
        """Drop what is at positions from `length` on."""
        keep = max(0, length - self.start)
        if keep < max(len(self.tokens), sum(map(len, self._inputs))):
            self._inputs = [self.inputs()[:keep]]
            del self.tokens[keep:]


class NextTokenCore:
    """A model's context, and its next-token layers that follow it.

    Always holds: what the layers have of a sequence, with the tokens that they have still to read, is what
    the model has. They read a few tokens together, or when their guess is needed: a step of one token
    takes them as long as one of many. The first token behind a state that was put back has no hidden state
    before it: zeros stand for that one.
    """

    def __init__(
        self, weights: LlamaWeights, params: Any, memory: MemorySpec, **options: Unpack[CoreKeywords]
    ) -> None:
        self._slides = memory.has_window
        """Whether the layers have a window too, which belongs to the end of a state, as the model's does."""
        self.model = StatesCore(weights, params, memory, **options)
        try:
            self.layers = self.model.open_draft(weights, params, memory if self._slides else FullAttention())
        except BaseException:
            self.model.close()
            raise
        self.n_vocab = self.model.n_vocab
        self.width = self.model.width
        self.n_ctx_seq = self.model.n_ctx_seq
        self._batch = Batch(params.n_batch)
        self._last = LastStep(params.n_batch)
        self._most = min(_UNREAD, params.n_batch - 1)
        self._unread: dict[int, _Unread] = {}
        self._recent: dict[int, Recent] = {}

    # Computing.

    def decode(self, batch: Batch) -> Outcome:
        self._take_states()
        for seq, unread in list(self._unread.items()):
            if len(unread.tokens) > self._most:
                self._catch_up(seq)
        outcome = self.model.decode(batch)
        if outcome is Outcome.DONE:
            self._last.note(batch)
        return outcome

    def _take_states(self) -> None:
        """Take the hidden states of the last step, which the next one overwrites."""
        for seq, position, tokens, states in self._last.parts(self.model):
            if seq not in self._recent:
                self._recent[seq] = Recent(self.width)
            before = self._recent[seq].state_before(position)
            inputs = np.empty((len(tokens), self.width), np.float32)
            inputs[0] = 0 if before is None else before
            inputs[1:] = states[:-1]
            self._recent[seq].add(position, tokens, states)
            self._unread.setdefault(seq, _Unread(position)).add(position, tokens, inputs)
        # Last: a Ctrl-C may have come before, and then all of it is taken again.
        self._last.forget()

    def _read(self, seq: int) -> Outcome:
        """Have the layers read what they have not of `seq`."""
        unread = self._unread.get(seq)
        if unread is None:
            return Outcome.DONE
        # What a Ctrl-C has left there is read again.
        self.layers.remove(seq, unread.start)
        tokens, inputs, size = np.array(unread.tokens, np.int32), unread.inputs(), self._batch.capacity
        for at in range(0, len(tokens), size):
            outcome = self._step(seq, unread.start + at, tokens[at : at + size], inputs[at : at + size], None)
            if outcome is not Outcome.DONE:
                self.layers.remove(seq, unread.start)
                return outcome
        del self._unread[seq]
        return Outcome.DONE

    def _step(
        self, seq: int, position: int, tokens: NDArray[np.int32], inputs: Floats, row: int | None
    ) -> Outcome:
        """A step of the layers, with a row for the token at that place."""
        rows = np.zeros(len(tokens), np.int8)
        if row is not None:
            rows[row] = 1
        self.layers.inputs[: len(tokens)] = inputs
        self._batch.fill([BatchPart(seq, position, tokens, rows)])
        return self.layers.decode(self._batch)

    def _catch_up(self, seq: int) -> None:
        """Have the layers read what they have not: their part of the state is asked for."""
        self._take_states()
        if (outcome := self._read(seq)) is not Outcome.DONE:
            raise EngineError(f"the next-token layers could not read sequence {seq} ({outcome.value})")

    def guess(self, seq: int, token: int, draw: Callable[[Floats, int], int], count: int) -> list[int]:
        """At most `count` tokens that the layers expect behind `token`, the next one of `seq`. `draw` takes a
        row and the position of the token that is to be drawn from it."""
        self._take_states()
        end = self.newest(seq) + 1
        recent, unread = self._recent.get(seq), self._unread.get(seq)
        state = None if recent is None else recent.state_before(end)
        if recent is None or state is None:
            return []
        # All the steps are of one shape, which the library plans and a GPU prepares once: the last tokens are
        # read again with each. A step of another shape than the one before takes half as long again. Most
        # rounds add as many tokens as were guessed, and one.
        before, beside = recent.last(min(count + 1, self._batch.capacity - 1), end)
        if unread is not None and unread.start < end - len(before):
            self._catch_up(seq)
        row = len(before)
        size = row + 1
        # Each step reads `size` of these, from one further on than the step before.
        tokens = np.empty(row + count, np.int32)
        inputs = np.empty((row + count, self.width), np.float32)
        tokens[:row], tokens[row] = before, token
        inputs[:row], inputs[row] = beside, state
        # Read again, so unread from here on, should it fail.
        again = self._unread[seq] = _Unread(end - row)
        again.add(again.start, before, inputs[:row])
        guesses: list[int] = []
        outcome = Outcome.DONE
        try:
            for at in range(count):
                outcome = Outcome.FAILED
                self.layers.remove(seq, again.start + at)
                step = slice(at, at + size)
                outcome = self._step(seq, again.start + at, tokens[step], inputs[step], row)
                if outcome is not Outcome.DONE:
                    break
                guesses.append(draw(self.layers.row(row), end + at + 1))
                if at + 1 < count:
                    tokens[at + size], inputs[at + size] = guesses[-1], self.layers.hidden_behind(row)
            return guesses
        finally:
            if outcome is Outcome.DONE:
                del self._unread[seq]
                self.layers.remove(seq, end)
            else:
                self.layers.remove(seq, again.start)

    def adapt(self, adapters: Mapping[Adapter, float]) -> bool:
        self._take_states()
        for seq in list(self._unread):
            self._catch_up(seq)
        return self.model.adapt(adapters) and self.layers.adapt(adapters)

    # Both caches.

    def remove(self, seq: int, start: int) -> None:
        self._take_states()
        self.model.remove(seq, start)
        # Where the model could not do that, or dropped more, they go as far.
        self._cut_layers(seq, self.model.newest(seq) + 1)

    def _cut_layers(self, seq: int, length: int) -> None:
        unread = self._unread.get(seq)
        if unread is not None:
            unread.cut(length)
            if not unread.tokens:
                del self._unread[seq]
        if unread is None or length < unread.start:
            self.layers.remove(seq, length)

    def _replaced(self, seq: int) -> None:
        """Another state is in the place of what `seq` was."""
        self._unread.pop(seq, None)
        self._recent.pop(seq, None)

    def copy(self, src: int, dst: int) -> None:
        self._catch_up(src)
        self._replaced(dst)
        self.model.copy(src, dst)
        self.layers.copy(src, dst)
        if src in self._recent:
            self._recent[dst] = self._recent[src].copy()

    def clear(self) -> None:
        self._last.forget()
        self.model.clear()
        self.layers.clear()
        self._unread.clear()
        self._recent.clear()

    def read(self, seq: int, *, partial: bool) -> NDArray[np.uint8]:
        if partial and not self._slides:
            return self.model.read(seq, partial=True)
        self._catch_up(seq)
        return _joined(self.model.read(seq, partial=partial), self.layers.read(seq, partial=partial))

    def write(self, seq: int, state: NDArray[np.uint8], *, partial: bool) -> bool:
        self._take_states()
        if partial:
            ours, theirs = _parted(state) if self._slides else (state, None)
            good = self.model.write(seq, ours, partial=True)
            self._cut_layers(seq, self.model.newest(seq) + 1)
            return good and (theirs is None or self.layers.write(seq, theirs, partial=True))
        self._replaced(seq)
        ours, theirs = _parted(state)
        return self.model.write(seq, ours, partial=False) and self.layers.write(seq, theirs, partial=False)

    def capture(self, seq: int) -> Capture:
        self._catch_up(seq)
        model, layers = self.model.capture(seq), self.layers.capture(seq)
        if model.rows is None or layers.rows is None:
            return Capture(None, self.read(seq, partial=False))
        tail = model.tail_state
        if tail is not None and layers.tail_state is not None:
            tail = _joined(tail, layers.tail_state)
        return Capture(_JoinedRows(model.rows, layers.rows), tail)

    def assemble(self, seq: int, pieces: Sequence[NDArray[np.uint8]], rest: NDArray[np.uint8] | None) -> bool:
        if not pieces:
            return rest is not None and self.write(seq, rest, partial=False)
        self._take_states()
        self._replaced(seq)
        width = self.model.row_bytes(seq)
        ours, theirs = ([piece[:, part] for piece in pieces] for part in (slice(width), slice(width, None)))
        window = None
        if self._slides and rest is not None:
            rest, window = _parted(rest)
        return self.model.assemble(seq, ours, rest) and self.layers.assemble(seq, theirs, window)

    def row_bytes(self, seq: int) -> int | None:
        self._catch_up(seq)
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

    def rearm(self) -> None:
        self.model.rearm()

    def close(self) -> None:
        self.layers.close()
        self.model.close()

    # The model alone.

    @property
    def reads_on(self) -> bool:
        return self.model.reads_on

    def cached_state(self) -> CachedState | None:
        return self.model.cached_state()

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

    @property
    def two_dimensions(self) -> bool:
        return self.model.two_dimensions

    def can_shift(self) -> bool:
        return self.model.can_shift()


def _joined(model: NDArray[np.uint8], layers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Both parts of a state as one."""
    return np.concatenate([np.frombuffer(len(model).to_bytes(_SIZE, "little"), np.uint8), model, layers])


def _parted(state: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    end = _SIZE + int.from_bytes(state[:_SIZE].tobytes(), "little")
    return state[_SIZE:end], state[end:]


class _JoinedRows:
    """The rows of both caches, side by side."""

    def __init__(self, model: TokenRows, layers: TokenRows) -> None:
        self._parts = (model, layers)
        self.row_bytes = model.row_bytes + layers.row_bytes

    def __len__(self) -> int:
        return len(self._parts[0])

    def cut(self, start: int, stop: int) -> NDArray[np.uint8]:
        return np.hstack([rows.cut(start, stop) for rows in self._parts])


class _NextTokenMaker:
    """Opens contexts with next-token layers (`Model.context(mtp=True)`)."""

    layout = ", next-token layers"

    def load(self, params: Any) -> None:
        params.load_mtp = True

    def open(self, setup: CoreSetup, value: Any) -> NextTokenCore:
        if not setup.loaded_with.get("mtp"):
            raise InvalidInputError("this model was loaded without its next-token layers: Model(…, mtp=True)")
        check_next_token(setup.weights, setup.memory, setup.path.name, setup.tensors())
        return NextTokenCore(setup.weights, setup.params, setup.memory, **setup.keywords)


MAKER = _NextTokenMaker()
