"""A pass over tokens whose nodes are looked at, by llama.cpp's evaluation callback.

The library names what a layer computes: `l_out-3` is what layer 3 hands on, `ffn_out-3` (or `ffn_moe_out-3`)
what its feed-forward part gives, `kq_soft_max-3` its attention weights, `ffn_moe_topk-3` the experts chosen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from perdure import EngineError, InvalidInputError, MemorySpec, Trace
from perdure.spi.base import check_whole
from perdure.spi.engine import Adapter, Batch, BatchPart, Outcome, Traced
from perdure.spi.llama import (
    CoreKeywords,
    EvalCallback,
    GraphTensor,
    LlamaCore,
    LlamaWeights,
    TracePass,
    library,
)

PARTS = ("hidden", "attention", "ffn", "router")
"""What can be traced."""
MOST_BYTES = 2 << 30
"""Of one trace."""
_CHUNK = 256
"""Tokens of a step, so that what is looked at of one stays small."""
_NAMES = {
    "hidden": ("l_out",),
    "ffn": ("ffn_out", "ffn_moe_out"),
    "attention": ("kq_soft_max", "kq_soft_max_ext"),
    "router": ("ffn_moe_topk",),
}
"""The library's names of what can be traced; of several, a model has one."""
_F32, _I32 = 0, 26


class Tracer:
    """Collects what layers compute. No exception may leave a callback: it is raised afterwards."""

    def __init__(self, parts: Sequence[str], layers: Sequence[int]) -> None:
        lib = library.load()
        # The size of the struct and of the object before it, which has 32 bytes.
        if lib.ggml_tensor_overhead() != ctypes.sizeof(GraphTensor) + 32:
            raise EngineError("this llama.cpp cannot be traced: its tensors are laid out otherwise")
        self._lib = lib
        self._wanted: dict[bytes, tuple[str, int]] = {}
        for part in parts:
            for name in _NAMES[part]:
                for layer in layers:
                    self._wanted[f"{name}-{layer}".encode()] = (part, layer)
        self.found: dict[tuple[str, int], list[NDArray[Any]]] = {}
        self.problem = ""
        self.is_on = True
        """Whether what is computed now is wanted."""
        self.callback = EvalCallback(self)

    def __call__(self, address: int, ask: bool, _: object) -> bool:
        try:
            node = GraphTensor.from_address(address)
            key = self._wanted.get(node.name) if self.is_on else None
            if key is None:
                return not ask
            if not ask:
                self.found.setdefault(key, []).append(self._read(address, node))
            return True
        except Exception as error:  # nothing may leave a callback
            self.problem = self.problem or repr(error)
            return not ask

    def _read(self, address: int, node: GraphTensor) -> NDArray[Any]:
        """A node's numbers, the slowest dimension first."""
        if node.type not in (_F32, _I32):
            raise EngineError(f"{node.name.decode()} has type {node.type}")
        shape, strides = tuple(node.shape)[::-1], tuple(node.strides)[::-1]
        # From its first byte to its last: a view may skip some in between.
        size = 4 + sum((count - 1) * step for count, step in zip(shape, strides, strict=True))
        raw = np.empty(size, np.uint8)
        self._lib.ggml_backend_tensor_get(address, raw.ctypes.data, 0, size)
        kind = np.float32 if node.type == _F32 else np.int32
        return np.ndarray(shape, kind, raw, 0, strides).copy()


def checked_parts(what: str | Iterable[str]) -> tuple[str, ...]:
    parts = (what,) if isinstance(what, str) else tuple(what)
    for part in parts:
        if part not in PARTS:
            raise InvalidInputError(f"what is any of {', '.join(PARTS)}, got {part!r}")
    if not parts:
        raise InvalidInputError(f"what is at least one of {', '.join(PARTS)}")
    return parts


def checked_layers(layers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    if layers is None:
        return tuple(range(count))
    numbers: Any = tuple(layers)
    for layer in numbers:
        check_whole("layers", layer, 0, count - 1)
    if not numbers or len(set(numbers)) != len(numbers):
        raise InvalidInputError(f"layers are different numbers from 0 to {count - 1}, got {list(numbers)}")
    return tuple(sorted(numbers))


def check_size(parts: Sequence[str], layers: int, tokens: int, rows: int, heads: int, width: int) -> None:
    """Refuse a trace of `rows` of the tokens that would fill the memory."""
    needed = 4 * layers * rows * width * sum(part in parts for part in ("hidden", "ffn"))
    if "attention" in parts:
        needed += 4 * layers * heads * rows * tokens
    if needed > MOST_BYTES:
        raise InvalidInputError(
            f"this trace would take {needed / 2**30:.1f} GiB, and {MOST_BYTES >> 30} are the most: ask for "
            "fewer layers, tokens or parts"
        )


def trace(
    opening: TracePass,
    tokens: NDArray[np.int32],
    what: str | Sequence[str],
    layers: Sequence[int] | None,
    adapters: Mapping[Adapter, float],
    start: int,
) -> Trace:
    """Read `tokens` in a context of their own, with these adapters. Those from `start` on are looked at."""
    parts, (weights, open_core) = checked_parts(what), opening
    lib = library.load()
    numbers = checked_layers(layers, int(lib.llama_model_n_layer(weights.handle)))
    heads = int(lib.llama_model_n_head(weights.handle))
    width = int(lib.llama_model_n_embd(weights.handle))
    check_size(parts, len(numbers), len(tokens), len(tokens) - start, heads, width)
    # Flash attention never has its weights.
    flash = "attention" not in parts
    tracer = Tracer(parts, numbers)
    core = open_core(tracer.callback, len(tokens), _CHUNK, flash)
    try:
        if adapters and not core.adapt(adapters):
            raise EngineError("the engine refused the adapters of this sequence")
        batch = Batch(_CHUNK)
        for at, part in _chunks(tokens, start):
            tracer.is_on = at >= start
            # All rows: else the last layer computes nothing for the others.
            batch.fill([BatchPart(0, at, part, np.ones(len(part), np.int8))])
            if (outcome := core.decode(batch)) is not Outcome.DONE:
                raise EngineError(f"the pass that was to be traced failed: {outcome.value}")
        core.synchronize()
        logits = core.row(len(part) - 1).copy()
    finally:
        core.close()
    if tracer.problem:
        raise EngineError(f"the pass could not be traced: {tracer.problem}")
    joined = {name: _joined(name, tracer, numbers, len(tokens), start, heads) for name in parts}
    return Trace(
        tokens=tuple(tokens.tolist()),
        layers=numbers,
        start=start,
        logits=logits,
        experts=weights.experts,
        flash=flash,
        **joined,
    )


def _chunks(tokens: NDArray[np.int32], start: int) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """Steps, none of which goes past `start` and on."""
    for first, end in ((0, start), (start, len(tokens))):
        for at in range(first, end, _CHUNK):
            yield at, tokens[at : min(at + _CHUNK, end)]


def _joined(part: str, tracer: Tracer, layers: Sequence[int], count: int, start: int, heads: int) -> Any:
    """The steps of each layer as one array; None where no layer has this part."""
    by_layer = [tracer.found.get((part, layer)) for layer in layers]
    known = next((each for each in by_layer if each), None)
    if known is None:
        return None
    if part == "attention":
        whole = np.zeros((len(layers), heads, count - start, count), np.float32)
        for at, steps in enumerate(by_layer):
            first = start
            for step in steps or ():
                # (stream, head, token that looks, cell): cells lie in the order of their tokens.
                rows = step[0]
                end = first + rows.shape[1]
                whole[at, :, first - start : end - start, :end] = rows[:, :, :end]
                first = end
        return whole
    width = known[0].shape[-1]
    empty = (
        np.full((count - start, width), -1, np.int32)
        if part == "router"
        else np.zeros((count - start, width), np.float32)
    )
    return np.stack(
        [
            np.concatenate([step.reshape(-1, width) for step in steps]) if steps else empty
            for steps in by_layer
        ]
    )


_LIVE = ("hidden", "ffn", "router")
"""What a step computes anyway; flash attention never has its weights."""


class TracedCore(LlamaCore):
    """Keeps what some layers computed for the rows of the last step. Every node of a step asks Python whether
    it is wanted: only a context that was opened for it pays for that."""

    def __init__(
        self,
        weights: LlamaWeights,
        params: Any,
        memory: MemorySpec,
        *,
        what: str | Sequence[str],
        layers: Sequence[int] | None,
        **known: Unpack[CoreKeywords],
    ) -> None:
        self._parts = checked_parts(what)
        if missing := [part for part in self._parts if part not in _LIVE]:
            raise InvalidInputError(
                f"the steps of a context trace {', '.join(_LIVE)}, not {', '.join(missing)}: "
                "ctx.trace() reads the tokens once more for it"
            )
        self._layers = checked_layers(layers, int(library.load().llama_model_n_layer(weights.handle)))
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
