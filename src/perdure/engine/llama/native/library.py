"""The shared library of this process: loaded once, checked, with its backends."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.engine.llama.native import guard
from perdure.engine.llama.native.backends import backends, load_backends, open_library, use_driver
from perdure.engine.llama.native.choice import choose
from perdure.engine.llama.native.declarations import Functions
from perdure.engine.llama.native.log_sink import LogSink
from perdure.engine.llama.native.probe_results import digest
from perdure.engine.llama.native.source import WAYS, LibrarySource
from perdure.errors import EngineLibraryError

# ggml's threads spin between nodes. As shipped they spin so long that one other busy process costs
# five sixths of the speed; this count costs nothing on an idle machine. libgomp reads it once, when
# it is loaded. Users who set their own keep it.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

_STEMS = ("ggml-base", "ggml-cpu", "ggml", "llama")
"""The shared libraries of a build, each after those it needs. A build may lack some of them."""


class Library:
    """One loaded llama.cpp: its functions, where they came from, and how it is used here.

    Always holds: it was checked against the declarations, its backends are loaded, and its lines go to
    `logging`.
    """

    def __init__(
        self,
        source: LibrarySource,
        *,
        variant: str | None = None,
        gpu: bool = True,
        extra_buffers: bool = True,
        driver: str = "",
        gpu_problem: str = "",
        translated: bool = False,
    ) -> None:
        self.source = source
        self.gpu = gpu
        """Whether layers may be put on its GPUs: a backend that died in the probe is not used."""
        self.extra_buffers = extra_buffers
        """Whether weights may be laid out anew for special units of the CPU, such as AMX."""
        self.gpu_problem = gpu_problem
        """Why its GPU backends are not used, as the probe found it."""
        self.translated = translated
        """Whether the driver translates its code for the card, kernel by kernel."""
        if driver:
            use_driver(Path(driver))
        self._handles = open_files(source)
        self.functions = Functions(self._handles)
        guard.check(self.functions, source.folder)
        self.log_sink = LogSink(self.functions)
        self.variant, self.unusable = load_backends(self.functions, source.folder, variant, gpu=gpu)
        self.functions.llama_backend_init()
        self.version = self.functions.version

    @property
    def name(self) -> str:
        """Which engine this is, for people."""
        return f"llama.cpp {self.version} ({self.source.name}, {self.variant})"

    # What state depends on.

    @functools.cached_property
    def identity(self) -> str:
        """The version and the content of its files, wherever they lie."""
        return f"llama.cpp {self.version} {digest(self.source)}"

    @functools.cached_property
    def kernels(self) -> str:
        """The CPU variant, what it was compiled for, and whether weights are laid out for special units."""
        features = self.functions.llama_print_system_info().decode("utf-8", "replace").strip()
        return f"{self.variant} [{features}] extra buffers {'on' if self.extra_buffers else 'off'}"

    @functools.cached_property
    def devices(self) -> str:
        """The backends, and their devices by name and description."""
        lib = self.functions
        count = lib.ggml_backend_reg_count()
        backends = [
            lib.ggml_backend_reg_name(lib.ggml_backend_reg_get(index)).decode() for index in range(count)
        ]
        devices = [f"{device.name} ({device.description})" for device in self.device_list]
        return f"{', '.join(backends)}: {', '.join(devices)}"

    @property
    def device_list(self) -> tuple[Device, ...]:
        """Its devices, with their memory at this moment; those that layers can be put on come first."""
        return tuple(each for each in list_devices(self.functions) if self.gpu or not each.offloads)


def open_files(source: LibrarySource) -> list[ctypes.CDLL]:
    """The shared libraries of `source`, opened so that each finds those it needs already there."""
    handles = []
    if any(backend.kind != "cpu" for backend in backends(source.folder)):
        _share_cpp_runtime()
    try:
        for stem in _STEMS:
            path = source.file(stem)
            if path is not None:
                handles.append(load_file(path))
    except OSError as error:
        raise EngineLibraryError(
            f"the library at {source.folder} cannot be loaded: {error}. {WAYS}", tried=(str(source),)
        ) from None
    # Most functions are in the last one.
    return handles[::-1]


def load_file(path: Path) -> ctypes.CDLL:
    """One shared library.

    A build that was moved elsewhere no longer finds its GPU backends by itself: those it asks for are loaded
    before it, as its other parts are.
    """
    return open_library(path, [backend.path for backend in backends(path.parent) if backend.path != path])


def _share_cpp_runtime() -> None:
    """Have every library loaded from now on find the system's C++ runtime first.

    A GPU backend may bring parts of another C++ runtime and export them to the other libraries. libllama
    would then call into those, with objects of the system's runtime, and the process would die in
    `std::regex`.
    """
    # Where there is none of this name, no library was linked to it.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)


@functools.cache
def loaded() -> Library:
    """The library of this process, loaded when it is first asked for."""
    chosen = choose()
    way = chosen.result.attempts[-1]
    problems = (each.gpu_problem for each in (chosen.result, *chosen.passed))
    return Library(
        chosen.source,
        variant=way.variant,
        gpu=way.gpu,
        extra_buffers=way.extra_buffers,
        driver=way.driver,
        gpu_problem="" if way.devices else next(filter(None, problems), ""),
        translated=chosen.result.translated and way.gpu,
    )


def load() -> Any:
    """The functions of the library of this process."""
    return loaded().functions


def log_sink() -> LogSink:
    """Where the library's lines go."""
    return loaded().log_sink


def build() -> str:
    """Which engine this is, for people."""
    return loaded().name


# Devices: what the loaded backends can compute on, and the memory that each has.

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
    devices = []
    for index in range(lib.ggml_backend_dev_count()):
        handle = lib.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        lib.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        kind = lib.ggml_backend_dev_type(handle)
        devices.append(
            Device(
                name=lib.ggml_backend_dev_name(handle).decode(),
                description=lib.ggml_backend_dev_description(handle).decode().strip(),
                kind=_KINDS[kind] if 0 <= kind < len(_KINDS) else "other",
                free=free.value,
                total=total.value,
                handle=handle,
            )
        )
    return sorted(devices, key=lambda device: not device.offloads)
