"""Models that come in several files: `name-00001-of-00003.gguf` and so on."""

from __future__ import annotations

import re
from pathlib import Path

from perdure.errors import ModelFileError, ModelNotFoundError
from perdure.models.header import Header, read_header

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def is_projector(name: str) -> bool:
    """Whether a GGUF file is by its name a projector, which encodes images for the model beside it."""
    return "mmproj" in name.lower()


def part_names(name: str) -> tuple[str, ...]:
    """The names of all files of the model that `name` belongs to, in order; mostly just itself."""
    match = _PART.fullmatch(name)
    if match is None:
        return (name,)
    stem, number, count = match["stem"], int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise ModelFileError(f"{name} is not a part of a model: part {number} of {count}")
    return tuple(f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1))


def read_parts(path: Path) -> tuple[Header, ...]:
    """The checked headers of all files of the model at `path`, first part first.

    All parts must be there, be whole, and agree on how many they are.
    """
    names = part_names(path.name)
    missing = [name for name in names if not (path.parent / name).exists()]
    if len(names) > 1 and missing:
        raise ModelNotFoundError(
            f"{path} is one of {len(names)} parts, and {len(missing)} are missing: {', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''}. Put all parts into one folder"
        )
    headers = tuple(read_header(path.parent / name) for name in names)
    for number, header in enumerate(headers):
        _agrees(header, number, len(headers))
    _all_tensors(headers)
    return headers


def _agrees(header: Header, number: int, count: int) -> None:
    parts = header.integer("split.count") or 1
    if parts != count:
        raise ModelFileError(
            f"{header.path} says that its model has {parts} parts, its name says {count}. "
            "Parts must keep the names that they were published with"
        )
    at = header.integer("split.no") or 0
    if at != number:
        raise ModelFileError(f"{header.path} holds part {at + 1} of {count}, its name says {number + 1}")


def _all_tensors(headers: tuple[Header, ...]) -> None:
    needed = headers[0].integer("split.tensors.count")
    there = sum(len(header.tensors) for header in headers)
    if needed is not None and needed != there:
        raise ModelFileError(
            f"{headers[0].path} needs {needed} tensors, its {len(headers)} parts have {there}: "
            "they are parts of different models"
        )
