"""Models that other programs of this machine have already: Ollama's and LM Studio's, run without a copy.

    ollama:llama3.2:1b                   a name that `ollama ls` shows; its file is named by its digest
    lmstudio:bartowski/repo/file.gguf    a file below LM Studio's folder of models

Nothing here writes. A manifest or a folder that cannot be read holds no models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from perdure.spi.base import read_file, settings

OLLAMA, LM_STUDIO = "ollama:", "lmstudio:"
_WEIGHTS = "application/vnd.ollama.image.model"
_MANIFEST = 1 << 20
"""Bytes of a manifest, at most."""
_MOST = 1000
"""Files of another program that are looked at."""


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model of another program: the name that runs it here, whose it is, and its file."""

    name: str
    program: str
    path: Path


def other_models() -> list[OtherModel]:
    """All that is found, by name."""
    return sorted([*_ollama_models(), *_lm_studio_models()], key=lambda each: each.name)


def find_ollama(name: str) -> Path | None:
    """The file of Ollama's model of that name; without a tag, `latest`."""
    plain = name.lower().removeprefix(OLLAMA)
    base, _, tag = plain.partition(":")
    if not base or any(part in ("", ".", "..") for part in (*base.split("/"), tag or "latest")):
        return None
    if base.count("/") > 1 or "\\" in plain or "/" in tag:
        return None
    owned = base if "/" in base else f"library/{base}"
    for folder in settings().ollama_models:
        for registry in _folders(folder / "manifests"):
            if (weights := _weights(folder, registry / owned / (tag or "latest"))) is not None:
                return weights
    return None


def find_lm_studio(name: str) -> Path | None:
    """The file of LM Studio's model of that name."""
    inside = name[len(LM_STUDIO) :]
    if "\\" in inside or any(part in ("", ".", "..") for part in inside.split("/")):
        return None
    places = (folder / inside for folder in settings().lm_studio_models)
    return next((place for place in places if place.is_file()), None)


def name_of(path: Path) -> str | None:
    """What another program calls the model in a file; None where none has it."""
    names = (each.name for each in other_models() if each.path == path)
    return next((name.removeprefix(OLLAMA).removeprefix(LM_STUDIO) for name in names), None)


def _ollama_models() -> Iterator[OtherModel]:
    seen: set[str] = set()
    for folder in settings().ollama_models:
        manifests = folder / "manifests"
        for manifest in _files(manifests):
            parts = manifest.relative_to(manifests).parts
            if len(parts) != 4 or (path := _weights(folder, manifest)) is None:
                continue
            _, owner, base, tag = parts
            name = (base if owner == "library" else f"{owner}/{base}") + f":{tag}"
            if name not in seen:
                seen.add(name)
                yield OtherModel(f"{OLLAMA}{name}", "Ollama", path)


def _lm_studio_models() -> Iterator[OtherModel]:
    from perdure.spi.models import is_projector, part_names

    for folder in settings().lm_studio_models:
        for file in _files(folder, "*.gguf"):
            if is_projector(file.name) or part_names(file.name)[0] != file.name:
                continue
            yield OtherModel(f"{LM_STUDIO}{file.relative_to(folder).as_posix()}", "LM Studio", file)


def _weights(folder: Path, manifest: Path) -> Path | None:
    """The file with the weights of one of Ollama's manifests, if it is there."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        for layer in json.loads(read_file(manifest, _MANIFEST))["layers"]:
            kind, _, digest = str(layer["digest"]).partition(":")
            if layer["mediaType"] == _WEIGHTS and kind == "sha256" and digest.isalnum():
                blob = folder / "blobs" / f"sha256-{digest}"
                return blob if blob.is_file() else None
    return None


def _files(folder: Path, pattern: str = "*") -> list[Path]:
    paths: list[Path] = []
    with suppress(OSError):
        for path in folder.rglob(pattern):
            if path.is_file():
                paths.append(path)
            if len(paths) >= _MOST:
                break
    return sorted(paths)


def _folders(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(path for path in folder.iterdir() if path.is_dir())
    return []
