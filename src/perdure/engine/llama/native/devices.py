"""Devices: what the loaded backends can compute on, and the memory that each has."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

_KINDS = ("cpu", "gpu", "igpu", "accel", "meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of the library, and its memory at the moment it was asked."""

    name: str
    description: str
    kind: str
    """`gpu`, `igpu` (shares the machine's memory), `cpu`, `accel`."""
    free: int
    total: int
    handle: Any = None

    @property
    def offloads(self) -> bool:
        """Whether layers can be put on it."""
        return self.kind in ("gpu", "igpu")

    @property
    def shown(self) -> str:
        """With what it is called by its maker, for lists."""
        maker = self.description if self.description != self.name else ""
        return " ".join(filter(None, (self.name, maker, f"({self._memory} GiB free)")))

    @property
    def _memory(self) -> str:
        return f"{self.free / 2**30:.1f} of {self.total / 2**30:.1f}"

    def __str__(self) -> str:
        return f"{self.name} ({self._memory} GiB free)"


def list_devices(lib: Any) -> list[Device]:
    """The devices of a library, those of its GPUs first."""
    found = []
    for index in range(lib.ggml_backend_dev_count()):
        handle = lib.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        lib.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        kind = lib.ggml_backend_dev_type(handle)
        found.append(
            Device(
                name=lib.ggml_backend_dev_name(handle).decode(),
                description=lib.ggml_backend_dev_description(handle).decode().strip(),
                kind=_KINDS[kind] if 0 <= kind < len(_KINDS) else "other",
                free=free.value,
                total=total.value,
                handle=handle,
            )
        )
    return sorted(found, key=lambda device: not device.offloads)
