"""Offloading: which layers and experts of a model go to which devices, decided before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from perdure.checks import is_whole
from perdure.engine.llama.native.library import Device
from perdure.errors import InvalidInputError, OutOfMemoryError
from perdure.models.fit import Room, Setup, Sizes

GpuLayers: TypeAlias = "int | Literal['auto']"
CpuExperts: TypeAlias = "int | Literal['all', 'auto']"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What goes to the devices, and what there is to say about that."""

    layers: int
    cpu_experts: int = 0
    """The experts of so many layers, the first ones, stay in the machine's memory."""
    devices: tuple[Device, ...] = ()
    note: str | None = None
    flexible: bool = False
    """Whether fewer will do: nobody asked for so many, and it is the first try."""

    def describe(self, split: tuple[float, ...] | None, kv_offload: bool) -> str:
        """What computes besides the CPU, as far as it changes what state bytes mean."""
        experts = f", experts of {self.cpu_experts} layers here" if self.cpu_experts else ""
        if not self.layers:
            return f"0 layers on a GPU{experts}"
        names = "+".join(f"{device.name} {device.description}" for device in self.devices)
        shares = "" if split is None else f", split {split}"
        cache = "there" if kv_offload else "here"
        return f"{self.layers} layers on {names}{shares}, cache {cache}{experts}"


_SPARED = 4
_LESS = 0.75
"""How many of its layers a model is given again at most, where they did not fit after all."""
CPU_ONLY = Offload(layers=0)


def choose_devices(devices: Sequence[Device], names: Sequence[str] | None) -> tuple[Device, ...]:
    """The devices of these names; with none named, every GPU, or where there is none, what shares memory."""
    able = [device for device in devices if device.offloads]
    if names is None:
        return tuple([each for each in able if each.kind == "gpu"] or able)
    by_name = {device.name.lower(): device for device in able}
    unknown = [name for name in names if name.lower() not in by_name]
    if unknown:
        here = ", ".join(device.name for device in able) or "none"
        raise InvalidInputError(f"there is no device {', '.join(unknown)}; this library has {here}")
    return tuple(by_name[name.lower()] for name in names)


def plan_offload(
    gpu_layers: GpuLayers,
    devices: Sequence[Device],
    sizes: Sizes,
    name: str,
    *,
    setup: Setup | None = None,
    cpu_experts: CpuExperts = "auto",
) -> Offload:
    """Which layers of model `name` go to `devices`: those that were asked for, or as many as fit.

    Where not all fit, experts are left out first: a token needs few of them, and a CPU computes those well.
    """
    setup = setup or Setup()
    # What the machine's own memory holds is not asked here.
    room = Room(machine=1 << 62, device=sum(device.free for device in devices), devices=len(devices))
    places = " and ".join(map(str, devices))
    layers = sizes.all_layers if gpu_layers == "auto" else min(gpu_layers, sizes.all_layers)
    setup = dataclasses.replace(setup, gpu_layers=layers, cpu_experts=count_experts(cpu_experts, sizes))
    whole = room.device_bytes(sizes, setup)
    plan = Offload(
        layers=layers,
        cpu_experts=setup.cpu_experts,
        devices=tuple(devices),
        flexible=gpu_layers == "auto" and cpu_experts == "auto",
    )
    if whole <= room.device:
        return plan
    if cpu_experts == "auto" and any(sizes.experts):
        fewest = room.fewest_cpu_experts(sizes, setup)
        if fewest is not None:
            note = (
                f"the experts of {fewest} of {len(sizes.layers)} layers of {name} stay in the machine's "
                f"memory and are computed by the CPU: all would take {whole / 2**30:.1f} GiB of {places}"
            )
            return dataclasses.replace(plan, cpu_experts=fewest, note=note)
        setup = dataclasses.replace(setup, cpu_experts=len(sizes.layers))
    fits = room.most_layers(sizes, setup)
    if gpu_layers == "auto":
        note = (
            f"{fits} of {sizes.all_layers} layers of {name} fit on {places}; all of them would take "
            f"{whole / 2**30:.1f} GiB. The CPU computes the rest"
        )
        experts = setup.cpu_experts if fits else 0
        return dataclasses.replace(plan, layers=fits, cpu_experts=experts, note=note)
    raise OutOfMemoryError(
        f"{layers} layers of {name} take {whole / 2**30:.1f} GiB with their context, and "
        f"{places} has less: {fits} fit. Choose gpu_layers={fits}, a smaller n_ctx, or fewer slots"
    )


def count_experts(cpu_experts: CpuExperts, sizes: Sizes) -> int:
    """In how many layers experts stay in the machine's memory, unless the rest decides."""
    if cpu_experts == "auto" or not any(sizes.experts):
        return 0
    return len(sizes.layers) if cpu_experts == "all" else min(cpu_experts, len(sizes.layers))


def plan_again(
    failed: Offload, devices: Sequence[Device], sizes: Sizes, name: str, *, setup: Setup
) -> Offload:
    """Less than `failed` had on the devices, which did not fit after all: `devices` say what is free now.

    Experts go first, as in `plan_offload`; then layers do.
    """
    places = " and ".join(map(str, devices))
    reason = f"{name} did not fit on {places}, whose memory other programs use"
    if any(sizes.experts) and failed.cpu_experts < len(sizes.layers):
        note = f"{reason}: all of its experts stay in the machine's memory and are computed by the CPU"
        return dataclasses.replace(failed, cpu_experts=len(sizes.layers), note=note, flexible=False)
    fits = plan_offload("auto", devices, sizes, name, setup=setup).layers
    layers = min(fits, int(failed.layers * _LESS))
    note = f"{reason}: {layers} of {sizes.all_layers} layers are there instead of {failed.layers}"
    return Offload(
        layers=layers,
        cpu_experts=failed.cpu_experts if layers else 0,
        devices=tuple(devices) if layers else (),
        note=note,
    )


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


def check_cpu_experts(value: object) -> CpuExperts:
    """`value` as a number of layers, "all" or "auto"."""
    if value == "auto" or value == "all":
        return value
    if not is_whole(value) or value < 0:
        raise InvalidInputError(f'cpu_experts is "auto", "all" or a whole number from 0, got {value!r}')
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
