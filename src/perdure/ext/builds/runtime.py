"""NVIDIA's runtime (libcudart, libcublas), which CUDA backends need and a driver does not bring.

It may be in Python packages beside us (PyTorch brings it), in a toolkit, or under PERDURE_HOME, where the
pinned wheels are unpacked. It is deleted with the last library that needs it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from perdure.ext.fetching.wheel import unpack_wheels
from perdure.spi.base import settings
from perdure.spi.libraries import runtime_folders
from perdure.spi.models import Progress


@dataclass(frozen=True, slots=True)
class CudaRuntime:
    """The wheels of one CUDA release, each with its SHA-256."""

    major: int
    size: int
    """Bytes to fetch."""
    pins: tuple[tuple[str, str], ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The libraries that a backend asks for."""
        return f"libcudart.so.{self.major}", f"libcublas.so.{self.major}"

    @property
    def folder(self) -> Path:
        return settings().home / "runtime" / f"cuda{self.major}"


RUNTIMES = {
    12: CudaRuntime(
        12,
        364_322_542,
        (
            (
                "nvidia_cuda_runtime_cu12-12.4.127-py3-none-manylinux2014_x86_64.whl",
                "64403288fa2136ee8e467cdc9c9427e0434110899d07c779f25b5c068934faa5",
            ),
            (
                "nvidia_cublas_cu12-12.4.5.8-py3-none-manylinux2014_x86_64.whl",
                "2fc8da60df463fdefa81e323eef2e36489e1c94335b5358bcb38360adf75ac9b",
            ),
        ),
    ),
    13: CudaRuntime(
        13,
        425_431_052,
        (
            (
                "nvidia_cuda_runtime-13.1.80-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
                "dac25b52e69050e5a7a84957e6df470a85b185f8f648a99a1ab1dfce027576cf",
            ),
            (
                "nvidia_cublas-13.1.0.3-py3-none-manylinux_2_27_x86_64.whl",
                "ee8722c1f0145ab246bccb9e452153b5e0515fd094c3678df50b2a0888b8b171",
            ),
        ),
    ),
}


def has_runtime(major: int) -> bool:
    """Whether the runtime of a CUDA release is in one of those folders."""
    folders = runtime_folders()
    return all(any((folder / name).is_file() for folder in folders) for name in RUNTIMES[major].files)


def install_runtime(major: int, progress: Progress | None = None) -> None:
    """Fetch the runtime of a CUDA release into PERDURE_HOME."""
    runtime = RUNTIMES[major]
    # Packed, these libraries are not half as large.
    what, room = f"NVIDIA's CUDA {major} runtime", 4 * runtime.size
    unpack_wheels(runtime.folder, runtime.pins, what, room=room, progress=progress)


def remove_runtime(major: int) -> None:
    """Delete what was fetched; nobody else's copy is touched."""
    shutil.rmtree(RUNTIMES[major].folder, ignore_errors=True)
