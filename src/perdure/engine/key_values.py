"""Keys and values of a cache as numbers, and the rotation of keys by their positions (RoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from perdure.checks import check_whole
from perdure.engine.contract import Capture, Floats
from perdure.errors import InvalidInputError

NO_NUMBERS = (
    "keys and values cannot be told apart here: that needs flash attention, and a model all of whose layers "
    "keep a row of both for each token, or for those of a window"
)


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


class KeyValueReader(Protocol):
    """Reads captured state as numbers. It checks nothing."""

    layers: tuple[int, ...]
    """Those whose keys and values are in the rows by token."""
    window_layers: tuple[int, ...]
    """Those that keep the last tokens only, in the tail state."""

    def read(self, rows: NDArray[np.uint8], layer: int) -> tuple[Floats, Floats]:
        """Keys and values of one of `layers` by (token, head, number), out of rows that were captured."""
        ...

    def read_window(self, tail_state: NDArray[np.uint8], layer: int) -> tuple[int, Floats, Floats]:
        """The same of one of `window_layers`, and the position of its first token."""
        ...

    def rope(self, layer: int) -> Rope | str:
        """How keys of a layer are rotated; a text says why that cannot be undone."""
        ...


@runtime_checkable
class KeyValueCore(Protocol):
    """A core whose state can be read as numbers."""

    def key_values(self) -> KeyValueReader | str:
        """Once state was captured: who reads it; a text says why nobody can."""
        ...


def read_rows(
    reader: KeyValueReader, rows: NDArray[np.uint8], layer: int | None, start: int, *, rope: bool
) -> KeyValues:
    """Keys and values of rows by token, the first of which is at position `start`."""
    layers = _chosen(reader.layers, layer)
    if layer in reader.window_layers:
        raise InvalidInputError(
            f"layer {layer} keeps a window, which no rows by token have: these have {list(reader.layers)}"
        )
    return _joined(reader, {each: reader.read(rows, each) for each in layers}, start, rope=rope)


def read_sequence(
    reader: KeyValueReader,
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
    reader: KeyValueReader, by_layer: Mapping[int, tuple[Floats, Floats]], start: int, *, rope: bool
) -> KeyValues:
    keys = []
    for layer, (k, _) in by_layer.items():
        if not rope:
            rotation = reader.rope(layer)
            if isinstance(rotation, str):
                raise InvalidInputError(
                    f"keys cannot be had as they were before RoPE: {rotation}; leave rope on"
                )
            k = rotation.undo(k, start)
        keys.append(k)
    values = np.stack([v for _, v in by_layer.values()])
    return KeyValues(k=np.stack(keys), v=values, layers=tuple(by_layer), start=start, rotated=rope)


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
