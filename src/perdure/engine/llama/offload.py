"""Offloading: which layers and experts of a model go to which devices, and whether a context fits there.

Offload         what goes where; `layer_plan.py` decides it where there are devices
ContextRoom     what is left for contexts beside the weights
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from perdure import system
from perdure.engine.llama.native import library
from perdure.engine.llama.native.library import Device
from perdure.engine_config import KvType
from perdure.errors import EngineLibraryError, InvalidInputError, OutOfMemoryError
from perdure.models.placement import SLOT_CHOICES, ModelPlacement, Room, Sizes

log = logging.getLogger("perdure.engine")

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

    def placed(self, placement: ModelPlacement, *, kv_offload: bool = True) -> ModelPlacement:
        """A context of the model, with layers and experts where they are."""
        return dataclasses.replace(
            placement, gpu_layers=self.layers, cpu_experts=self.cpu_experts, kv_offload=kv_offload
        )


_SPARED = 4
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


def spare_sequences(devices: Sequence[Device], *, weights: int, sequence: float) -> int:
    """How many sequences of so many bytes fit into a quarter of what the devices have besides the weights.

    Of all that they have, not of what is free now: how many sequences a context has is part of what its state
    is of, and must not change from one start to the next.
    """
    room = (sum(device.total for device in devices) - weights) / _SPARED
    return max(0, int(room // sequence)) if sequence else 0


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


class ContextRoom:
    """The room for contexts of a loaded model, in the machine's memory and on its devices."""

    def __init__(self, sizes: Sizes, offload: Offload, *, kv_offload: bool) -> None:
        self._sizes = sizes
        self._offload = offload
        self._kv_offload = kv_offload

    def bytes(self, cells: int, kv: KvType) -> float:
        """What so many cells take in all layers; 0 where a memory has none."""
        return float(sum(self._sizes.layer_cache(ModelPlacement(n_ctx=cells, kv=kv))))

    def check(self, setup: ModelPlacement) -> None:
        """Refuse what the machine could never hold: the engine would touch it all and be killed. What it
        could hold, but not beside what runs now, is said."""
        setup = self._placed(setup)
        cells, needed = setup.n_ctx * setup.slots, self._sizes.device(setup).cache
        now = self._devices()
        if needed > (free := sum(device.free for device in now)):
            raise OutOfMemoryError(
                f"{cells} cells need {needed / 2**30:.1f} GiB on {' and '.join(map(str, now))}: about "
                f"{int(cells * free / needed)} fit. Choose a smaller n_ctx, fewer slots, a smaller "
                "kv_type, fewer gpu_layers, or kv_offload=False"
            )
        needed = self._sizes.machine(setup).cache
        physical, here = system.physical_memory(), system.available_memory()
        if physical is not None and needed > physical:
            raise OutOfMemoryError(
                f"{cells} cells need {needed / 2**30:.1f} GiB, this machine has {physical / 2**30:.1f}: "
                "choose a smaller n_ctx, fewer sequences, or a smaller kv_type"
            )
        if here is not None and needed > here:
            log.warning(
                "the K/V cache of %d cells takes %.1f GiB, and %.1f are free: the system may swap or end a "
                'process. n_ctx="auto" takes what is there',
                cells,
                needed / 2**30,
                here / 2**30,
            )

    def fit_context(self, n_ctx: int | None, slots: int | None, setup: ModelPlacement) -> tuple[int, int]:
        """Tokens of a request and requests at once, of which None are for us to choose.

        How many sequences a context has is part of what its state is of: they are chosen by what the machine
        has, not by what is free at the moment, so that state is found again at the next start.
        """
        setup = self._placed(setup)
        devices = self._devices()
        if slots is None:
            least = n_ctx or min(setup.n_ctx, self._sizes.trained or setup.n_ctx)
            whole = Room(
                machine=system.memory_to_share(),
                device=sum(device.total for device in devices),
                devices=max(1, len(devices)),
            )
            tried = (dataclasses.replace(setup, n_ctx=least, slots=count) for count in SLOT_CHOICES)
            slots = next((each.slots for each in tried if whole.holds(self._sizes, each)), SLOT_CHOICES[-1])
        if n_ctx is not None:
            return n_ctx, slots
        # The weights are there by now: on devices they were taken out of what is free, those of a file are
        # given up for others.
        room = room_of(devices)
        room = dataclasses.replace(room, device=room.device + self._sizes.device(setup).weights)
        setup = dataclasses.replace(setup, slots=slots)
        fitting = room.largest_context(self._sizes, setup, least=256)
        if not fitting:
            raise OutOfMemoryError(
                f"not even 256 tokens for {slots} requests fit beside the weights: choose fewer slots or a "
                "smaller model; `perdure fit` shows what is free"
            )
        return fitting, slots

    def spare_sequences(self, n_ctx: int, kv: KvType) -> int:
        """How many more sequences of so many tokens the devices have room for; 0 without a cache there."""
        if not self._kv_offload or not self._offload.layers:
            return 0
        one = self.bytes(n_ctx, kv)
        return spare_sequences(self._offload.devices, weights=self._sizes.weights, sequence=one)

    def _placed(self, setup: ModelPlacement) -> ModelPlacement:
        return self._offload.placed(setup, kv_offload=self._kv_offload)

    def _devices(self) -> list[Device]:
        """The model's devices, with what is free on them now."""
        names = {device.name for device in self._offload.devices}
        return [device for device in library.loaded().device_list if device.name in names]
