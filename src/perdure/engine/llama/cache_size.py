"""The size of a context: what its K/V cache takes beside the weights, and whether that fits."""

from __future__ import annotations

import dataclasses
import logging

from perdure import system
from perdure.engine.llama.native import library
from perdure.engine.llama.offload import Offload, spare_sequences
from perdure.errors import OutOfMemoryError
from perdure.models.fit import SLOT_CHOICES, Room, Setup, Sizes, largest_context

log = logging.getLogger("perdure.engine")

TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2}
"""The types of keys and values, by the library's numbers."""


class CacheSize:
    """What the K/V cache of one model takes, in the machine's memory and on its devices."""

    def __init__(self, sizes: Sizes, offload: Offload, *, kv_offload: bool) -> None:
        self._sizes = sizes
        self._offload = offload
        self._on_device = bool(kv_offload and offload.layers)
        self._placed = Setup(
            gpu_layers=offload.layers, cpu_experts=offload.cpu_experts, kv_offload=kv_offload
        )

    def bytes(self, cells: int, k_type: str, v_type: str) -> float:
        """What so many cells take in all layers; 0 where a memory has none."""
        setup = Setup(n_ctx=cells, k_type=k_type, v_type=v_type)
        return float(sum(self._sizes.layer_cache(setup)))

    def check(self, setup: Setup) -> None:
        """Refuse what the machine could never hold: the engine would touch it all and be killed. What it
        could hold, but not beside what runs now, is said."""
        setup = self._place(setup)
        cells = setup.n_ctx * setup.slots
        self._check_devices(self._sizes.device(setup).cache, cells)
        needed = self._sizes.machine(setup).cache
        physical, free = system.physical_memory(), system.available_memory()
        if physical is not None and needed > physical:
            raise OutOfMemoryError(
                f"{cells} cells need {needed / 2**30:.1f} GiB, this machine has {physical / 2**30:.1f}: "
                "choose a smaller n_ctx, fewer sequences, or a smaller k_type and v_type"
            )
        if free is not None and needed > free:
            log.warning(
                "the K/V cache of %d cells takes %.1f GiB, and %.1f are free: the system may swap or end a "
                'process. n_ctx="auto" takes what is there',
                cells,
                needed / 2**30,
                free / 2**30,
            )

    def fit_context(self, n_ctx: int | None, slots: int | None, setup: Setup) -> tuple[int, int]:
        """Tokens of a request and requests at once, of which None are for us to choose.

        How many sequences a context has is part of what its state is of: they are chosen by what the machine
        has, not by what is free at the moment, so that state is found again at the next start.
        """
        setup = self._place(setup)
        if slots is None:
            least = n_ctx or min(setup.n_ctx, self._sizes.trained or setup.n_ctx)
            whole = self._room(total=True)
            tried = (dataclasses.replace(setup, n_ctx=least, slots=count) for count in SLOT_CHOICES)
            slots = next((each.slots for each in tried if whole.holds(self._sizes, each)), SLOT_CHOICES[-1])
        if n_ctx is not None:
            return n_ctx, slots
        setup = dataclasses.replace(setup, slots=slots)
        fitting = largest_context(self._sizes, setup, self._room(), least=256)
        if not fitting:
            raise OutOfMemoryError(
                f"not even 256 tokens for {slots} requests fit beside the weights: choose fewer slots or a "
                "smaller model; `perdure fit` shows what is free"
            )
        return fitting, slots

    def spare_sequences(self, n_ctx: int, k_type: str, v_type: str) -> int:
        """How many more sequences of so many tokens the devices have room for; 0 without a cache there."""
        if not self._on_device:
            return 0
        one = self.bytes(n_ctx, k_type, v_type)
        return spare_sequences(self._offload.devices, weights=self._sizes.weights, sequence=one)

    def _place(self, setup: Setup) -> Setup:
        placed = self._placed
        return dataclasses.replace(
            setup,
            gpu_layers=placed.gpu_layers,
            cpu_experts=placed.cpu_experts,
            kv_offload=placed.kv_offload,
        )

    def _room(self, *, total: bool = False) -> Room:
        """What the machine and the devices have for this model, its weights included, which are there by
        now: on devices they were taken out of what is free, those of a file are given up for others."""
        names = {device.name for device in self._offload.devices}
        now = [device for device in library.loaded().device_list if device.name in names]
        if total:
            return Room(
                machine=system.memory_to_share(),
                device=sum(device.total for device in now),
                devices=max(1, len(now)),
            )
        loaded = self._sizes.device(self._placed).weights
        return Room(
            machine=system.available_memory() or system.memory_to_share() // 2,
            device=sum(device.free for device in now) + loaded,
            devices=max(1, len(now)),
        )

    def _check_devices(self, needed: float, cells: int) -> None:
        """Refuse a K/V cache that the devices have no room for now that the weights are there."""
        names = {device.name for device in self._offload.devices}
        now = [device for device in library.loaded().device_list if device.name in names]
        free = sum(device.free for device in now)
        if needed > free:
            raise OutOfMemoryError(
                f"{cells} cells need {needed / 2**30:.1f} GiB on {' and '.join(map(str, now))}: about "
                f"{int(cells * free / needed)} fit. Choose a smaller n_ctx, fewer slots, smaller k_type and "
                "v_type, fewer gpu_layers, or kv_offload=False"
            )
