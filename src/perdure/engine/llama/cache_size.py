"""The size of a K/V cache: what its cells take, and whether that fits."""

from __future__ import annotations

from perdure import system
from perdure.engine.llama.native import library
from perdure.engine.llama.offload import Offload, spare_sequences
from perdure.engine.llama.weights import Weights
from perdure.errors import OutOfMemoryError
from perdure.memory import MemorySpec

TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2}
"""The types of keys and values, by the library's numbers."""
_BITS = dict(zip(TYPES, (32.0, 16.0, 16.0, 8.5, 6.0, 5.5, 5.0, 4.5), strict=True))


class CacheSize:
    """What the K/V cache of one model takes, in the machine's memory and on its devices."""

    def __init__(self, weights: Weights, memory: MemorySpec, offload: Offload, *, kv_offload: bool) -> None:
        self._lib = library.load()
        self._handle = weights.handle
        self._memory = memory
        self._offload = offload
        self._on_device = bool(kv_offload and offload.layers)

    def bytes(self, cells: int, k_type: str, v_type: str) -> float:
        """What so many cells take in all layers; 0 where a memory has none."""
        if not self._memory.has_rows:
            return 0.0
        lib, handle = self._lib, self._handle
        heads = max(1, lib.llama_model_n_head(handle))
        width = lib.llama_model_n_embd(handle) / heads * max(1, lib.llama_model_n_head_kv(handle))
        return float(cells * self._layers * width * (_BITS[k_type] + _BITS[v_type]) / 8)

    def check(self, cells: int, k_type: str, v_type: str) -> None:
        """Refuse what the machine could never hold: the engine would touch it all and be killed."""
        needed = self.bytes(cells, k_type, v_type)
        if self._on_device:
            away = needed * min(1.0, self._offload.layers / self._layers)
            needed -= away
            self._check_devices(away, cells)
        physical = system.physical_memory()
        if physical is not None and needed > physical:
            raise OutOfMemoryError(
                f"{cells} cells need {needed / 2**30:.1f} GiB, this machine has {physical / 2**30:.1f}: "
                "choose a smaller n_ctx, fewer sequences, or a smaller k_type and v_type"
            )

    def spare_sequences(self, n_ctx: int, k_type: str, v_type: str) -> int:
        """How many more sequences of so many tokens the devices have room for; 0 without a cache there."""
        if not self._on_device:
            return 0
        weights = int(self._lib.llama_model_size(self._handle))
        one = self.bytes(n_ctx, k_type, v_type)
        return spare_sequences(self._offload.devices, weights=weights, sequence=one)

    @property
    def _layers(self) -> int:
        return max(1, int(self._lib.llama_model_n_layer(self._handle)))

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
