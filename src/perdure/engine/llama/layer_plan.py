"""Layer plans: which layers and experts of a model go to the devices, decided before anything is loaded.

plan_offload()  as many as were asked for, or as fit
plan_again()    fewer, where those did not fit after all
fit_context()   how large a context of a loaded model can be
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeAlias

from perdure import system
from perdure.engine.llama.native import library
from perdure.engine.llama.native.library import Device
from perdure.engine.llama.offload import CPU_ONLY, ContextRoom, Offload, choose_devices
from perdure.errors import EngineLibraryError, OutOfMemoryError
from perdure.models.placement import SLOT_CHOICES, ModelPlacement, Sizes
from perdure.models.ways_to_open import FitConstraints, Room, placements

GpuLayers: TypeAlias = "int | Literal['auto']"
CpuExperts: TypeAlias = "int | Literal['all', 'auto']"

_SPARED = 4
"""One part in so many of what the devices have is for further sequences."""
_LESS = 0.75
"""How many of its layers a model is given again at most, where they did not fit after all."""


def plan_offload(
    gpu_layers: GpuLayers,
    devices: Sequence[Device],
    sizes: Sizes,
    name: str,
    *,
    setup: ModelPlacement | None = None,
    cpu_experts: CpuExperts = "auto",
) -> Offload:
    """Which layers of model `name` go to `devices`: those that were asked for, or as many as fit."""
    setup = setup or ModelPlacement()
    # What the machine's own memory holds is not asked here.
    room = room_of(devices, 1 << 62)
    room = dataclasses.replace(room, device=max(1, room.device))
    constraints = FitConstraints(
        n_ctx=setup.n_ctx,
        slots=setup.slots,
        kv=setup.kv,
        gpu_layers=None if gpu_layers == "auto" else gpu_layers,
        cpu_experts=sizes.count_experts(cpu_experts),
        kv_offload=setup.kv_offload,
    )
    ways = list(placements(sizes, room, constraints))
    whole = room.device_bytes(sizes, ways[0]) / 2**30
    places = " and ".join(map(str, devices))
    chosen = next((each for each in ways if room.holds(sizes, each)), None)
    if chosen is None:
        moved = len(sizes.layers) if constraints.cpu_experts is None else ways[0].cpu_experts
        fits = room.most_layers(sizes, dataclasses.replace(ways[0], cpu_experts=moved)).gpu_layers
        raise OutOfMemoryError(
            f"{ways[0].gpu_layers} layers of {name} take {whole:.1f} GiB with their context, and "
            f"{places} has less: {fits} fit. Choose gpu_layers={fits}, a smaller n_ctx, or fewer slots"
        )
    note = None
    if chosen.gpu_layers < ways[0].gpu_layers:
        note = (
            f"{chosen.gpu_layers} of {sizes.all_layers} layers of {name} fit on {places}; all of them would "
            f"take {whole:.1f} GiB. The CPU computes the rest"
        )
    elif chosen.cpu_experts > ways[0].cpu_experts:
        note = (
            f"the experts of {chosen.cpu_experts} of {len(sizes.layers)} layers of {name} stay in the "
            f"machine's memory and are computed by the CPU: all would take {whole:.1f} GiB of {places}"
        )
    return Offload(
        layers=chosen.gpu_layers,
        cpu_experts=chosen.cpu_experts,
        devices=tuple(devices),
        note=note,
        flexible=gpu_layers == "auto" and cpu_experts == "auto",
    )


def plan_again(
    failed: Offload, devices: Sequence[Device], sizes: Sizes, name: str, *, setup: ModelPlacement
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
    if not layers:
        return dataclasses.replace(CPU_ONLY, note=note)
    return Offload(layers=layers, cpu_experts=failed.cpu_experts, devices=tuple(devices), note=note)


# What is free.


def room_of(devices: Sequence[Device], machine: int | None = None) -> Room:
    """What is free now, on the machine (unless that is given) and on devices."""
    if machine is None:
        machine = system.available_memory() or system.memory_to_share() // 2
    return Room(machine=machine, device=sum(device.free for device in devices), devices=max(1, len(devices)))


def room_now(devices: Sequence[str] | None = None) -> Room:
    """What is free at this moment, on the machine and on the devices that layers would go to."""
    try:
        return room_of(choose_devices(library.loaded().device_list, devices))
    except EngineLibraryError:
        # Nothing is installed yet: the CPU is what there is in any case.
        return room_of(())


def fit_context(
    room: ContextRoom, n_ctx: int | None, slots: int | None, setup: ModelPlacement
) -> tuple[int, int]:
    """Tokens of a request and requests at once, of which None are for us to choose.

    How many sequences a context has is part of what its state is of: they are chosen by what the machine
    has, not by what is free at the moment, so that state is found again at the next start.
    """
    setup = room.placed(setup)
    devices = room.devices()
    if slots is None:
        least = n_ctx or min(setup.n_ctx, room.sizes.trained or setup.n_ctx)
        whole = Room(
            machine=system.memory_to_share(),
            device=sum(device.total for device in devices),
            devices=max(1, len(devices)),
        )
        tried = (dataclasses.replace(setup, n_ctx=least, slots=count) for count in SLOT_CHOICES)
        slots = next((each.slots for each in tried if whole.holds(room.sizes, each)), SLOT_CHOICES[-1])
    if n_ctx is not None:
        return n_ctx, slots
    # The weights are there by now: on devices they were taken out of what is free, those of a file are
    # given up for others.
    free = room_of(devices)
    free = dataclasses.replace(free, device=free.device + room.sizes.device(setup).weights)
    setup = dataclasses.replace(setup, slots=slots)
    fitting = free.largest_context(room.sizes, setup, least=256)
    if not fitting:
        raise OutOfMemoryError(
            f"not even 256 tokens for {slots} requests fit beside the weights: choose fewer slots or a "
            "smaller model; `perdure fit` shows what is free"
        )
    return fitting, slots


def spare_sequences(devices: Sequence[Device], *, weights: int, sequence: float) -> int:
    """How many sequences of so many bytes fit into a quarter of what the devices have besides the weights.

    Of all that they have, not of what is free now: how many sequences a context has is part of what its state
    is of, and must not change from one start to the next.
    """
    room = (sum(device.total for device in devices) - weights) / _SPARED
    return max(0, int(room // sequence)) if sequence else 0
