"""What encodes images where it is not installed: two wheels, fetched once, after a question.

    {"xllamacpp-2026.10.11549-cp310-abi3-win_amd64.whl": ["1b76730a…", 9122846], …}     wheels.json
    PERDURE_HOME/runtime/images-2026.10.11549-cp313/xllamacpp/…, PIL/…                  where they lie

Nothing of a wheel is unpacked unless its SHA-256 is the one in that file. What pip has installed goes first.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from perdure import EngineLibraryError
from perdure.ext.fetching.wheel import unpack_wheels
from perdure.spi.base import read_text, settings, system
from perdure.spi.libraries import candidates
from perdure.spi.models import Progress

MODULES = {"xllamacpp": "xllamacpp", "pillow": "PIL"}
_PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
_SYSTEMS = {"Linux": "manylinux", "Darwin": "macosx", "Windows": "win"}
_CPUS = {"x86_64": ("x86_64", "amd64"), "aarch64": ("aarch64", "arm64")}


@dataclass(frozen=True, slots=True)
class Wheel:
    file: str
    sha256: str
    nbytes: int

    @property
    def project(self) -> str:
        return self.file.partition("-")[0]

    @property
    def fits(self) -> bool:
        """Whether it is for this Python on this system."""
        _, _, python, _, place = self.file.removesuffix(".whl").split("-")
        cpus = _CPUS.get(system.architecture(), ())
        return (
            python in (_PYTHON, "cp310")
            and place.startswith(_SYSTEMS.get(platform.system(), "-"))
            and any(place.endswith(cpu) for cpu in cpus)
        )


@cache
def wheels() -> tuple[Wheel, ...]:
    """Those for this machine."""
    known = json.loads(read_text(Path(__file__).with_name("wheels.json")))
    return tuple(each for each in (Wheel(file, *pin) for file, pin in known.items()) if each.fits)


def folder() -> Path:
    """Where they are unpacked."""
    [version] = {each.file.split("-")[1] for each in wheels() if each.project == "xllamacpp"} or {"none"}
    return settings().home / "runtime" / f"images-{version}-{_PYTHON}"


def packages() -> Path | None:
    """The folder with what was fetched; None where nothing was."""
    return place if (place := folder()).is_dir() else None


def module_folder(project: str) -> Path | None:
    """The folder of a module, installed or fetched."""
    name = MODULES[project]
    if (spec := importlib.util.find_spec(name)) is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    place = packages()
    return place / name if place is not None and (place / name).is_dir() else None


def pillow_version() -> str:
    """Of the Pillow that decodes images here."""
    if importlib.util.find_spec("PIL") is not None:
        return importlib.metadata.version("pillow")
    found = importlib.metadata.distributions(name="pillow", path=[str(folder())])
    return next(each.version for each in found)


def engine_folder() -> Path | None:
    """The folder of the engine's library, which may have libmtmd too."""
    return next((source.folder for source in candidates()), None)


def engine_library(engine: Path | None) -> Path | None:
    """libmtmd in the folder of the engine's library."""
    names = ("libmtmd.so", "libmtmd.dylib", "mtmd.dll") if engine is not None else ()
    return next((path for name in names if (path := engine / name).is_file()), None)  # type: ignore[operator]


def provide(
    agree: Callable[[str, int], bool], fetching: Callable[[str], AbstractContextManager[Progress]]
) -> None:
    """Fetch what encodes images, if it is not here, and a person agrees."""
    missing = [
        each
        for each in wheels()
        if module_folder(each.project) is None
        and not (each.project == "xllamacpp" and engine_library(engine_folder()) is not None)
    ]
    nbytes = sum(each.nbytes for each in missing)
    names = " and ".join(each.file.rsplit("-", 3)[0].replace("-", " ") for each in missing)
    if not missing or not agree(f"Images need {names}", nbytes):
        # What then needs it says what is missing.
        return
    pins = [(each.file, each.sha256) for each in missing]
    with fetching("what encodes images") as progress:
        unpack_wheels(folder(), pins, names, room=5 * nbytes, progress=progress)


def missing(what: str) -> EngineLibraryError:
    """The error where something is neither installed nor fetched."""
    return EngineLibraryError(
        f'images need {what}, which is not installed: pip install "perdure[images]", or show an image with '
        "`perdure run --image FILE` in a terminal, which fetches it after a question"
    )
