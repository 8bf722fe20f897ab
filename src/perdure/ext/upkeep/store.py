"""What operators do with a session store: verify it, copy it, bring its sessions into another one."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

from perdure import CorruptStateError, InvalidInputError, StoreDamagedError, StoreError
from perdure.ext.upkeep import backup, repair
from perdure.ext.upkeep.backup import Backup
from perdure.ext.upkeep.migration import Migration, migrate_sessions
from perdure.ext.upkeep.repair import Progress, Verification
from perdure.spi.sessions import SqlStore, encryption_of, open_store, remote_of, store_id


def verify(folder: Path, progress: Progress) -> Verification:
    """Prove every turn that a session or a memory leads to, then have every block read. A damaged database
    of a folder is mended from what can be proved; one of a server is its operator's to restore."""
    remote = remote_of(folder)
    if remote is None:
        return repair.verify(folder, progress, lambda: encryption_of(folder))
    verification = Verification(store=folder)
    try:
        with closing(remote.open(folder, readonly=True)) as store:
            assert isinstance(store, SqlStore)
            repair.prove_sessions(store, verification, progress)
    except (StoreDamagedError, CorruptStateError) as error:
        verification.database = str(error)
    if verification.damaged or verification.database:
        verification.not_repaired = f"{remote.shown(folder)} is on a server: restore it there from a copy"
    repair.read_blocks(folder, verification, progress, lambda: encryption_of(folder))
    return verification


def migrate(source: Path, target: Path, progress: Progress) -> Migration:
    """Bring all sessions and memories of a store into another one, while both are in use. State stays where
    it is: the first turn in the new store computes it again."""
    with ExitStack() as stack:
        stores = []
        for folder, readonly in ((source, True), (target, False)):
            store = open_store(folder, readonly=readonly)
            stack.callback(store.close)
            assert isinstance(store, SqlStore)
            stores.append(store)
        first, second = stores
        if store_id(first) == store_id(second):
            raise InvalidInputError(f"{source} and {target} are the same store")
        return migrate_sessions(first, second, progress)


def back_up(folder: Path, file: Path, *, state: bool = False, progress: Progress | None = None) -> Backup:
    """Copy all sessions of a store into one new file."""
    if (remote := remote_of(folder)) is not None:
        raise StoreError(f"{remote.shown(folder)} is on a server: {remote.backup_advice(folder)}")
    return backup.back_up(folder, file, state=state, progress=progress)


def restore(file: Path, folder: Path, *, progress: Progress | None = None) -> Backup:
    """Make a store of a backup, in a new folder."""
    if (remote := remote_of(folder)) is not None:
        raise InvalidInputError(
            f"{remote.shown(folder)} is on a server: restore into a new folder, and bring its sessions "
            "there by `perdure sessions migrate`"
        )
    return backup.restore(file, folder, progress=progress)
