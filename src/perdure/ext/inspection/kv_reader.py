"""Keys and values of llama.cpp's cache as numbers, and the rotation of keys by their positions (RoPE).

They are read out of captured rows by the layout that was proved, and by the types that it names; out of the
tail state for layers with windows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perdure import EngineError, InvalidInputError, KeyValues
from perdure.spi.base import check_whole, file_version
from perdure.spi.engine import Capture, Core, Floats
from perdure.spi.llama import CachedState, CachedStateCore, StateLayout, library, window_rows
from perdure.spi.models import read_parts

NO_NUMBERS = (
    "keys and values cannot be told apart here: that needs flash attention, and a model all of whose layers "
    "keep a row of both for each token, or for those of a window"
)


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotation of pairs of numbers by an angle that grows with the position, slower from pair to pair."""

    size: int
    """How many numbers of a head are rotated; 0: none."""
    base: float
    scale: float
    halves: bool
    """Whether a pair is a number of the first half and one of the second, and not two neighbours."""

    def undo(self, k: Floats, start: int) -> Floats:
        """Keys by (token, head, number) as they were before; the first token is at position `start`."""
        return self._turn(k, start, -1.0)

    def apply(self, k: Floats, start: int) -> Floats:
        """The same in the other direction."""
        return self._turn(k, start, 1.0)

    def _turn(self, k: Floats, start: int, sign: float) -> Floats:
        if not self.size:
            return k
        half = self.size // 2
        steps = self.base ** (-2.0 * np.arange(half) / self.size)
        positions = np.arange(start, start + len(k)) * self.scale
        angles = positions[:, None, None] * steps
        cos, sin = np.cos(angles), sign * np.sin(angles)
        turned = k.astype(np.float64)
        if self.halves:
            first, second = slice(0, half), slice(half, self.size)
        else:
            first, second = slice(0, self.size, 2), slice(1, self.size, 2)
        a, b = turned[..., first].copy(), turned[..., second].copy()
        turned[..., first], turned[..., second] = a * cos - b * sin, a * sin + b * cos
        return turned.astype(np.float32)


_NEIGHBOURS, _HALVES, _NONE = 0, 2, -1
"""The library's numbers for how pairs of a head are rotated."""


_WINDOWS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}
"""Architectures that the library gives windows in all layers but every n-th."""
_WINDOW_BASES = {"gemma3": 10000.0}
"""Of their rotation in layers with a window, where it is not that of the others."""


class KvReader:
    """Reads keys and values out of captured rows, and out of the tail state of models with windows."""

    def __init__(
        self,
        layout: StateLayout,
        sizes: tuple[int, int],
        windows: tuple[int, ...],
        n_layer: int,
        state: CachedState,
    ) -> None:
        self._layout, self._metadata, self._sizes = layout, state.weights.metadata, sizes
        self._state = state
        self.window_layers = windows
        self.layers = tuple(layer for layer in range(n_layer) if layer not in windows)

    @classmethod
    def of(cls, core: Core) -> KvReader:
        """That of one context, whose state was captured."""
        state = core.cached_state() if isinstance(core, CachedStateCore) else None
        if state is None:
            raise InvalidInputError(NO_NUMBERS)
        layout, metadata, lib = state.layout, state.weights.metadata, library.load()
        weights = state.weights
        architecture = metadata.get("general.architecture", "")
        n_layer = int(lib.llama_model_n_layer(weights.handle))
        n_head = int(lib.llama_model_n_head(weights.handle))

        def size(name: str) -> int:
            known = metadata.get(f"{architecture}.attention.{name}_length")
            return int(known) if known else int(metadata[f"{architecture}.embedding_length"]) // n_head

        windows: tuple[int, ...] = ()
        if int(lib.llama_model_n_swa(weights.handle)) > 0:
            if (period := _WINDOWS.get(architecture)) is None:
                raise InvalidInputError(
                    f"which layers of {architecture or 'this model'} keep a window is not known here"
                )
            windows = tuple(layer for layer in range(n_layer) if layer % period < period - 1)
        # Values kept elsewhere, other kinds of caches, and rows that are rotated once more are not read.
        full_layers = n_layer - len(windows)
        if layout.layers != full_layers or len(layout.regions) != 2 * full_layers or any(layout.figures):
            raise InvalidInputError(NO_NUMBERS)
        return cls(layout, (size("key"), size("value")), windows, n_layer, state)

    def read(self, rows: NDArray[np.uint8], layer: int) -> tuple[Floats, Floats]:
        """Keys and values of a layer by (token, head, number)."""
        return self._numbers(self._layout, rows, self.layers.index(layer), len(self.layers))

    def read_window(self, tail_state: NDArray[np.uint8], layer: int) -> tuple[int, Floats, Floats]:
        """The same of a layer with a window, and the position of the first token that it has."""
        found = window_rows(tail_state, self._state.streams)
        count = len(self.window_layers)
        if found is None or found[0].layers != count or len(found[0].regions) != 2 * count:
            raise EngineError("the window of this context is laid out otherwise than its layers say")
        layout, start, rows = found
        at = self.window_layers.index(layer)
        return start, *self._numbers(layout, rows.cut(0, len(rows)), at, count)

    def rope(self, layer: int) -> Rope | str:
        """How its keys are rotated."""
        rope = _rope(self._state)
        architecture = self._metadata.get("general.architecture", "")
        base = self._metadata.get(f"{architecture}.rope.freq_base_swa") or _WINDOW_BASES.get(architecture)
        if isinstance(rope, str) or layer not in self.window_layers or base is None:
            return rope
        return dataclasses.replace(rope, base=float(base), scale=1.0)

    def _numbers(
        self, layout: StateLayout, rows: NDArray[np.uint8], place: int, layers: int
    ) -> tuple[Floats, Floats]:
        """Of the layer in this place among those that the rows have."""
        arrays = []
        for region, size in zip((place, layers + place), self._sizes, strict=True):
            kind, width = layout.regions[region]
            at = layout.place_bytes + sum(each for _, each in layout.regions[:region])
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


def _rope(state: CachedState) -> Rope | str:
    """How keys are rotated in a context; a text says why that is not known."""
    weights, lib = state.weights, library.load()
    heads = int(lib.llama_model_n_head(weights.handle))
    size = int(lib.llama_model_n_embd(weights.handle)) // max(1, heads)
    architecture = weights.metadata.get("general.architecture", "")
    known = weights.metadata.get(f"{architecture}.attention.key_length")
    names = _tensor_names(weights.path, file_version(weights.path))
    kind = int(lib.llama_model_rope_type(weights.handle))
    return rope_of(weights.metadata, names, kind, *state.rope, int(known) if known else size)


@functools.lru_cache(8)
def _tensor_names(path: Path, version: tuple[int, ...]) -> frozenset[str]:
    return frozenset(tensor.name for part in read_parts(path) for tensor in part.tensors)


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


def read_rows(core: Core, rows: NDArray[np.uint8], layer: int | None, start: int, *, rope: bool) -> KeyValues:
    """Keys and values of rows by token, the first of which is at position `start`."""
    reader = KvReader.of(core)
    layers = _chosen(reader.layers, layer)
    if layer in reader.window_layers:
        raise InvalidInputError(
            f"layer {layer} keeps a window, which no rows by token have: these have {list(reader.layers)}"
        )
    return _joined(reader, {each: reader.read(rows, each) for each in layers}, start, rope=rope)


def read_sequence(
    core: Core,
    capture: Capture,
    length: int,
    layer: int | None,
    start: int | None,
    stop: int | None,
    *,
    rope: bool,
) -> KeyValues:
    """Keys and values of the tokens `start` to `stop` of a captured sequence; without a start, from the first
    token on that all these layers have."""
    reader = KvReader.of(core)
    layers = _chosen(tuple(sorted((*reader.layers, *reader.window_layers))), layer)
    if capture.rows is None:
        raise InvalidInputError(NO_NUMBERS)
    windows = {}
    if capture.tail_state is not None:
        sliding = [each for each in layers if each in reader.window_layers]
        windows = {each: reader.read_window(capture.tail_state, each) for each in sliding}
    oldest = max((first for first, _, _ in windows.values()), default=0)
    start, stop = oldest if start is None else start, length if stop is None else stop
    for name, value in (("start", start), ("stop", stop)):
        check_whole(name, value, 0, length)
    if start >= stop:
        raise InvalidInputError(f"tokens {start} to {stop} are none: give a stop above the start")
    if start < oldest:
        gone = next(each for each, (first, _, _) in windows.items() if first > start)
        whole = f"; layers {list(reader.layers)} have all {length}" if reader.layers else ""
        raise InvalidInputError(
            f"layer {gone} keeps a window: of tokens {start} to {stop} it has those from {oldest} on{whole}"
        )
    rows = capture.rows.cut(start, stop) if len(windows) < len(layers) else None
    by_layer = {}
    for each in layers:
        if each in windows:
            first, k, v = windows[each]
            by_layer[each] = k[start - first : stop - first], v[start - first : stop - first]
        else:
            assert rows is not None
            by_layer[each] = reader.read(rows, each)
    return _joined(reader, by_layer, start, rope=rope)


def _chosen(layers: tuple[int, ...], layer: int | None) -> tuple[int, ...]:
    if layer is None:
        return layers
    check_whole("layer", layer, 0, max(layers))
    return (layer,)


def _joined(
    reader: KvReader, by_layer: Mapping[int, tuple[Floats, Floats]], start: int, *, rope: bool
) -> KeyValues:
    keys = []
    for layer, (k, _) in by_layer.items():
        if not rope:
            rotation = reader.rope(layer)
            if isinstance(rotation, str):
                raise InvalidInputError(f"keys from before RoPE cannot be read: {rotation}; leave rope on")
            k = rotation.undo(k, start)
        keys.append(k)
    values = np.stack([v for _, v in by_layer.values()])
    return KeyValues(k=np.stack(keys), v=values, layers=tuple(by_layer), start=start, rotated=rope)
