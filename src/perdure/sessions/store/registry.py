"""Which session stores there are, and which one opens what is given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.config import settings
from perdure.errors import CorruptStateError, InvalidInputError, StoreDamagedError, StoreError
from perdure.sessions.store.base import SessionStore
from perdure.sessions.store.migrate import Migration
from perdure.sessions.store.migrate import migrate as migrate_sessions
from perdure.sessions.store.postgres.place import PostgresPlace, is_url, place_in, stand_in
from perdure.sessions.store.sql.store import SqlStore
from perdure.sessions.store.sqlite import backup, repair
from perdure.sessions.store.sqlite.backup import Backup, restore
from perdure.sessions.store.sqlite.repair import FOUND, Progress, Verification
from perdure.sessions.store.sqlite.store import FILE, SqliteStore

if TYPE_CHECKING:
    from perdure.cache.tiers.encryption import Encryption
    from perdure.sessions.store.postgres.accounts import Accounts
    from perdure.sessions.store.postgres.store import PostgresStore

__all__ = [
    "FOUND",
    "Backup",
    "Migration",
    "Verification",
    "back_up",
    "cluster_key",
    "encryption_of",
    "has_sessions",
    "migrate",
    "open_accounts",
    "open_store",
    "restore",
    "store_folder",
    "verify",
]

Opener = Callable[[Path | None, bool], SessionStore]


def _postgres(place: PostgresPlace, *, readonly: bool) -> PostgresStore:
    try:
        from perdure.sessions.store.postgres.store import PostgresStore
    except ModuleNotFoundError as error:
        raise StoreError(
            f"sessions in PostgreSQL need {error.name}: pip install 'perdure[cluster]'"
        ) from None
    return PostgresStore(place, readonly=readonly)


def _in_folder(folder: Path | None, readonly: bool) -> SessionStore:
    place = place_in(folder) if folder is not None else None
    if place is None:
        return SqliteStore(folder, readonly=readonly)
    return _postgres(place, readonly=readonly)


STORES: dict[str, Opener] = {"folder": _in_folder}
"""What opens a folder, or without one a store in memory."""


def open_store(place: Path | SessionStore | None, *, readonly: bool = False) -> SessionStore:
    """The session store in a folder, or in the database that it stands for; without one in memory. One that
    is open already is taken as it is."""
    if place is None or isinstance(place, Path):
        return STORES["folder"](place, readonly)
    return place


def store_folder(store: str | os.PathLike[str]) -> Path:
    """The folder of a store: the one that is named, or that stands on this machine for a database. Blocks of
    state, and the locks of this machine's processes, lie there."""
    return stand_in(store) if isinstance(store, str) and is_url(store) else Path(store)


def cluster_key(folder: Path | None, blocks: Sequence[str]) -> bytes:
    """What seals the state that machines share in `blocks`: it is in the database of their sessions."""
    from perdure.cache.tiers.places import parse_place as parse_block_place

    for url in blocks:
        parse_block_place(url)
    return _database_key(folder, "blocks of several machines need")


def _database_key(folder: Path | None, who: str) -> bytes:
    place = place_in(folder) if folder is not None else None
    if place is None:
        raise InvalidInputError(
            f"{who} their sessions in PostgreSQL, which has the key that seals them: give store=postgresql://…"
        )
    with closing(_postgres(place, readonly=False)) as store:
        assert store.key is not None
        return store.key


def encryption_of(folder: Path | None, encrypt: str | os.PathLike[str] | None = None) -> Encryption | None:
    """How the blocks in a store's folder are encrypted: by the key that `encrypt` names (a file, or "cluster"
    for the one in the database of the sessions), else as is set, else as they are already; None where
    they are plain."""
    from perdure.cache.tiers.archive import block_folders
    from perdure.cache.tiers.encryption import choose_encryption

    if folder is None:
        if encrypt is not None:
            raise InvalidInputError("encrypt is for state on the disk, which needs a store: give one, too")
        return None
    chosen = settings().encrypt if encrypt is None else os.fspath(encrypt)
    return choose_encryption(
        folder,
        chosen,
        block_folders(folder),
        lambda: _database_key(folder, "blocks that are encrypted with the cluster's key need"),
    )


@contextmanager
def open_accounts(folder: Path | None) -> Iterator[Accounts | None]:
    """The keys of all replicas of the database that a folder stands for; None where it stands for none."""
    place = place_in(folder) if folder is not None else None
    if place is None:
        yield None
        return
    with closing(_postgres(place, readonly=False)) as store:
        yield store.accounts


def has_sessions(folder: Path) -> bool:
    """Whether a folder holds a session store, or stands for a database."""
    return (folder / FILE).is_file() or place_in(folder) is not None


def verify(folder: Path, progress: Progress) -> Verification:
    """Prove every turn that a session or a memory leads to, then have every block read. A damaged database
    of a folder is mended from what can be proved; one of a server is its operator's to restore."""
    place = place_in(folder)
    if place is None:
        return repair.verify(folder, progress, lambda: encryption_of(folder))
    verification = Verification(store=folder)
    try:
        with closing(_postgres(place, readonly=True)) as store:
            repair.prove_sessions(store, verification, progress)
    except (StoreDamagedError, CorruptStateError) as error:
        verification.database = str(error)
    if verification.damaged or verification.database:
        verification.not_repaired = f"{place.shown} is on a server: restore it there from a copy"
    repair.read_blocks(folder, verification, progress, lambda: encryption_of(folder))
    return verification


def migrate(source: Path, target: Path, progress: Progress) -> Migration:
    """Bring all sessions and memories of a store into another one, while both are in use. State stays where
    it is: the first turn in the new store computes it again."""
    with ExitStack() as stack:
        stores = []
        for folder, readonly in ((source, True), (target, False)):
            store = _in_folder(folder, readonly)
            stack.callback(store.close)
            assert isinstance(store, SqlStore)
            stores.append(store)
        first, second = stores
        if first.store_id() == second.store_id():
            raise InvalidInputError(f"{source} and {target} are the same store")
        return migrate_sessions(first, second, progress)


def back_up(folder: Path, file: Path, *, state: bool = False, progress: Progress | None = None) -> Backup:
    """Copy all sessions of a store into one new file."""
    place = place_in(folder)
    if place is not None:
        raise StoreError(f"{place.shown} is on a server: `pg_dump --schema={place.schema}` copies it there")
    return backup.back_up(folder, file, state=state, progress=progress)
