"""The rows of llama.cpp's cache as numbers: by the layout that was proved, and the types that it names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats
from perdure.engine.key_values import NO_NUMBERS, Rope
from perdure.engine.llama.native import library
from perdure.engine.llama.native.layout import Layout, window
from perdure.engine.llama.weights import Weights
from perdure.errors import EngineError

_NEIGHBOURS, _HALVES, _NONE = 0, 2, -1
"""The library's numbers for how pairs of a head are rotated."""


_WINDOWS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}
"""Architectures that the library gives windows in all layers but every n-th."""
_WINDOW_BASES = {"gemma3": 10000.0}
"""Of their rotation in layers with a window, where it is not that of the others."""


class KvNumbers:
    """Reads keys and values out of captured rows, and out of the tail state of models with windows."""

    def __init__(
        self,
        layout: Layout,
        metadata: Mapping[str, str],
        sizes: tuple[int, int],
        windows: tuple[int, ...],
        n_layer: int,
        streams: int,
        rope: Callable[[], Rope | str],
    ) -> None:
        self._layout, self._metadata, self._sizes = layout, metadata, sizes
        self._streams, self._rope = streams, rope
        self.window_layers = windows
        self.layers = tuple(layer for layer in range(n_layer) if layer not in windows)

    @classmethod
    def of(
        cls, layout: Layout, weights: Weights, streams: int, rope: Callable[[], Rope | str]
    ) -> KvNumbers | str:
        """Those of one context; a text says why there are none."""
        metadata, lib = weights.metadata, library.load()
        architecture = metadata.get("general.architecture", "")
        n_layer = int(lib.llama_model_n_layer(weights.handle))
        n_head = int(lib.llama_model_n_head(weights.handle))

        def size(name: str) -> int:
            known = metadata.get(f"{architecture}.attention.{name}_length")
            return int(known) if known else int(metadata[f"{architecture}.embedding_length"]) // n_head

        windows: tuple[int, ...] = ()
        if int(lib.llama_model_n_swa(weights.handle)) > 0:
            if (period := _WINDOWS.get(architecture)) is None:
                return f"which layers of {architecture or 'this model'} keep a window is not known here"
            windows = tuple(layer for layer in range(n_layer) if layer % period < period - 1)
        # Values kept elsewhere, other kinds of caches, and rows that are rotated once more are not read.
        full_layers = n_layer - len(windows)
        if layout.layers != full_layers or len(layout.regions) != 2 * full_layers or any(layout.figures):
            return NO_NUMBERS
        return cls(layout, metadata, (size("key"), size("value")), windows, n_layer, streams, rope)

    def read(self, rows: NDArray[np.uint8], layer: int) -> tuple[Floats, Floats]:
        """Keys and values of a layer by (token, head, number)."""
        return self._numbers(self._layout, rows, self.layers.index(layer), len(self.layers))

    def read_window(self, tail_state: NDArray[np.uint8], layer: int) -> tuple[int, Floats, Floats]:
        """The same of a layer with a window, and the position of the first token that it has."""
        window_rows = window(tail_state, self._streams)
        count = len(self.window_layers)
        if window_rows is None or window_rows[0].layers != count or len(window_rows[0].regions) != 2 * count:
            raise EngineError("the window of this context is laid out otherwise than its layers say")
        layout, start, rows = window_rows
        at = self.window_layers.index(layer)
        return start, *self._numbers(layout, rows.cut(0, len(rows)), at, count)

    def rope(self, layer: int) -> Rope | str:
        """How its keys are rotated."""
        rope = self._rope()
        architecture = self._metadata.get("general.architecture", "")
        base = self._metadata.get(f"{architecture}.rope.freq_base_swa") or _WINDOW_BASES.get(architecture)
        if isinstance(rope, str) or layer not in self.window_layers or base is None:
            return rope
        return dataclasses.replace(rope, base=float(base), scale=1.0)

    def _numbers(
        self, layout: Layout, rows: NDArray[np.uint8], place: int, layers: int
    ) -> tuple[Floats, Floats]:
        """Of the layer in this place among those that the rows have."""
        arrays = []
        for region, size in zip((place, layers + place), self._sizes, strict=True):
            kind, width = layout.regions[region]
            at = layout.extension + sum(each for _, each in layout.regions[:region])
            numbers = floats(kind, np.ascontiguousarray(rows[:, at : at + width]).reshape(-1))
            arrays.append(numbers.reshape(len(rows), -1, size))
        return arrays[0], arrays[1]


def floats(kind: int, raw: NDArray[np.uint8]) -> Floats:
    """Bytes of one of the library's types as floats of their own."""
    traits = library.load().ggml_get_type_traits(kind).contents
    if kind == 0:
        return raw.view("<f4").astype(np.float32)
    if not traits.to_float or not traits.size:
        raise EngineError(f"the llama.cpp library in use cannot read its type {kind} as numbers")
    numbers = np.empty(len(raw) // traits.size * traits.block, np.float32)
    traits.to_float(raw.ctypes.data, numbers.ctypes.data, numbers.size)
    return numbers


def rope_of(
    metadata: Mapping[str, str], tensors: Collection[str], kind: int, base: float, scale: float, key_size: int
) -> Rope | str:
    """How a model rotates keys, where a context may have been given another base and scale (0: its own)."""
    architecture = metadata.get("general.architecture", "")

    def known(name: str, default: str) -> str:
        return metadata.get(f"{architecture}.rope.{name}", default)

    if kind == _NONE:
        return Rope(0, 1.0, 1.0, False)
    if kind not in (_NEIGHBOURS, _HALVES):
        return "positions of several dimensions (M-RoPE) rotate its keys"
    scaling = known("scaling.type", "none")
    if scaling not in ("none", "linear", ""):
        return f"its keys are rotated with {scaling} scaling"
    if any(name.startswith("rope_f") or ".rope_f" in name for name in tensors):
        return "its file has factors for each frequency of its rotation"
    factor = float(known("scaling.factor", "0") or 0)
    scale = scale or (1.0 / factor if factor and scaling == "linear" else 1.0)
    base = base or float(known("freq_base", "10000"))
    return Rope(int(known("dimension_count", str(key_size))), base, scale, kind == _HALVES)
