"""A drafter with its file, which reads the hidden states, keys and values of a model: Gemma 4's assistant.

    the model:      tokens 0 … n-1                                    →  hidden states, keys and values
    its assistant:  token n, and the hidden state of n-1              →  logits for n+1, a hidden state
                    what was drawn from these, and that hidden state  →  logits for n+2, and so on

It has no cache: all its layers read those of the model's last two layers, at the position of token n whatever
it guesses. So nothing of it is stored, and a session that slept without it wakes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from perdure import InvalidInputError, MemorySpec, Model
from perdure.ext.speculation.hidden_states import LastStep, Recent, StatesCore
from perdure.spi.engine import Batch, BatchPart, Floats, Outcome
from perdure.spi.llama import CoreKeywords, CoreSetup, LlamaWeights, library, weights_of
from perdure.spi.models import ASSISTANTS, Facts, Header, models

_ADVICE = "take the assistant of this very model, or guess by n-grams or with a draft model"


def check_assistant(model: Header, draft: Header) -> None:
    """Refuse an assistant of another model: the library takes its sizes for those of the caches it reads, and
    would read beyond them or end the process."""
    names = f"{draft.path.name} for {model.path.name}"
    if not hasattr(library.load(), "llama_get_embeddings_nextn_ith"):
        raise InvalidInputError(
            f"{library.build()} does not give out the hidden states that {draft.path.name} needs: guess by "
            "n-grams or with a draft model"
        )
    kind, architecture = draft.text("general.architecture") or "", model.text("general.architecture") or ""
    if kind not in ASSISTANTS:
        raise InvalidInputError(f"{draft.path.name} is no assistant, it is a model of {kind}")
    if ASSISTANTS[kind] != architecture:
        raise InvalidInputError(
            f"{names}: it guesses for {ASSISTANTS[kind]}, not for {architecture}; {_ADVICE}"
        )
    ours, theirs = _Caches(model, architecture), _Caches(draft, kind)
    if theirs.width_out != ours.width:
        raise InvalidInputError(
            f"{names}: it reads hidden states of {theirs.width_out} values, and the model has {ours.width}; "
            f"{_ADVICE}"
        )
    if ours.windows[-2:] != [True, False]:
        raise InvalidInputError(
            f"{names}: it reads a layer with a window and then one without, and the model's last two layers "
            "are others; take another file of this model, or leave draft out"
        )
    last = dict(zip(ours.windows, ours.heads, strict=False))
    for windowed, heads in zip(theirs.windows, theirs.heads, strict=False):
        if heads != last[windowed]:
            raise InvalidInputError(
                f"{names}: it reads keys of {heads[0]} heads of {heads[1]} values, and the model has "
                f"{last[windowed][0]} of {last[windowed][1]}; {_ADVICE}"
            )
    if theirs.window != ours.window:
        raise InvalidInputError(
            f"{names}: it has a window of {theirs.window} tokens, and the model one of {ours.window}; "
            f"{_ADVICE}"
        )


class _Caches:
    """What a file says of the caches that its layers read."""

    def __init__(self, header: Header, architecture: str) -> None:
        facts = Facts(header, architecture)
        layers = facts.integer("block_count") or 0
        self.width = facts.integer("embedding_length")
        self.width_out = facts.integer("embedding_length_out")
        self.window = facts.integer("attention.sliding_window")
        pattern = header.metadata.get(f"{architecture}.attention.sliding_window_pattern")
        self.windows = [bool(each) for each in pattern] if isinstance(pattern, np.ndarray) else []
        """Which layers have the window."""
        sizes = facts.integer("attention.key_length"), facts.integer("attention.key_length_swa")
        counts = facts.per_layer("attention.head_count_kv", layers) or []
        self.heads = [(count, sizes[windowed]) for count, windowed in zip(counts, self.windows, strict=False)]
        """How many heads of keys each layer has, and of how many values."""


class AssistantCore(StatesCore):
    """A model's context, and an assistant that guesses for it.

    Always holds: what the assistant reads is the model's own cache. The first token behind a state that was
    put back has no hidden state before it, and nothing is guessed there.
    """

    def __init__(
        self,
        weights: LlamaWeights,
        params: Any,
        memory: MemorySpec,
        *,
        assistant: LlamaWeights,
        **options: Unpack[CoreKeywords],
    ) -> None:
        super().__init__(weights, params, memory, **options)
        try:
            # Its caches are views of the model's, so that all that has to do with their size is the same.
            # It empties them: later than here there would be something in them.
            self._assistant = self.open_draft(assistant, params, memory)
        except BaseException:
            super().close()
            raise
        self._step = Batch(1)
        self._last = LastStep(params.n_batch)
        self._recent: dict[int, Recent] = {}

    def decode(self, batch: Batch) -> Outcome:
        self._take_states()
        outcome = super().decode(batch)
        if outcome is Outcome.DONE:
            self._last.note(batch)
        return outcome

    def _take_states(self) -> None:
        """Take the hidden states of the last step, which the next one overwrites."""
        for seq, position, tokens, states in self._last.parts(self):
            if seq not in self._recent:
                self._recent[seq] = Recent(self.width)
            self._recent[seq].add(position, tokens, states)
        # Last: a Ctrl-C may have come before, and then all of it is taken again.
        self._last.forget()

    def guess(self, seq: int, token: int, draw: Callable[[Floats, int], int], count: int) -> list[int]:
        """At most `count` tokens that the assistant expects behind `token`, the next one of `seq`."""
        self._take_states()
        end = self.newest(seq) + 1
        recent = self._recent.get(seq)
        state = None if recent is None else recent.state_before(end)
        guesses: list[int] = []
        while state is not None and len(guesses) < count:
            self._assistant.inputs[0] = state
            self._step.fill([BatchPart(seq, end, np.array([token], np.int32), np.ones(1, np.int8))])
            if self._assistant.decode(self._step) is not Outcome.DONE:
                break
            token = draw(self._assistant.row(0), end + len(guesses) + 1)
            guesses.append(token)
            state = self._assistant.hidden_behind(0)
        return guesses

    def remove(self, seq: int, start: int) -> None:
        self._take_states()
        super().remove(seq, start)

    def copy(self, src: int, dst: int) -> None:
        self._take_states()
        super().copy(src, dst)
        self._recent.pop(dst, None)
        if src in self._recent:
            self._recent[dst] = self._recent[src].copy()

    def clear(self) -> None:
        self._last.forget()
        self._recent.clear()
        super().clear()

    def write(self, seq: int, state: NDArray[np.uint8], *, partial: bool) -> bool:
        self._take_states()
        if not partial:
            self._recent.pop(seq, None)
        return super().write(seq, state, partial=partial)

    def close(self) -> None:
        self._assistant.close()
        super().close()


class _AssistantMaker:
    """Opens contexts with an assistant (`Model.context(assistant=…)`)."""

    layout = ""

    def load(self, params: Any) -> None:
        """The model is loaded as without."""

    def open(self, setup: CoreSetup, value: Any) -> AssistantCore:
        if not isinstance(value, Model):
            raise InvalidInputError(f"assistant is a Model on llama.cpp, got {type(value).__name__}")
        weights = weights_of(value)
        check_assistant(models.read_header(setup.path), models.read_header(value.path))
        return AssistantCore(setup.weights, setup.params, setup.memory, assistant=weights, **setup.keywords)


MAKER = _AssistantMaker()
