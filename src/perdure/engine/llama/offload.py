"""Offloading: how many layers of a model go to which devices, decided before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from perdure.checks import is_whole
from perdure.engine.llama.native.devices import Device
from perdure.errors import InvalidInputError, OutOfMemoryError
from perdure.models.card import card_of
from perdure.models.header import Header

GpuLayers: TypeAlias = "int | Literal['auto']"

_LAYER = re.compile(r"blk\.(\d+)\.")
_MARGIN = 256 << 20
"""Bytes of a device that its driver and the engine's own tables take."""
_WIDTHS = 24
"""Activations of a token in a step, in widths of the model, over all buffers that live at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBytes:
    """What a model takes on a device, in bytes."""

    layers: tuple[int, ...]
    """Weights of each layer, with its part of the K/V cache."""
    output: int
    """What is computed after the last layer."""
    compute: int
    """Buffers of a step."""

    @classmethod
    def of(cls, headers: Sequence[Header], *, cells: int, n_batch: int = 512, kv: bool = True) -> ModelBytes:
        """From the headers of a model's files, with room for `cells` tokens of context."""
        card = card_of(headers)
        count = card.layers or 0
        weights = [0] * count
        output = 0
        for tensor in (tensor for header in headers for tensor in header.tensors):
            match = _LAYER.match(tensor.name)
            if match and int(match[1]) < count:
                weights[int(match[1])] += tensor.size
            elif not tensor.name.startswith("token_embd") or not _has_output(headers):
                output += tensor.size
        cache = (card.kv_bytes_per_token or 0) * cells // max(1, count) if kv else 0
        width = (card.vocabulary or 0) + _WIDTHS * (card.embedding_length or 0)
        return cls(
            layers=tuple(each + cache for each in weights),
            output=output,
            compute=4 * n_batch * width + _MARGIN,
        )

    def taken(self, layers: int) -> int:
        """What the last `layers` take; the first of them is what comes after the last one."""
        if layers <= 0:
            return 0
        return self.compute + self.output + sum(self.layers[max(0, len(self.layers) + 1 - layers) :])

    @property
    def all(self) -> int:
        """How many layers there are to offload: one more than the model has."""
        return len(self.layers) + 1

    def fitting(self, room: int) -> int:
        """The most layers that fit into `room`."""
        return max((count for count in range(self.all + 1) if self.taken(count) <= room), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """How many layers go to the devices, and what there is to say about that."""

    layers: int
    devices: tuple[Device, ...] = ()
    note: str | None = None


_SPARED = 4
CPU_ONLY = Offload(layers=0)


def choose_devices(found: Sequence[Device], wanted: Sequence[str] | None) -> tuple[Device, ...]:
    """The devices of these names; with none named, every GPU, or where there is none, what shares memory."""
    able = [device for device in found if device.offloads]
    if wanted is None:
        return tuple([each for each in able if each.kind == "gpu"] or able)
    by_name = {device.name.lower(): device for device in able}
    unknown = [name for name in wanted if name.lower() not in by_name]
    if unknown:
        here = ", ".join(device.name for device in able) or "none"
        raise InvalidInputError(f"there is no device {', '.join(unknown)}; this library has {here}")
    return tuple(by_name[name.lower()] for name in wanted)


def plan_offload(wanted: GpuLayers, devices: Sequence[Device], needs: ModelBytes, name: str) -> Offload:
    """How many layers of model `name` go to `devices`: what was asked for, or as many as fit."""
    room = sum(device.free for device in devices)
    fits = needs.fitting(room)
    places = " and ".join(map(str, devices))
    if wanted == "auto":
        note = None
        if fits < needs.all:
            note = (
                f"{fits} of {needs.all} layers of {name} fit on {places}; all of them would take "
                f"{needs.taken(needs.all) / 2**30:.1f} GiB. The CPU computes the rest"
            )
        return Offload(layers=fits, devices=tuple(devices), note=note)
    layers = min(wanted, needs.all)
    if needs.taken(layers) > room:
        raise OutOfMemoryError(
            f"{layers} layers of {name} take {needs.taken(layers) / 2**30:.1f} GiB with their context, and "
            f"{places} has less: {fits} fit. Choose gpu_layers={fits}, a smaller n_ctx, or fewer slots"
        )
    return Offload(layers=layers, devices=tuple(devices))


def spare_sequences(devices: Sequence[Device], *, weights: int, sequence: float) -> int:
    """How many sequences of so many bytes fit into a quarter of what the devices have besides the weights.

    Of all that they have, not of what is free now: how many sequences a context has is part of what its state
    is of, and must not change from one start to the next.
    """
    room = (sum(device.total for device in devices) - weights) / _SPARED
    return max(0, int(room // sequence)) if sequence else 0


def check_gpu_layers(value: object) -> GpuLayers:
    """`value` as a number of layers, or "auto"."""
    if value == "auto":
        return "auto"
    if not is_whole(value) or value < 0:
        raise InvalidInputError(f'gpu_layers is "auto" or a whole number from 0, got {value!r}')
    return value


def check_split(split: Sequence[float] | None, devices: Sequence[Device]) -> tuple[float, ...] | None:
    """The shares of each device, or None for shares by free memory."""
    if split is None:
        return None
    shares = tuple(split)
    numbers = all(isinstance(each, (int, float)) and 0 <= each < float("inf") for each in shares)
    if not numbers or len(shares) != len(devices) or not sum(shares):
        names = ", ".join(device.name for device in devices) or "none"
        raise InvalidInputError(
            f"tensor_split is a share for each device ({names}), none below 0, got {split!r}"
        )
    return shares


def _has_output(headers: Sequence[Header]) -> bool:
    return any(tensor.name == "output.weight" for header in headers for tensor in header.tensors)
