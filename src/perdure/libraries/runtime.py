"""NVIDIA's runtime (libcudart, libcublas), which CUDA backends need and a driver does not bring.

It may be in Python packages beside us (PyTorch brings it), in a toolkit, or under PERDURE_HOME, where pip
puts the pinned packages with their digests. It is deleted with the last library that needs it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perdure import system
from perdure.config import settings
from perdure.errors import LibraryFetchError

_COMPAT = ("/usr/local/cuda/compat", "/usr/local/cuda-*/compat", "/opt/cuda/compat")
"""Where NVIDIA's packages put a newer driver library for older kernel modules ("forward compatibility")."""
_TOOLKITS = ("/usr/local/cuda/lib64", "/usr/local/cuda/targets/*/lib", "/usr/lib/wsl/lib", "/opt/cuda/lib64")


@dataclass(frozen=True, slots=True)
class Runtime:
    """The packages of one CUDA release on PyPI, each with its version and SHA-256."""

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
    12: Runtime(
        12,
        364_322_542,
        (
            (
                "nvidia-cuda-runtime-cu12==12.4.127",
                "64403288fa2136ee8e467cdc9c9427e0434110899d07c779f25b5c068934faa5",
            ),
            (
                "nvidia-cublas-cu12==12.4.5.8",
                "2fc8da60df463fdefa81e323eef2e36489e1c94335b5358bcb38360adf75ac9b",
            ),
        ),
    ),
    13: Runtime(
        13,
        425_431_052,
        (
            (
                "nvidia-cuda-runtime==13.1.80",
                "dac25b52e69050e5a7a84957e6df470a85b185f8f648a99a1ab1dfce027576cf",
            ),
            ("nvidia-cublas==13.1.0.3", "ee8722c1f0145ab246bccb9e452153b5e0515fd094c3678df50b2a0888b8b171"),
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


def install_runtime(major: int) -> None:
    """Have pip fetch the runtime of a CUDA release into PERDURE_HOME."""
    runtime = RUNTIMES[major]
    new = runtime.folder.with_name(f".new-{runtime.folder.name}-{os.getpid()}")
    new.mkdir(parents=True, exist_ok=True)
    try:
        requirements = new / "requirements.txt"
        requirements.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in runtime.pins))
        command = system.isolated_python(
            *("-m", "pip", "install", "--target", str(new), "--no-deps", "--no-input", "--no-compile"),
            *(
                "--only-binary",
                ":all:",
                "--disable-pip-version-check",
                "--require-hashes",
                "-r",
                str(requirements),
            ),
        )
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise LibraryFetchError(
                f"pip could not fetch NVIDIA's CUDA {major} runtime: {lines[-1] if lines else 'no word'}. "
                f"Check `pip config list`, or install it yourself: pip install "
                f"{' '.join(name.partition('=')[0] for name, _ in runtime.pins)}"
            )
        shutil.rmtree(runtime.folder, ignore_errors=True)
        os.replace(new, runtime.folder)
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
