"""The list of this machine's models: those that are here, and those that can be fetched by name; drop one."""

from __future__ import annotations

from pathlib import Path

from perdure import ModelNotFoundError
from perdure.ext.fetching.web_files import url_folder
from perdure.spi.base import settings
from perdure.spi.models import (
    ALIASES,
    MODELS,
    FileSource,
    HubSource,
    LocalModel,
    WheelSource,
    is_projector,
    locate,
    part_names,
    resolve,
)


def entries() -> list[LocalModel]:
    """The default model, those fetched from a hub or another address, and those of other programs here."""
    from perdure.ext.fetching.hub import is_weights_folder
    from perdure.ext.fetching.other_programs import other_models

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
    from perdure.ext.fetching.hub import stamp

    files = files_of(name)
    for file in files:
        stamp(file).unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        _drop_empty(file.parent)
    return files


def files_of(name: str) -> tuple[Path, ...]:
    """The files that `remove` would delete. Only what was fetched: never a file of the user's own."""
    from perdure.ext.fetching.hub import folder_files, hub_folder

    source = resolve(name, own=True)
    if isinstance(source, FileSource):
        raise ModelNotFoundError(f"{source.path} was not fetched by perdure; delete the file yourself")
    models = settings().models
    first = models / source.file if isinstance(source, WheelSource) else locate(source)
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
    from perdure.ext.fetching import catalogue

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
