"""NVIDIA's runtime (libcudart, libcublas), which CUDA backends need and a driver does not bring.

It may be in Python packages beside us (PyTorch brings it), in a toolkit, or under PERDURE_HOME, where the
pinned wheels are unpacked. It is deleted with the last library that needs it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perdure import system
from perdure.config import settings
from perdure.errors import FetchError, LibraryFetchError, TooLargeError
from perdure.models.fetching.download import fetch_lock
from perdure.models.fetching.package_index import fetched_wheel
from perdure.models.fetching.wheel import open_zip
from perdure.models.registry import Progress

_COMPAT = ("/usr/local/cuda/compat", "/usr/local/cuda-*/compat", "/opt/cuda/compat")
"""Where NVIDIA's packages put a newer driver library for older kernel modules ("forward compatibility")."""
_TOOLKITS = ("/usr/local/cuda/lib64", "/usr/local/cuda/targets/*/lib", "/usr/lib/wsl/lib", "/opt/cuda/lib64")


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


def runtime_folders() -> list[Path]:
    """Folders of NVIDIA's libraries outside the loader's path: ours, Python packages', toolkits'."""
    own = [runtime.folder / "nvidia" for runtime in RUNTIMES.values()]
    packages = (Path(entry) / "nvidia" for entry in sys.path if entry)
    here = (folder for each in (*own, *packages) if each.is_dir() for folder in sorted(each.glob("*/lib")))
    return [*here, *globbed(_TOOLKITS)]


def compat_drivers() -> list[Path]:
    """Driver libraries for forward compatibility that are on this machine, the newest first."""
    drivers = {file.resolve() for folder in globbed(_COMPAT) for file in folder.glob("libcuda.so.1")}
    return sorted(
        drivers, key=lambda file: [int(part) for part in re.findall(r"\d+", file.name)], reverse=True
    )


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


def unpack_wheels(
    folder: Path,
    pins: Sequence[tuple[str, str]],
    what: str,
    *,
    room: int,
    progress: Progress | None = None,
) -> None:
    """Fetch wheels, each with its SHA-256, and put all that is in them into one folder. `room` is what they
    need on the disk."""
    new = folder.with_name(f".new-{folder.name}-{os.getpid()}")
    parts = folder.with_name(".parts")
    try:
        with fetch_lock(folder.parent, folder.name):
            for file, sha256 in pins:
                with (
                    fetched_wheel(file, parts, progress, room=room, sha256=sha256) as wheel,
                    open_zip(wheel, room) as archive,
                ):
                    archive.extractall(new)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(new, folder)
    except (FetchError, OSError, TooLargeError, zipfile.BadZipFile) as error:
        raise LibraryFetchError(
            f"{what} could not be fetched: {error}. Or install it yourself: "
            f"pip install {' '.join(file.partition('-')[0].replace('_', '-') for file, _ in pins)}"
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def remove_runtime(major: int) -> None:
    """Delete what was fetched; nobody else's copy is touched."""
    shutil.rmtree(RUNTIMES[major].folder, ignore_errors=True)


def globbed(patterns: Sequence[str]) -> Iterator[Path]:
    """What is at these absolute patterns, the last of each first."""
    if not system.POSIX:
        return
    for pattern in patterns:
        yield from sorted(Path("/").glob(pattern.lstrip("/")), reverse=True)
