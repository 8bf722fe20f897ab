"""Looking inside: what `Context.kv` and `Context.trace` give. An extension, `inspection`, computes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from perdure.checks import check_whole
from perdure.engine.contract import Floats, Step
from perdure.engine.logits import LogitsView
from perdure.errors import InvalidInputError
from perdure.extension import part


def inspector(call: str) -> Any:
    """What answers a call that looks inside; an error names the extension where that is not installed."""
    return part(call, "inspection")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyValues:
    """What the cache holds of some tokens: `k` and `v` by (layer, token, head, number).

    Layers are those that were asked for, in their order; the first token is at position `start`.
    """

    k: Floats
    v: Floats
    layers: tuple[int, ...]
    start: int
    rotated: bool
    """Whether the keys are as attention sees them, rotated by their positions."""

    @property
    def tokens(self) -> int:
        return int(self.k.shape[1])


@runtime_checkable
class TracingCore(Protocol):
    """A core whose steps can be traced."""

    def step_trace(self, entry: int) -> Trace | Traced:
        """Of an entry of the last batch whose row it gave; where that is not known of this batch, what is
        traced."""
        ...


class Traced(NamedTuple):
    """What is traced of every step."""

    what: tuple[str, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """What some layers computed for the tokens of a sequence, read in one pass from its first token on.

    Parts that were not asked for, or that the model has not, are None. It was computed again, beside the
    context that was asked, and changed nothing there.
    """

    tokens: tuple[int, ...]
    layers: tuple[int, ...]
    start: int = 0
    """The first token whose numbers are here; those before it were read too."""
    logits: Floats
    """Of the last token."""
    hidden: Floats | None = None
    """What each layer hands to the next, by (layer, token, number)."""
    ffn: Floats | None = None
    """What its feed-forward part adds, by (layer, token, number)."""
    attention: Floats | None = None
    """Weights by (layer, head, token that looks, token that is looked at): the former from `start` on, the
    latter from the first on. They were computed without flash attention, which never has them; the context's
    own numbers may differ in the last bits."""
    router: NDArray[np.int32] | None = None
    """The experts that each token went to, by (layer, token, choice); -1 in layers without experts."""
    experts: int = 0
    """How many experts a layer has."""
    flash: bool = True
    """Whether it was computed with flash attention."""

    def last(self) -> Trace:
        """The same of the last token alone, without attention."""
        arrays = {name: getattr(self, name) for name in ("hidden", "ffn", "router")}
        cut: dict[str, Any] = {name: None if each is None else each[:, -1:] for name, each in arrays.items()}
        return dataclasses.replace(self, tokens=self.tokens[-1:], start=0, attention=None, **cut)

    def expert_counts(self) -> NDArray[np.int64]:
        """How many tokens went to each expert, by (layer, expert)."""
        if self.router is None:
            raise InvalidInputError("this trace has no router: ask for it, of a model with experts")
        return np.stack(
            [np.bincount(each[each >= 0].reshape(-1), minlength=self.experts) for each in self.router]
        )

    def layer_coherence(self) -> Floats:
        """How alike the changes of two layers are: the cosine of what they add to the hidden states, in the
        middle over all tokens, by (layer, layer). Layers that add in one direction have 1."""
        hidden = self._hidden()
        if len(hidden) < 2:
            raise InvalidInputError("coherence compares layers: trace at least two")
        added = np.diff(hidden, axis=0)
        unit = added / np.maximum(np.linalg.norm(added, axis=-1, keepdims=True), 1e-12)
        coherence: Floats = np.einsum("atd,btd->ab", unit, unit).astype(np.float32) / hidden.shape[1]
        return coherence

    def selected_heads(self, count: int = 8) -> list[SelectedHead]:
        """The heads whose attention differs most from the average head of their layer, the furthest first."""
        if self.attention is None:
            raise InvalidInputError("this trace has no attention: ask for it in what=")
        check_whole("count", count, 1)
        mean = self.attention.mean(axis=1, keepdims=True)
        # Half the sum of differences: the share of attention that lies elsewhere.
        distance = np.abs(self.attention - mean).sum(axis=-1).mean(axis=-1) / 2
        order = np.argsort(-distance, axis=None)[:count]
        layers, heads = np.unravel_index(order, distance.shape)
        return [
            SelectedHead(self.layers[int(at)], int(head), float(distance[at, head]))
            for at, head in zip(layers, heads, strict=True)
        ]

    def _hidden(self) -> Floats:
        if self.hidden is None:
            raise InvalidInputError("this trace has no hidden states: ask for them in what=")
        return self.hidden


@dataclass(frozen=True, slots=True)
class SelectedHead:
    """A head that attends otherwise than the others of its layer."""

    layer: int
    head: int
    distance: float
    """From 0 to 1: which share of its attention lies elsewhere."""

    @property
    def name(self) -> str:
        return f"L{self.layer}H{self.head}"


class StepLogits(LogitsView):
    """The logits of one step, for a processor: it may also ask what the layers computed for it."""

    __slots__ = ("_step_tracing", "_tracing")

    def __init__(
        self, row: Floats, step: Step, tracing: Callable[..., Trace], step_tracing: Callable[[], Trace]
    ) -> None:
        super().__init__(row, step)
        self._tracing = tracing
        self._step_tracing = step_tracing

    def step_trace(self) -> Trace:
        """What layers computed for the last token, in the step that these logits are of, as
        `Context.step_trace` returns it. The runtime has to be opened with `trace`, which says what is
        kept."""
        return self._step_tracing()

    def trace(self, *, layers: Sequence[int] | None = None, what: str | Sequence[str] = ("hidden",)) -> Trace:
        """What layers computed for the tokens so far, as `Context.trace` returns it. They are all read once
        more for it: this takes as long as reading the prompt and the reply."""
        return self._tracing(layers=layers, what=what)
