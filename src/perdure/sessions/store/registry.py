"""Which session stores there are, and which one opens what is given."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from perdure.config import settings
from perdure.errors import InvalidInputError
from perdure.sessions.store.sqlite import FILE
from perdure.sessions.store.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from perdure.cache.tiers.codec import Encryption
    from perdure.sessions.store.base import SessionStore


def open_store(place: Path | SessionStore | None, *, readonly: bool = False) -> SessionStore:
    """The session store in a folder, or in the database that it stands for; without one in memory. One that
    is open already is returned unchanged."""
    return open_folder(place, readonly) if place is None or isinstance(place, Path) else place


def open_folder(folder: Path | None, readonly: bool) -> SessionStore:
    """The session store in a folder, or that it stands for; without a folder one in memory."""
    if folder is None:
        return SqliteStore(None, readonly=readonly)
    from perdure.sessions.store.remote import remote_of

    remote = remote_of(folder)
    if remote is None:
        return SqliteStore(folder, readonly=readonly)
    return remote.open(folder, readonly=readonly)


def store_folder(store: str | os.PathLike[str]) -> Path:
    """The folder of a store: the one that is named, or that stands on this machine for a database. Blocks of
    state, and the locks of this machine's processes, lie there."""
    from perdure.sessions.store.remote import remote_of_url

    remote = remote_of_url(store) if isinstance(store, str) else None
    if remote is not None:
        return remote.folder(cast(str, store))
    # A drive of Windows has one letter.
    if scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", os.fspath(store)):
        raise InvalidInputError(
            f"no extension opens {scheme[0]}…: install the one that does, or give a folder"
        )
    return Path(store)


def cluster_key(folder: Path | None, blocks: Sequence[str]) -> bytes:
    """What encrypts the state that machines share in `blocks`: it is kept with their sessions."""
    from perdure.cache.tiers.base import tier_opener

    for url in blocks:
        tier_opener(url).check(url)
    return _remote_key(folder, "blocks of several machines need")


def _remote_key(folder: Path | None, who: str) -> bytes:
    from perdure.sessions.store.remote import remote_of

    remote = remote_of(folder) if folder is not None else None
    if folder is None or remote is None:
        raise InvalidInputError(
            f"{who} their sessions in PostgreSQL, which has the key that encrypts them: give store=postgresql://…"
        )
    return remote.key(folder)


def encryption_of(folder: Path | None, encrypt: str | os.PathLike[str] | None = None) -> Encryption | None:
    """How the blocks in a store's folder are encrypted: by the key that `encrypt` names (a file, or "cluster"
    for the one in the database of the sessions), else as is set, else as they are already; None where
    they are plain."""
    if folder is None:
        if encrypt is not None:
            raise InvalidInputError("encrypt is for state on the disk, which needs a store: give one, too")
        return None
    from perdure.cache.tiers.archive import block_folders
    from perdure.cache.tiers.codec import choose_encryption

    chosen = settings().encrypt if encrypt is None else os.fspath(encrypt)
    return choose_encryption(
        folder,
        chosen,
        [folder, *block_folders(folder)],
        lambda: _remote_key(folder, "blocks that are encrypted with the cluster's key need"),
    )


def has_sessions(folder: Path) -> bool:
    """Whether a folder holds a session store, or stands for a database."""
    from perdure.sessions.store.remote import url_in

    return (folder / FILE).is_file() or url_in(folder) is not None
