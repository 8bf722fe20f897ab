"""`perdure du`: how much disk perdure uses."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from perdure.spi.base import settings
from perdure.spi.cli import Json, print_json, words, write_columns


def du(as_json: Json = False) -> None:
    """Show how much disk perdure uses. Models, engines, sessions, and the cache of the hub's own library."""
    from perdure.ext.fetching.hub import hub_cache
    from perdure.spi.models import models

    now = settings()
    named = {entry.name: entry.path for entry in models.entries() if entry.path is not None}
    used = [(name, _size(path), path) for name, path in named.items()]
    used += [
        (what, _size(place), place)
        for what, place in (
            ("unfinished downloads", now.models / ".parts"),
            ("engines", now.engines),
            ("sessions", now.store),
            ("evaluations", now.home / "evaluations"),
            ("Hugging Face cache", hub_cache()),
        )
    ]
    used = [(what, size, place) for what, size, place in used if size]
    if as_json:
        print_json([{"what": what, "bytes": size, "path": str(place)} for what, size, place in used])
        return
    rows = [("what", "size", "where")]
    rows += [
        (what, words.size(size), str(place)) for what, size, place in sorted(used, key=lambda each: -each[1])
    ]
    write_columns(rows, right=frozenset({1}))


def _size(place: Path) -> int:
    """Bytes of a model's parts, or of all files of a folder. A file with several names there counts once."""
    from perdure.spi.models import part_names

    files = place.rglob("*") if place.is_dir() else (place.with_name(name) for name in part_names(place.name))
    seen = {}
    for file in files:
        with suppress(OSError):
            state = file.lstat()
            if not file.is_dir() and not file.is_symlink():
                seen[state.st_dev, state.st_ino] = state.st_size
    return sum(seen.values())
