"""Adapter files: LoRAs and control vectors as GGUF, judged before the engine sees them.

A LoRA has two matrices for each weight that it changes, an activated LoRA (aLoRA) also the tokens that switch
it on:

    general.type = "adapter", general.architecture = "llama", adapter.type = "lora", adapter.lora.alpha = 16.0
    adapter.alora.invocation_tokens = [1, 4093, …]
    blk.0.attn_q.weight.lora_a  576 × 8        blk.0.attn_q.weight.lora_b  8 × 576

A control vector has a direction for each layer that it changes:

    general.architecture = "controlvector", controlvector.model_hint = "llama"
    direction.1  576        direction.2  576

The library ends the process on a value of another type, and at the first step on matrices that do not fit
each other.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perdure.errors import ModelFileError, ModelLoadError, ModelNotFoundError
from perdure.models.header import Header, Tensor, read_header

MAX_INVOCATION = 1024
"""Tokens that switch an adapter on, at most."""
_ALPHA = "adapter.lora.alpha"
_INVOCATION = "adapter.alora.invocation_tokens"
_VECTOR = "controlvector"
_FLOAT32 = "f32"
_DIRECTION = re.compile(r"direction\.([1-9]\d{0,3})")
_COMPUTED = frozenset(
    {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
)
"""Types that the library can multiply with."""
_IGNORED = "_norm.weight"
"""What some adapters have besides, and the library leaves out."""

Kind = Literal["LoRA", "aLoRA", "control vector"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """What an adapter says of itself, as far as that can be seen without its model."""

    header: Header
    kind: Kind
    architecture: str
    """Of the model that it changes; empty where a control vector does not say."""
    alpha: float = 0.0
    rank: int = 0
    """The largest of its matrices'."""
    invocation: tuple[int, ...] = ()
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """Of a LoRA, by the weight that each changes."""
    directions: Mapping[int, Tensor]
    """Of a control vector, by layer."""

    @property
    def path(self) -> Path:
        return self.header.path

    def check_lora(self, architecture: str, weights: Mapping[str, Tensor], n_vocab: int) -> None:
        """Raise where this LoRA does not fit a model of these weights."""
        self._check_architecture(architecture)
        if self.invocation and max(self.invocation) >= n_vocab:
            raise self._misfit(
                f"it is switched on by token {max(self.invocation)}, and the model has {n_vocab}"
            )
        for name, (a, b) in self.pairs.items():
            if (weight := weights.get(name)) is None:
                raise self._misfit(f"it changes {name}, which the model does not have")
            if weight.type.name == "NVFP4":
                raise self._misfit(f"the library cannot change weights of type NVFP4, as {name} is")
            # Rows of an embedding are looked up, so its two matrices are the other way round.
            flipped = name.endswith("token_embd.weight")
            (into, outof), (wide, tall), (rank, long) = _shape(weight), _shape(a), _shape(b)
            fits = (
                (tall, long, wide) == (outof, into, rank)
                if flipped
                else (wide, long, tall) == (into, outof, rank)
            )
            if not fits or len(weight.shape) < 2 or not _experts(a, b, weight.shape[2:]):
                raise self._misfit(
                    f"its matrices for {name} are {_by(a)} and {_by(b)}, and the weight is {_by(weight)}"
                )

    def check_vector(self, architecture: str, n_embd: int, n_layer: int) -> None:
        """Raise where this control vector does not fit a model of so many layers and values a token."""
        self._check_architecture(architecture)
        for layer, tensor in self.directions.items():
            if layer >= n_layer:
                raise self._misfit(f"it changes layer {layer}; layers from 1 to {n_layer - 1} can be changed")
            if tensor.shape != (n_embd,):
                raise self._misfit(f"its directions have {_by(tensor)} values, the model {n_embd}")

    def read_vector(self, n_embd: int, n_layer: int) -> NDArray[np.float32]:
        """The directions of the layers 1 to `n_layer` - 1, zero where there is none."""
        rows = np.zeros((n_layer - 1, n_embd), np.float32)
        with open(self.path, "rb") as file:
            for layer, tensor in self.directions.items():
                file.seek(tensor.offset)
                data = file.read(tensor.size)
                if len(data) != tensor.size:
                    raise ModelFileError(f"{self.path} shrank while it was read")
                rows[layer - 1] = np.frombuffer(data, "<f4")
        if not np.isfinite(rows).all():
            raise ModelFileError(f"{self.path} is damaged: a direction has values that are no numbers")
        return rows

    def _check_architecture(self, architecture: str) -> None:
        if self.architecture and self.architecture != architecture:
            raise self._misfit(f"it is for {self.architecture}, and the model is {architecture}")

    def _misfit(self, why: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.path.name} is no adapter for this model: {why}. An adapter fits only the model that it "
            "was trained on"
        )


def is_adapter(header: Header) -> bool:
    """Whether a file is an adapter and no model."""
    return header.text("general.type") == "adapter" or header.text("general.architecture") == _VECTOR


def read_adapter(source: str | os.PathLike[str]) -> AdapterFile:
    """Read and judge the header of an adapter file."""
    try:
        path = Path(source)
    except TypeError:
        raise ModelNotFoundError(f"an adapter is a file, got {source!r}") from None
    return adapter_of(read_header(path))


def adapter_of(header: Header) -> AdapterFile:
    """The adapter whose file has this header; raises where it is none, or is damaged."""
    name = header.path.name
    for key in ("general.type", "general.architecture", "adapter.type"):
        if key in header.metadata and header.text(key) is None:
            raise ModelFileError(f"{name} is damaged: {key} is no text")
    if header.text("general.architecture") == _VECTOR:
        return _vector(header)
    if header.text("general.type") != "adapter":
        raise ModelFileError(f"{name} is no adapter: its general.type is {header.text('general.type')!r}")
    if header.text("adapter.type") != "lora":
        raise ModelFileError(
            f"{name} is an adapter of type {header.text('adapter.type')!r}; LoRAs and control vectors can be "
            "used"
        )
    return _lora(header)


def _lora(header: Header) -> AdapterFile:
    name = header.path.name
    alpha = header.metadata.get(_ALPHA, 0.0)
    if header.kinds.get(_ALPHA, _FLOAT32) != _FLOAT32 or not isinstance(alpha, float):
        raise ModelFileError(f"{name} is damaged: {_ALPHA} is no f32")
    if not math.isfinite(alpha):
        raise ModelFileError(f"{name} is damaged: {_ALPHA} is {alpha}")
    halves: dict[str, dict[str, Tensor]] = {}
    for tensor in header.tensors:
        weight, dot, half = tensor.name.rpartition(".")
        if half not in ("lora_a", "lora_b") or not dot or ".lora_" in weight:
            if tensor.name.endswith(_IGNORED):
                continue
            raise ModelFileError(f"{name} is no LoRA: it has a tensor {tensor.name!r}")
        if tensor.type.name not in _COMPUTED:
            raise ModelFileError(f"{name} cannot be used: {tensor.name} is of type {tensor.type.name}")
        if not 1 <= len(tensor.shape) <= 3 or not tensor.elements:
            raise ModelFileError(f"{name} is damaged: {tensor.name} has the shape {tensor.shape}")
        halves.setdefault(weight, {})[half] = tensor
    if not halves:
        raise ModelFileError(f"{name} is a LoRA without any matrix")
    for weight, pair in halves.items():
        if len(pair) < 2:
            raise ModelFileError(
                f"{name} is damaged: it has one matrix for {weight} where two belong together"
            )
    pairs = {weight: (pair["lora_a"], pair["lora_b"]) for weight, pair in halves.items()}
    invocation = _invocation(header)
    return AdapterFile(
        header=header,
        kind="aLoRA" if invocation else "LoRA",
        architecture=header.text("general.architecture") or "unknown",
        alpha=alpha,
        rank=max(_shape(b)[0] for _, b in pairs.values()),
        invocation=invocation,
        pairs=pairs,
        directions={},
    )


def _invocation(header: Header) -> tuple[int, ...]:
    value = header.metadata.get(_INVOCATION)
    if value is None:
        return ()
    if not isinstance(value, np.ndarray) or value.dtype != np.dtype("<u4"):
        raise ModelFileError(f"{header.path.name} is damaged: {_INVOCATION} is no list of u32")
    if not 1 <= len(value) <= MAX_INVOCATION:
        raise ModelFileError(
            f"{header.path.name} is damaged: {len(value)} tokens switch it on, 1 to {MAX_INVOCATION} can"
        )
    return tuple(value.tolist())


def _vector(header: Header) -> AdapterFile:
    name = header.path.name
    hint = header.metadata.get("controlvector.model_hint", "")
    if not isinstance(hint, str):
        raise ModelFileError(f"{name} is damaged: controlvector.model_hint is no text")
    directions: dict[int, Tensor] = {}
    for tensor in header.tensors:
        match = _DIRECTION.fullmatch(tensor.name)
        if match is None or tensor.type.name != "F32" or len(tensor.shape) != 1 or not tensor.elements:
            raise ModelFileError(
                f"{name} is no control vector: {tensor.name!r} is {tensor.type.name} of {_by(tensor)}, where "
                "direction.LAYER is a list of F32, from layer 1 on"
            )
        directions[int(match[1])] = tensor
    if not directions:
        raise ModelFileError(f"{name} is a control vector without any direction")
    return AdapterFile(
        header=header, kind="control vector", architecture=hint, pairs={}, directions=directions
    )


def _shape(tensor: Tensor) -> tuple[int, int]:
    return tensor.shape[0], tensor.shape[1] if len(tensor.shape) > 1 else 1


def _experts(a: Tensor, b: Tensor, experts: tuple[int, ...]) -> bool:
    """Whether both matrices are there for each of a weight's experts, if it has some."""
    expected = tuple(count for count in experts if count != 1)
    return all(tuple(count for count in each.shape[2:] if count != 1) == expected for each in (a, b))


def _by(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape))
