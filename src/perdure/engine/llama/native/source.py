"""Where the llama.cpp library comes from: folders that may hold one, tried in a fixed order."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perdure import libraries
from perdure.config import settings
from perdure.errors import EngineLibraryError

WAYS = (
    "`perdure engine install` fetches one, `pip install 'perdure[compile]'` compiles llama-cpp-python, "
    "and PERDURE_LLAMA=DIR points at a build of your own"
)
"""How to get a library, for people who have none."""

_LIBRARY = re.compile(
    # libllama.so, libllama.so.0.5, libllama.v0.5.0.so, libllama.vulkan.v0.5.0.so, llama.dll;
    # xllamacpp.abi3.so is a module of Python with all of llama.cpp in it.
    r"(?:lib|x(?=llamacpp))?(?P<stem>[a-z-]+?)(?:cpp\.abi3)?(?:\.[a-z]+(?=\.v))?(?:\.v?[0-9.]+)?\.(?:so|dylib|dll)(?:\.[0-9]+)*"
)
_PLACES = ("", "lib", "bin", "build/bin", "lib64")
"""Where the shared libraries may lie in a folder that a user names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrarySource:
    """A folder of llama.cpp's shared libraries, and where it came from.

    `version` is what its origin calls it; what the library says of itself is known when it is loaded.
    """

    kind: str
    """`own` (PERDURE_LLAMA), `installed`, `llama-cpp-python`, or `fetched`."""
    folder: Path
    version: str

    def file(self, stem: str) -> Path | None:
        """The shared library of that name in this folder, such as `llama` or `ggml-base`."""
        return library_file(self.folder, stem)

    def __str__(self) -> str:
        return f"{self.name} at {self.folder}"

    @property
    def name(self) -> str:
        """The origin and what it calls this library, such as `fetched 0.5.0` or `own build`."""
        return self.version if self.kind == "own" else f"{self.kind} {self.version}"


def library_file(folder: Path, stem: str) -> Path | None:
    """The shared library `stem` in `folder`, whatever its version; None if there is none."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return None
    candidates = [name for name in names if (match := _LIBRARY.fullmatch(name)) and match["stem"] == stem]
    # Where a build has libllama.so, libllama.so.0 and libllama.so.0.5.0, they are the same.
    return folder / min(candidates, key=lambda name: (len(name), name)) if candidates else None


def library_folder(folder: Path) -> Path | None:
    """The folder at or under `folder` that holds libllama, or None."""
    for place in _PLACES:
        if library_file(folder / place, "llama"):
            return folder / place
    return None


def candidates() -> Iterator[LibrarySource]:
    """Every library that is here, the one to prefer first. A folder named by the user is the only one."""
    own = settings().llama
    if own is not None:
        yield _own(own)
        return
    for entry in libraries.installed():
        yield installed_source(entry, "installed")
    compiled = llama_cpp_python()
    if compiled is not None:
        yield compiled


def llama_cpp_python() -> LibrarySource | None:
    """The library inside llama-cpp-python, found without importing it."""
    try:
        spec = importlib.util.find_spec("llama_cpp")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    folder = library_folder(Path(spec.origin).parent)
    if folder is None:
        return None
    return LibrarySource(kind="llama-cpp-python", folder=folder, version=_distribution("llama-cpp-python"))


def installed_source(entry: libraries.Installed, kind: str) -> LibrarySource:
    return LibrarySource(kind=kind, folder=entry.folder, version=entry.name)


def _own(named: Path) -> LibrarySource:
    folder = library_folder(named)
    if folder is None:
        raise EngineLibraryError(
            f"PERDURE_LLAMA is {named}, where no libllama is: name the folder that holds libllama and "
            "libggml, such as build/bin of a llama.cpp build",
            tried=(str(named),),
        )
    return LibrarySource(kind="own", folder=folder, version="own build")


def _distribution(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
