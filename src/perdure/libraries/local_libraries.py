"""The llama.cpp libraries under PERDURE_HOME, a folder each, whole or absent. `installation.py` fills it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from perdure.atomic import read_text
from perdure.config import settings
from perdure.errors import LibraryFetchError

MANIFEST = "perdure.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """One library under PERDURE_HOME. Its folder has all of its files, as they were when it was installed."""

    name: str
    backend: str
    origin: str
    """The package, or the folder that it was copied from."""
    version: str
    """The release of llama.cpp, where the origin says it."""
    licence: str
    installed: float
    """When, in seconds since 1970."""
    files: dict[str, str]
    """The SHA-256 of each by its name."""
    folder: Path

    @property
    def nbytes(self) -> int:
        there = (self.folder / name for name in self.files)
        return sum(file.stat().st_size for file in there if file.is_file())


def installed() -> list[Installed]:
    """The libraries that are installed, the last one first: that is the one to use."""
    try:
        folders = [entry for entry in settings().engines.iterdir() if entry.is_dir()]
    except OSError:
        return []
    entries = [entry for folder in folders if (entry := read_entry(folder)) is not None]
    return sorted(entries, key=lambda each: (-each.installed, each.name))


def find(name: str) -> Installed:
    """An installed library by its name, or by its backend where only one has it."""
    here = installed()
    matches = [each for each in here if name in (each.name, each.backend)]
    if len(matches) != 1:
        names = ", ".join(each.name for each in here) or "none"
        several = "is not one library" if matches else "is not installed"
        raise LibraryFetchError(f"{name} {several} under {settings().engines}; there is {names}")
    return matches[0]


def damaged(entry: Installed) -> list[str]:
    """The files that are not as they were installed."""
    return [name for name, digest in entry.files.items() if _sha256(entry.folder / name) != digest]


def read_entry(folder: Path) -> Installed | None:
    """What a folder says that it holds; None where it is no library of ours."""
    try:
        values = json.loads(read_text(folder / MANIFEST))
        return Installed(**values, folder=folder)
    except (OSError, ValueError, TypeError):
        return None


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
