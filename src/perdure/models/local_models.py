"""The models of this machine: find one, or fetch it. What is no file here `finder.py` knows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.config import settings
from perdure.models.parts import read_parts
from perdure.models.registry import (
    ALIASES,
    DEFAULT,
    MODELS,
    FileSource,
    Progress,
    Source,
    WheelSource,
)

if TYPE_CHECKING:
    from perdure.models.finder import LocalModel, ModelFinder


def resolve(name: str | os.PathLike[str], *, own: bool = False) -> Source:
    """Where the model of that name comes from.

    A name of the registry or of the catalogue, one that Ollama has on this machine, `ollama:name`,
    `lmstudio:publisher/repo/file.gguf`, a path, `hf:owner/repo/file.gguf`, `owner/repo:file.gguf`,
    `owner/repo:Q4_K_M` or `owner/repo`, each also after `hf.co/`; `@revision` may follow the repo. A page or
    file of the hub by its URL, or any other URL of a .gguf file. Names of the registry win over files, and
    files over the hub; `./name` and `hf:name` say which is meant. A name of the catalogue is our own copy if
    it is here, else Ollama's if that is; with `own`, it is never Ollama's.
    """
    if not isinstance(name, str):
        return FileSource(path=Path(name).expanduser())
    known = MODELS.get(ALIASES.get(name.lower(), name.lower()))
    if known is not None:
        return known
    if Path(name).is_absolute():
        return FileSource(path=Path(name))
    return _finder().find(name, own=own)


def path(name: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """The file of a model, fetched first if it is not here, checked to be a whole GGUF model.

    Without a name it is the model of `PERDURE_MODEL`, or else the default one.
    """
    source = resolve(name or settings().model or DEFAULT)
    location = locate(source)
    if location is None:
        location = _fetch(source, progress)
    return read_parts(location)[0].path


def is_here(name: str | os.PathLike[str] | None = None) -> bool:
    """Whether nothing would have to be fetched for `path`."""
    return locate(resolve(name or settings().model or DEFAULT)) is not None


def pull(name: str | None = None, progress: Progress | None = None) -> Path:
    """Fetch a model, or what the hub changed about it since; then like `path`.

    Of a repository with safetensors and no GGUF file it is the folder, for an engine that opens such.
    """
    location = _fetch(resolve(name or settings().model or DEFAULT, own=True), progress, folders=True)
    return location if location.is_dir() else read_parts(location)[0].path


def locate(source: Source) -> Path | None:
    """Where a model is on this machine, or None if it would have to be fetched."""
    if isinstance(source, FileSource):
        return source.path
    models = settings().models
    if isinstance(source, WheelSource):
        place = models / source.file
        return place if source.is_whole(place) else None
    return _finder().place(source, models)


def _fetch(source: Source, progress: Progress | None, *, folders: bool = False) -> Path:
    if isinstance(source, FileSource):
        return source.path
    return _finder().fetch(source, settings().models, progress, folders=folders)


def names_model(word: str) -> bool:
    """Whether a word can only be meant as a model: a known name, a file that is there, or an address.

    `llama3.2:1b` is one too, as Ollama writes them, though nothing is known by it here.
    """
    return _finder().names_model(word)


def entries() -> list[LocalModel]:
    """The default model, those fetched from a hub or another address, and those of other programs here."""
    return _finder().entries()


def remove(name: str) -> tuple[Path, ...]:
    """Delete a model that was fetched; give the files that are gone."""
    return _finder().remove(name)


def _finder() -> ModelFinder:
    from perdure.models.finder import finder

    return finder()
