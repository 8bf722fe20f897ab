"""A context whose steps are looked at while they are computed, by llama.cpp's evaluation callback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from perdure.engine.contract import Batch, Outcome
from perdure.engine.llama.core import CoreKeywords, LlamaCore
from perdure.engine.llama.inspection.tracer import Tracer
from perdure.engine.llama.weights import Weights
from perdure.engine.trace import Trace, Traced, checked_layers, checked_parts
from perdure.errors import EngineError, InvalidInputError
from perdure.memory import MemorySpec

_LIVE = ("hidden", "ffn", "router")
"""What a step computes anyway; flash attention never has its weights."""


class TracedCore(LlamaCore):
    """Keeps what some layers computed for the rows of the last step. Every node of a step asks Python whether
    it is wanted: only a context that was opened for it pays for that."""

    def __init__(
        self,
        weights: Weights,
        params: Any,
        memory: MemorySpec,
        *,
        what: str | Sequence[str],
        layers: Sequence[int] | None,
        n_layer: int,
        **known: Unpack[CoreKeywords],
    ) -> None:
        self._parts = checked_parts(what)
        if missing := [part for part in self._parts if part not in _LIVE]:
            raise InvalidInputError(
                f"the steps of a context tell {', '.join(_LIVE)}, not {', '.join(missing)}: "
                "ctx.trace() reads the tokens once more for it"
            )
        self._layers = checked_layers(layers, n_layer)
        self._tracer = Tracer(self._parts, self._layers)
        self._step: tuple[list[int], list[int]] = [], []
        """The tokens of the last step, and the entries whose rows it gave."""
        params.cb_eval = self._tracer.callback
        super().__init__(weights, params, memory, **known)

    def decode(self, batch: Batch) -> Outcome:
        self._tracer.found.clear()
        self._tracer.problem = ""
        outcome = super().decode(batch)
        outputs = np.flatnonzero(batch.outputs[: batch.size]).tolist()
        self._step = batch.tokens[: batch.size].tolist(), outputs
        return outcome

    def step_trace(self, entry: int) -> Trace | Traced:
        """What was computed for an entry of the last batch whose row it gave; else the library computed the
        batch in parts, and does not say which entries are in which."""
        self.synchronize()
        if self._tracer.problem:
            raise EngineError(f"the step could not be traced: {self._tracer.problem}")
        tokens, outputs = self._step
        by_part: dict[str, Any] = {}
        for part in self._parts:
            by_layer = [self._tracer.found.get((part, layer), []) for layer in self._layers]
            if not any(by_layer):
                # A model without it.
                continue
            width = next(each[0].shape[-1] for each in by_layer if each)
            rows = []
            for steps in by_layer:
                if len(steps) > 1:
                    return Traced(self._parts, self._layers)
                if not steps:
                    kind = np.full(width, -1, np.int32) if part == "router" else np.zeros(width, np.float32)
                    rows.append(kind)
                    continue
                table = steps[0].reshape(-1, width)
                # The last layer computes rows alone.
                if len(table) == len(tokens):
                    rows.append(table[entry])
                elif len(table) == len(outputs):
                    rows.append(table[outputs.index(entry)])
                else:
                    return Traced(self._parts, self._layers)
            by_part[part] = np.stack(rows)[:, None]
        return Trace(
            tokens=(tokens[entry],),
            layers=self._layers,
            logits=self.row(entry).copy(),
            experts=self._weights.experts,
            **by_part,
        )
