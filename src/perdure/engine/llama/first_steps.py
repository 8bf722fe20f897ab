"""The first steps of a model with layers on a GPU, done when it is opened and before anybody waits for one.

StepTime     how long a token takes, and how long it would with all layers on the GPU
translate()  steps of every size, so that the driver translates the kernels that the model uses
"""

from __future__ import annotations

import ctypes
import logging
import time
from dataclasses import dataclass
from typing import Any

from perdure.engine.llama.native import library
from perdure.engine.llama.native.declarations import EvalCallback, LlamaBatch
from perdure.engine.llama.weights import LlamaWeights
from perdure.events.background import BackgroundTimer

log = logging.getLogger("perdure.engine")

_SAMPLES = 3
_LONGEST = 2.0
"""Seconds after which a step is not measured again."""
_PATIENCE = 10.0
"""Seconds after which a translation is logged: kernels that are in the driver's cache take none."""
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 512)
"""Steps have other kernels by their size."""
_CELLS = 1024


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds that a token takes with the layers where they are."""

    seconds: float
    on_gpu: float | None = None
    """The same with all layers on the GPU, by what those that are there take; None where none is."""

    def __str__(self) -> str:
        text = f"a token takes {self.seconds * 1e3:.0f} ms"
        if self.on_gpu and self.seconds > self.on_gpu:
            text += f", about {self.seconds / self.on_gpu:.1f} times as long as with all of them there"
        return text

    @classmethod
    def measure(cls, weights: LlamaWeights, gpu_layers: int, params: Any) -> StepTime | None:
        """Time a step of one token; None where the model cannot make one."""
        layers = int(library.load().llama_model_n_layer(weights.handle))
        # What comes after the last layer is the first that goes to a GPU.
        on_cpu = max(0, layers + 1 - gpu_layers)
        marks = _Marks(f"l_out-{on_cpu - 1}", f"l_out-{layers - 1}")
        callback = EvalCallback(marks)
        params.cb_eval = callback
        with _Scratchpad(weights, params) as context:
            best: tuple[float, dict[str, float]] | None = None
            # The first one reserves memory and is not counted.
            for sample in range(1 + _SAMPLES):
                marks.at.clear()
                started = time.perf_counter()
                if not context.step(1):
                    return None
                taken = time.perf_counter() - started
                if (sample or taken > _LONGEST) and (best is None or taken < best[0]):
                    best = taken, {name: at - started for name, at in marks.at.items()}
                if taken > _LONGEST:
                    break
        assert best is not None
        return cls(
            best[0], _all_on_gpu(best[0], best[1].get(marks.cpu), best[1].get(marks.last), on_cpu, layers)
        )


def translate(weights: LlamaWeights, params: Any, name: str) -> None:
    """Have the driver translate what steps of model `name` need. A line says so where that takes long."""
    notice = BackgroundTimer(
        _PATIENCE,
        log.warning,
        "NVIDIA's driver translates the code that %s needs for this card, once: this may take minutes",
        name,
        name="perdure-notice",
    )
    notice.start()
    try:
        with _Scratchpad(weights, params) as context:
            for size in _SIZES:
                context.step(size)
    finally:
        notice.cancel()


def _all_on_gpu(step: float, cpu: float | None, last: float | None, on_cpu: int, layers: int) -> float | None:
    """What a step would take with all layers on the GPU: `cpu` and `last` are when the last layer on the CPU
    and the last of all were done."""
    if cpu is None or last is None or on_cpu >= layers:
        return None
    return layers * (last - cpu) / (layers - on_cpu) + (step - last)


class _Marks:
    """Notes when tensors of two names are computed. The library asks for each node whether to stop at it."""

    def __init__(self, cpu: str, last: str) -> None:
        self.cpu = cpu
        self.last = last
        self.at: dict[str, float] = {}
        self._names = {cpu.encode(): cpu, last.encode(): last}
        self._name_of = library.load().quick("ggml_get_name")

    def __call__(self, tensor: int, asking: bool, _: object) -> bool:
        name = self._names.get(self._name_of(tensor))
        if name is not None and not asking:
            self.at[name] = time.perf_counter()
        return not asking or name is not None


class _Scratchpad:
    """A small context for steps whose results nobody reads."""

    def __init__(self, weights: LlamaWeights, params: Any) -> None:
        self._lib = library.load()
        self._weights = weights
        params.n_ctx, params.n_batch, params.n_ubatch = _CELLS, max(_SIZES), max(_SIZES)
        params.n_seq_max = params.n_outputs_max = 1
        self._params = params
        self._context: Any = None

    def __enter__(self) -> _Scratchpad:
        self._context = self._lib.llama_init_from_model(self._weights.handle, self._params)
        return self

    def __exit__(self, *_: object) -> None:
        if self._context:
            self._lib.llama_free(self._context)

    def step(self, size: int) -> bool:
        """Decode so many tokens from the first position on; whether that worked."""
        if not self._context:
            return False
        if memory := self._lib.llama_get_memory(self._context):
            self._lib.llama_memory_clear(memory, False)
        tokens = (ctypes.c_int32 * size)()
        done = bool(self._lib.llama_decode(self._context, LlamaBatch.of(tokens)) == 0)
        self._lib.llama_synchronize(self._context)
        return done
