"""The backends of a library that loads them at run time: one for the CPU, chosen by score, and any GPU's."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perdure.engine.llama.native.declarations import Functions
from perdure.errors import EngineLibraryError

log = logging.getLogger("perdure.llama")

_BACKEND = re.compile(r"(?:lib)?ggml-(?P<kind>[a-z0-9]+)(?:-(?P<variant>[A-Za-z0-9_.]+))?\.(?:so|dylib|dll)")
_NOT_BACKENDS = frozenset({"base"})
BUILT_IN = "built in"
"""The variant of a library whose CPU code was compiled into it."""
_ONLY = "default"
"""The variant of a CPU backend that comes in one."""


@dataclass(frozen=True, slots=True)
class ComputeBackend:
    """One backend's file: `cpu` in a variant, or `cuda`, `vulkan`, `metal`, …"""

    kind: str
    variant: str
    path: Path


def backends(folder: Path) -> list[ComputeBackend]:
    """The backends whose files lie in `folder`, in a fixed order."""
    backend_list = []
    for entry in sorted(folder.iterdir()):
        match = _BACKEND.fullmatch(entry.name)
        if match and match["kind"] not in _NOT_BACKENDS:
            backend_list.append(ComputeBackend(match["kind"], match["variant"] or _ONLY, entry))
    return backend_list


def variants(folder: Path) -> dict[str, int]:
    """The CPU variants in `folder` with their scores on this CPU, the best first; 0 cannot run here.

    Asking opens each file, so that it belongs into a process that may die.
    """
    scores = {each.variant: _score(each.path) for each in backends(folder) if each.kind == "cpu"}
    return dict(sorted(scores.items(), key=lambda item: (-item[1], item[0])))


def load_backends(
    lib: Functions, folder: Path, variant: str | None, *, gpu: bool = True
) -> tuple[str, list[str]]:
    """Load what `folder` has into `lib`; return the CPU variant in use, and why GPU backends are not.

    `variant` names one; else the best for this CPU is taken. Without `gpu`, only the CPU's is loaded.
    """
    if lib.ggml_backend_reg_count():
        if variant not in (None, BUILT_IN):
            raise EngineLibraryError(
                f"the CPU variant {variant} was asked for, but the library at {folder} has no variants: "
                "its CPU code is built in"
            )
        return BUILT_IN, []
    here = backends(folder)
    unusable = []
    # A GPU comes first: the library offers devices in the order of their backends.
    for backend in here:
        if gpu and backend.kind != "cpu":
            try:
                # What it needs is opened before it: ggml's loader looks in the system's places only.
                open_library(backend.path)
            except OSError as error:
                unusable.append(f"{backend.kind}: {error}")
                continue
            if not _load(lib, backend.path):
                unusable.append(f"{backend.kind}: it refused to start")
    if variant is None:
        variant = next((name for name, score in variants(folder).items() if score), None)
    chosen = next((each for each in here if each.kind == "cpu" and each.variant == variant), None)
    known = ", ".join(each.variant for each in here if each.kind == "cpu") or "none"
    if chosen is None:
        raise EngineLibraryError(f"{folder} has no CPU variant {variant or 'for this CPU'}; it has {known}")
    if not _load(lib, chosen.path):
        raise EngineLibraryError(f"the CPU variant {variant} cannot run on this CPU; {folder} has {known}")
    return chosen.variant, unusable


def _load(lib: Functions, path: Path) -> bool:
    return bool(lib.ggml_backend_load(os.fsencode(path)))


def _score(path: Path) -> int:
    try:
        handle = ctypes.CDLL(str(path))
        # A library with one variant gives no score.
        score = getattr(handle, "ggml_backend_score", None)
    except OSError as error:
        log.debug("%s cannot be opened: %s", path, error)
        return 0
    return int(score()) if score is not None else 1


# Opening a shared library whose needs lie in places that the system's loader does not search.
#
# A CUDA backend needs NVIDIA's runtime (`libcudart.so.13`, `libcublas.so.13`). A machine with a driver alone
# may have it in Python packages (`nvidia-cuda-runtime`, or PyTorch's), under PERDURE_HOME, or in a toolkit.
# A library that is loaded already satisfies others that need it by its name, so each is opened from where it
# is.

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
    from perdure.engine.llama.native.nvidia import runtime_folders

    for file in beside:
        # libggml-cuda.so is what libllama asks for as libggml-cuda.so.0.
        if name == file.name or name.startswith(f"{file.name}."):
            return file
    return next((folder / name for folder in runtime_folders() if (folder / name).is_file()), None)
