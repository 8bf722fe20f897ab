"""The shared library of this process: loaded once, checked, with its backends."""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from typing import Any

from perdure.engine.llama.native import guard, probe
from perdure.engine.llama.native.backends import load_backends
from perdure.engine.llama.native.declarations import Functions
from perdure.engine.llama.native.log_sink import LogSink
from perdure.engine.llama.native.source import WAYS, LibrarySource
from perdure.errors import EngineLibraryError

# ggml's threads spin between nodes. As shipped they spin so long that one other busy process costs
# five sixths of the speed; this count costs nothing on an idle machine. libgomp reads it once, when
# it is loaded. Users who set their own keep it.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

_STEMS = ("ggml-base", "ggml-cpu", "ggml", "llama")
"""The shared libraries of a build, each after those it needs. A build may lack some of them."""


@dataclass(frozen=True, slots=True)
class Device:
    """A processor that computes: a CPU or a GPU, with its memory in bytes."""

    name: str
    description: str
    is_cpu: bool
    memory_free: int
    memory_total: int

    @classmethod
    def of(cls, lib: Functions, handle: Any) -> Device:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        lib.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        texts = (lib.ggml_backend_dev_name(handle), lib.ggml_backend_dev_description(handle))
        name, description = (text.decode("utf-8", "replace") for text in texts)
        return cls(name, description, lib.ggml_backend_dev_type(handle) == 0, free.value, total.value)


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
    ) -> None:
        self.source = source
        self.extra_buffers = extra_buffers
        """Whether weights may be laid out anew for special units of the CPU, such as AMX."""
        self._handles = _open(source)
        self.functions = Functions(self._handles)
        guard.check(self.functions, source.folder)
        self.log_sink = LogSink(self.functions)
        self.variant = load_backends(self.functions, source.folder, variant, gpu=gpu)
        self.functions.llama_backend_init()
        self.version = self.functions.llama_version().decode()

    @property
    def name(self) -> str:
        """Which engine this is, for people."""
        return f"llama.cpp {self.version} ({self.source.kind} {self.source.version}, {self.variant})"

    # What state depends on.

    @functools.cached_property
    def identity(self) -> str:
        """The version and the content of its files, wherever they lie."""
        return f"llama.cpp {self.version} {probe.digest(self.source)}"

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

    @functools.cached_property
    def device_list(self) -> tuple[Device, ...]:
        lib = self.functions
        handles = [lib.ggml_backend_dev_get(index) for index in range(lib.ggml_backend_dev_count())]
        return tuple(Device.of(lib, handle) for handle in handles)


def _open(source: LibrarySource) -> list[ctypes.CDLL]:
    """The shared libraries of `source`, opened so that each finds those it needs already there."""
    handles = []
    try:
        for stem in _STEMS:
            path = source.file(stem)
            if path is not None:
                handles.append(ctypes.CDLL(str(path)))
    except OSError as error:
        raise EngineLibraryError(
            f"the library at {source.folder} cannot be loaded: {error}. {WAYS}", tried=(str(source),)
        ) from None
    # Most functions are in the last one.
    return handles[::-1]


@functools.cache
def loaded() -> Library:
    """The library of this process, loaded when it is first asked for."""
    chosen = probe.choose()
    verdict = chosen.verdict
    return Library(
        chosen.source, variant=verdict.variant, gpu=verdict.gpu, extra_buffers=verdict.extra_buffers
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
