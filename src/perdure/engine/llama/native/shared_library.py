"""Opening a shared library whose needs lie in places that the system's loader does not search.

A CUDA backend needs NVIDIA's runtime (`libcudart.so.13`, `libcublas.so.13`). A machine with a driver alone
may have it in Python packages (`nvidia-cuda-runtime`, or PyTorch's), under PERDURE_HOME, or in a toolkit. A
library that is loaded already satisfies others that need it by its name, so each is opened from where it is.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path

from perdure.libraries.runtime import runtime_folders

_MISSING = re.compile(r"(?P<name>[\w.+-]+\.so[.\d]*): cannot open shared object file")

_opened: list[ctypes.CDLL] = []
"""Kept for good: what was opened for another library must stay."""


def open_library(path: Path, beside: Sequence[Path] = ()) -> ctypes.CDLL:
    """The shared library at `path`; what it needs is looked for `beside` it and in the known places.

    OSError names the first library that is nowhere.
    """
    tried: set[str] = set()
    while True:
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            missing = _MISSING.search(str(error))
            if missing is None or missing["name"] in tried or missing["name"] == path.name:
                raise
            tried.add(missing["name"])
            place = _find(missing["name"], beside)
            if place is None:
                raise
            _opened.append(open_library(place, beside))


def use_driver(path: Path) -> None:
    """Have the driver library at `path` used instead of the system's."""
    _opened.append(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL))


def _find(name: str, beside: Sequence[Path]) -> Path | None:
    for file in beside:
        # libggml-cuda.so is what libllama asks for as libggml-cuda.so.0.
        if name == file.name or name.startswith(f"{file.name}."):
            return file
    return next((folder / name for folder in runtime_folders() if (folder / name).is_file()), None)
