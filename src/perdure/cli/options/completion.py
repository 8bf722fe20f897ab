"""Names that a shell can complete: of sessions, and of models."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import typer

_MANY = 1000
"""Sessions that are looked through, the latest first."""


def session_names(context: typer.Context, incomplete: str) -> list[str]:
    """Sessions in the store that the command is about."""

    def find() -> Iterable[str]:
        from perdure.cli.store import session_store_in

        store, namespace = context.params.get("store"), context.params.get("namespace")
        with session_store_in(Path(store) if store else None) as kept:
            rows = kept.list(namespace or "", limit=_MANY)
        given = context.params.get("names") or ()
        return (row.name for row in rows if row.name not in given)

    return _completed(find, incomplete)


def first_word(context: typer.Context, incomplete: str) -> list[str]:
    """Models, unless one was named: what follows is a prompt."""
    named = context.params.get("words") or context.params.get("model")
    return [] if named else model_names(incomplete)


def model_names(incomplete: str) -> list[str]:
    """Models that have a name, and those that were fetched."""

    def find() -> Iterable[str]:
        from perdure import models

        return (name for entry in models.entries() for name in (entry.name, *entry.aliases))

    return _completed(find, incomplete)


def _completed(find: Callable[[], Iterable[str]], incomplete: str) -> list[str]:
    # Whatever is wrong is told by the command itself; somebody who presses Tab wants names or nothing.
    with suppress(Exception):
        # A name that needs quotes would come out as several words.
        return sorted(name for name in find() if name.startswith(incomplete) and shlex.quote(name) == name)
    return []
