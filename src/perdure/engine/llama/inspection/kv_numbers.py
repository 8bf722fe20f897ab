"""The rows of llama.cpp's cache as numbers: by the layout that was proved, and the types that it names."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats
from perdure.engine.key_values import Rope
from perdure.engine.llama.native import library
from perdure.engine.llama.native.layout import Layout
from perdure.errors import EngineError

_NEIGHBOURS, _HALVES, _NONE = 0, 2, -1
"""The library's numbers for how pairs of a head are rotated."""


class KvNumbers:
    """Reads keys and values out of captured rows."""

    def __init__(self, layout: Layout, metadata: Mapping[str, str], n_layer: int, n_head: int) -> None:
        architecture = metadata.get("general.architecture", "")

        def size(name: str) -> int:
            known = metadata.get(f"{architecture}.attention.{name}_length")
            return int(known) if known else int(metadata[f"{architecture}.embedding_length"]) // n_head

        self._layout = layout
        self._sizes = size("key"), size("value")
        # Caches of several kinds, values kept elsewhere, and rows that are rotated once more are not read.
        whole = layout.layers == n_layer and len(layout.regions) == 2 * n_layer
        self.layers = n_layer if whole and not any(layout.figures) else 0

    def read(self, rows: NDArray[np.uint8], layer: int) -> tuple[Floats, Floats]:
        """Keys and values of a layer by (token, head, number)."""
        found = []
        for region, size in zip((layer, self.layers + layer), self._sizes, strict=True):
            kind, width = self._layout.regions[region]
            at = self._layout.extension + sum(each for _, each in self._layout.regions[:region])
            numbers = floats(kind, np.ascontiguousarray(rows[:, at : at + width]).reshape(-1))
            found.append(numbers.reshape(len(rows), -1, size))
        return found[0], found[1]


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
