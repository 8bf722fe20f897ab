"""Which session stores there are, and which one opens what is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from perdure.sessions.store.base import SessionStore
from perdure.sessions.store.sqlite.backup import Backup, back_up, restore
from perdure.sessions.store.sqlite.folder import FILE
from perdure.sessions.store.sqlite.repair import FOUND, Verification, verify
from perdure.sessions.store.sqlite.store import SqliteStore

__all__ = ["FOUND", "Backup", "Verification", "back_up", "has_sessions", "open_store", "restore", "verify"]

Opener = Callable[[Path | None, bool], SessionStore]

STORES: dict[str, Opener] = {"folder": lambda folder, readonly: SqliteStore(folder, readonly=readonly)}
"""What opens a folder, or without one a store in memory."""


def open_store(place: Path | SessionStore | None, *, readonly: bool = False) -> SessionStore:
    """The session store in a folder, or without one in memory. One that is open already is taken as it is."""
    if place is None or isinstance(place, Path):
        return STORES["folder"](place, readonly)
    return place


def has_sessions(folder: Path) -> bool:
    """Whether a folder holds a session store."""
    return (folder / FILE).is_file()
