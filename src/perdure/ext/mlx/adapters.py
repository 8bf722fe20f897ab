"""Adapters in mlx-lm's format: a folder with adapter_config.json and adapters.safetensors.

Layers are put around those of the model while a sequence with adapters is computed, and taken off again. So
several adapters, each at its own scale, share one copy of the weights.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from perdure import InvalidInputError, ModelFileError, ModelNotFoundError, TooLargeError
from perdure.ext.mlx.caches import Array
from perdure.ext.weights.safetensors import FLOATS, read_safetensors
from perdure.spi.base import content_digest, is_number, read_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapters.safetensors"
_LARGEST_CONFIG = 1 << 20
_PARTS = ("lora_a", "lora_b", "m")


@dataclass(frozen=True, eq=False)
class MlxAdapter:
    """A LoRA or a DoRA of one model: by the path of a layer, its two matrices, and of a DoRA the lengths."""

    owner: object
    digest: str
    scale: float
    layers: Mapping[str, Mapping[str, Array]]
    invocation: tuple[int, ...] = ()

    @property
    def is_dora(self) -> bool:
        return any("m" in parts for parts in self.layers.values())


class Adapted(nn.Module):  # type: ignore[misc]
    """A layer with what adapters add to it."""

    def __init__(self, base: Any, added: Sequence[tuple[float, Mapping[str, Array]]]) -> None:
        super().__init__()
        self.base = base
        self._added = added

    def __call__(self, x: Array) -> Array:
        out = self.base(x)
        for scale, parts in self._added:
            more = scale * ((x @ parts["lora_a"]) @ parts["lora_b"])
            if "m" not in parts:
                out = out + more.astype(out.dtype)
                continue
            # The lengths of the rows of the whole weight are given; its own are known from the base.
            bias = self.base.get("bias", 0)
            out = (out - bias + more.astype(out.dtype)) * parts["ratio"].astype(out.dtype) + bias
        return out


def read_adapter(path: str, model: Any, owner: object) -> MlxAdapter:
    """Judge and load the adapter in the folder at `path` for a model."""
    folder = Path(path).expanduser()
    folder = folder.parent if folder.name == WEIGHTS else folder
    weights = folder / WEIGHTS
    if not weights.is_file() or not (folder / CONFIG).is_file():
        raise ModelNotFoundError(
            f"{folder} has no {CONFIG} and {WEIGHTS}: an adapter for MLX is a folder with both, as mlx-lm "
            "writes it"
        )
    scale = _scale(folder / CONFIG)
    header = read_safetensors(weights)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor in header.tensors:
        layer, _, part = tensor.name.rpartition(".")
        if part not in _PARTS or tensor.dtype not in FLOATS:
            raise ModelFileError(
                f"{weights} has {tensor.name[:80]!r} in {tensor.dtype}, which is no part of a LoRA"
            )
        shapes.setdefault(layer, {})[part] = tensor.shape
    if not shapes:
        raise ModelFileError(f"{weights} has no layers")
    for layer, parts in shapes.items():
        _check_layer(weights, layer, parts, place_of(model, layer))
    loaded: dict[str, Array] = mx.load(str(weights))  # type: ignore[assignment]
    layers: dict[str, dict[str, Array]] = {layer: {} for layer in shapes}
    for name, array in loaded.items():
        layer, _, part = name.rpartition(".")
        layers[layer][part] = array
    for layer, matrices in layers.items():
        if "m" in matrices:
            matrices["ratio"] = _ratio(place_of(model, layer), matrices, scale)
    mx.eval(layers)
    content = f"{content_digest(weights)} {scale}"
    return MlxAdapter(owner, hashlib.sha256(content.encode()).hexdigest(), scale, layers)


def _scale(path: Path) -> float:
    try:
        config = json.loads(read_file(path, _LARGEST_CONFIG))
    except TooLargeError as error:
        raise ModelFileError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is no JSON: {error}") from None
    kind = config.get("fine_tune_type", "lora") if isinstance(config, dict) else None
    if kind not in ("lora", "dora"):
        raise InvalidInputError(
            f"{path.parent} is a fine tuning of type {str(kind)[:40]!r}; adapters are lora or dora. Put a "
            "full one into the model with mlx_lm.fuse"
        )
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    if not is_number(scale) or not math.isfinite(scale):
        raise ModelFileError(f"{path} has no scale in its lora_parameters")
    return float(scale)


def place_of(model: Any, layer: str) -> Any:
    """The layer of a model at a path, or None."""
    place = model
    for word in layer.split("."):
        if isinstance(place, list):
            place = place[int(word)] if word.isdigit() and int(word) < len(place) else None
        else:
            place = place.get(word) if isinstance(place, dict) else None
        if place is None:
            return None
    return place.base if isinstance(place, Adapted) else place


def _check_layer(path: Path, layer: str, parts: Mapping[str, tuple[int, ...]], place: Any) -> None:
    if not isinstance(place, nn.Linear | nn.QuantizedLinear):
        raise InvalidInputError(
            f"{path} changes {layer[:80]!r}, which is "
            + ("not in this model" if place is None else f"a {type(place).__name__}, and cannot be changed")
            + ": the adapter is of another model"
        )
    out, width = (int(size) for size in place.weight.shape)
    if isinstance(place, nn.QuantizedLinear):
        width = width * 32 // place.bits
    first, second = parts.get("lora_a", ()), parts.get("lora_b", ())
    good = len(first) == len(second) == 2 and first[0] == width and second[1] == out
    good = good and first[1] == second[0] and parts.get("m", (out,)) == (out,)
    if not good:
        raise InvalidInputError(
            f"{path} has {layer[:80]!r} of {first} and {second}, the model has {width} and {out} there"
        )


def _ratio(place: Any, parts: Mapping[str, Array], scale: float) -> Array:
    """By what a DoRA stretches each number that a layer gives."""
    weight = place.weight
    if isinstance(place, nn.QuantizedLinear):
        weight = mx.dequantize(weight, place.scales, place.biases, place.group_size, place.bits)
    whole = weight + (scale * parts["lora_b"].T) @ parts["lora_a"].T
    return parts["m"] / mx.linalg.norm(whole.astype(mx.float32), axis=1)


def put_on(model: Any, adapters: Sequence[tuple[MlxAdapter, float]], before: Sequence[str]) -> list[str]:
    """Have a model compute with these, and with none of those `before`: the layers that are changed now."""
    paths = list(dict.fromkeys(layer for adapter, _ in adapters for layer in adapter.layers))
    for layer in {*before, *paths}:
        base = place_of(model, layer)
        added = [
            (adapter.scale * scale, adapter.layers[layer])
            for adapter, scale in adapters
            if layer in adapter.layers
        ]
        above, _, name = layer.rpartition(".")
        place = model
        for word in above.split("."):
            place = place[int(word)] if isinstance(place, list) else place[word]
        place[name] = Adapted(base, added) if added else base
    return paths
