"""Ways to open a model: which of its layers, experts and caches go where, the best way first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perdure.engine_config import F16, N_BATCH, N_CTX, SLOTS, EngineConfig, KvType
from perdure.models.placement import (
    CELLS,
    LEAST_CONTEXT,
    SLOT_CHOICES,
    SPARE,
    ModelPlacement,
    Sizes,
)

MARGIN = 256 << 20
"""Bytes of a device that its driver and the engine's own tables take."""
_CACHE_SHARE = 0.5
"""Of the machine's free memory, for a K/V cache whose size nobody chose: to go through more at every token
would take longer than anybody waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes that are free: in the machine's own memory, and on the devices that layers go to."""

    machine: int
    device: int = 0
    """Of all devices together."""
    devices: int = 1

    def device_bytes(self, sizes: Sizes, placement: ModelPlacement) -> int:
        """What the devices need in all: buffers of a step, and what the driver takes, on each of them."""
        need = sizes.device(placement)
        if not need.total:
            return 0
        return need.total + (self.devices - 1) * need.compute + self.devices * MARGIN

    def holds(self, sizes: Sizes, placement: ModelPlacement) -> bool:
        if self.device_bytes(sizes, placement) > self.device:
            return False
        return sizes.machine(placement).total <= self.machine

    def most_layers(self, sizes: Sizes, placement: ModelPlacement) -> ModelPlacement:
        """With the most layers that fit on the devices."""
        fewer = (dataclasses.replace(placement, gpu_layers=n) for n in range(sizes.all_layers, 0, -1))
        none = dataclasses.replace(placement, gpu_layers=0)
        return next((each for each in fewer if self.device_bytes(sizes, each) <= self.device), none)

    def fewest_cpu_experts(self, sizes: Sizes, placement: ModelPlacement) -> ModelPlacement | None:
        """With the experts of the fewest layers in the machine's memory so that the rest fits on the devices;
        None where that is not enough."""
        more = (dataclasses.replace(placement, cpu_experts=n) for n in range(len(sizes.experts) + 1))
        return next((each for each in more if self.device_bytes(sizes, each) <= self.device), None)

    def largest_context(self, sizes: Sizes, placement: ModelPlacement, *, least: int = 1) -> int:
        """The most tokens of a request, in steps of 256, up to those that the model was trained for; 0 where
        not even `least` fit."""
        most = max(least, sizes.trained or 8 * LEAST_CONTEXT)
        if not self.holds(sizes, dataclasses.replace(placement, n_ctx=least)):
            return 0
        share = dataclasses.replace(self, machine=int(self.machine * (1 - SPARE)))

        def fits(n_ctx: int) -> bool:
            tried = dataclasses.replace(placement, n_ctx=n_ctx)
            return sizes.machine(tried).cache <= _CACHE_SHARE * self.machine and share.holds(sizes, tried)

        if fits(most):
            return most
        low, high = 0, most // CELLS
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * CELLS) else (low, middle)
        return max(least, low * CELLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConstraints:
    """What a caller chose of a placement; None is left open."""

    n_ctx: int | None = None
    slots: int | None = None
    kv: KvType | None = None
    gpu_layers: int | None = None
    cpu_experts: int | None = None
    kv_offload: bool = True
    n_batch: int = N_BATCH
    flash: bool = True

    @classmethod
    def of(cls, config: EngineConfig, sizes: Sizes) -> FitConstraints:
        """What a model of these sizes is opened with."""
        layers, n_ctx, slots = config.gpu_layers, config.n_ctx, config.slots
        return cls(
            n_ctx=None if n_ctx == "auto" else n_ctx,
            slots=None if slots == "auto" else slots,
            kv=config.kv if config.has_kv_type else None,
            gpu_layers=None if layers == "auto" else layers,
            cpu_experts=sizes.count_experts(config.cpu_experts),
            kv_offload=config.kv_offload is not False,
            n_batch=config.n_batch or N_BATCH,
            flash=config.flash is not False,
        )


def placements(
    sizes: Sizes, room: Room, constraints: FitConstraints, kinds: Sequence[KvType] = (F16,)
) -> Iterator[ModelPlacement]:
    """Ways to open a model, the best one first, with the least context each; `kinds` are the K/V types to
    choose from.

    All layers go to the devices. Where not all fit, experts are left out first: a token needs few of them,
    and a CPU computes those well. Then layers are.
    """
    on_device = sizes.offloads and room.device and constraints.gpu_layers != 0
    layers, experts = constraints.gpu_layers, constraints.cpu_experts
    usual = ModelPlacement(
        n_ctx=constraints.n_ctx or min(LEAST_CONTEXT, sizes.trained or LEAST_CONTEXT),
        n_batch=constraints.n_batch,
        flash=constraints.flash,
        gpu_layers=min(sizes.all_layers if layers is None else layers, sizes.all_layers) if on_device else 0,
        cpu_experts=experts or 0,
        kv_offload=constraints.kv_offload,
    )
    ways = [
        dataclasses.replace(usual, kv=kv, slots=slots)
        for kv in (kinds if constraints.kv is None else (constraints.kv,))
        for slots in (SLOT_CHOICES if constraints.slots is None else (constraints.slots,))
    ]
    yield from ways
    if not on_device:
        return
    movable = experts is None and any(sizes.experts)
    if movable:
        yield from filter(None, (room.fewest_cpu_experts(sizes, each) for each in ways))
    if layers is None:
        for way in ways:
            moved = dataclasses.replace(way, cpu_experts=len(sizes.experts)) if movable else way
            fewer = room.most_layers(sizes, moved)
            yield fewer if fewer.gpu_layers else dataclasses.replace(way, gpu_layers=0)


def memory_needed(sizes: Sizes, room: Room, config: EngineConfig) -> tuple[int, int]:
    """Bytes of the machine's memory and of the devices' that a model takes, opened so in `room`: in the best
    way that fits, or else in the one that takes least."""
    usual = EngineConfig(n_ctx=N_CTX, slots=SLOTS, k_type=config.kv.k, v_type=config.kv.v)
    constraints = FitConstraints.of(usual.overlaid(config), sizes)
    chosen = None
    for chosen in placements(sizes, room, constraints):
        if room.holds(sizes, chosen):
            if constraints.n_ctx is None:
                n_ctx = room.largest_context(sizes, chosen, least=chosen.n_ctx)
                chosen = dataclasses.replace(chosen, n_ctx=n_ctx)
            break
    assert chosen is not None
    return sizes.machine(chosen).total, room.device_bytes(sizes, chosen)
