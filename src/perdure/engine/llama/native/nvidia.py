"""NVIDIA's libraries on this machine, outside the loader's path: its runtime, and newer drivers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from perdure import system
from perdure.config import settings

_COMPAT = ("/usr/local/cuda/compat", "/usr/local/cuda-*/compat", "/opt/cuda/compat")
"""Where NVIDIA's packages put a newer driver library for older kernel modules ("forward compatibility")."""
_TOOLKITS = ("/usr/local/cuda/lib64", "/usr/local/cuda/targets/*/lib", "/usr/lib/wsl/lib", "/opt/cuda/lib64")
HIDING = ("CUDA_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES")
"""Variables that hide cards from a library."""


def runtime_folders() -> list[Path]:
    """Folders of NVIDIA's libraries outside the loader's path: ours, Python packages', toolkits'."""
    own = sorted((settings().home / "runtime").glob("cuda*/nvidia"))
    packages = (Path(entry) / "nvidia" for entry in sys.path if entry)
    here = (folder for each in (*own, *packages) if each.is_dir() for folder in sorted(each.glob("*/lib")))
    return [*here, *globbed(_TOOLKITS)]


def compat_drivers() -> list[Path]:
    """Driver libraries for forward compatibility that are on this machine, the newest first."""
    drivers = {file.resolve() for folder in globbed(_COMPAT) for file in folder.glob("libcuda.so.1")}
    return sorted(
        drivers, key=lambda file: [int(part) for part in re.findall(r"\d+", file.name)], reverse=True
    )


def globbed(patterns: Sequence[str]) -> Iterator[Path]:
    """What is at these absolute patterns, the last of each first."""
    if not system.POSIX:
        return
    for pattern in patterns:
        yield from sorted(Path("/").glob(pattern.lstrip("/")), reverse=True)
