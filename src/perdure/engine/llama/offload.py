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
from perdure.errors import InvalidInputError, OutOfMemoryError
from perdure.models.placement import ModelPlacement, Sizes

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRoom:
    """The room for contexts of a loaded model, in the machine's memory and on its devices."""

    sizes: Sizes
    offload: Offload
    kv_offload: bool

    def bytes(self, cells: int, kv: KvType) -> float:
        """What so many cells take in all layers; 0 where a memory has none."""
        return float(sum(self.sizes.layer_cache(ModelPlacement(n_ctx=cells, kv=kv))))

    def check(self, setup: ModelPlacement) -> None:
        """Refuse what the machine could never hold: the engine would touch it all and be killed. What it
        could hold, but not beside what runs now, is said."""
        setup = self.placed(setup)
        cells, needed = setup.n_ctx * setup.slots, self.sizes.device(setup).cache
        now = self.devices()
        if needed > (free := sum(device.free for device in now)):
            raise OutOfMemoryError(
                f"{cells} cells need {needed / 2**30:.1f} GiB on {' and '.join(map(str, now))}: about "
                f"{int(cells * free / needed)} fit. Choose a smaller n_ctx, fewer slots, a smaller "
                "kv_type, fewer gpu_layers, or kv_offload=False"
            )
        needed = self.sizes.machine(setup).cache
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

    def placed(self, setup: ModelPlacement) -> ModelPlacement:
        return self.offload.placed(setup, kv_offload=self.kv_offload)

    def devices(self) -> list[Device]:
        """The model's devices, with what is free on them now."""
        names = {device.name for device in self.offload.devices}
        return [device for device in library.loaded().device_list if device.name in names]
