"""What is in a store, in SQLite: numbered migrations, one writer, any number of readers."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from perdure import system
from perdure.atomic import PRIVATE, make_private, translate_os_errors
from perdure.checks import check_may_wait
from perdure.errors import (
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreReadOnlyError,
    StoreVersionError,
)

APPLICATION = 0x50455244
"""Marks the file as ours ("PERD")."""

_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"


class _Key(NamedTuple):
    """The key of a file's connections in this process. A file that replaced another is another one."""

    process: int
    path: str
    device: int
    inode: int
    readonly: bool
    version: int


_PIECE = 64 << 10
"""Bytes of a piece of the log's index, with what else a change needs at least."""
_ERRORS = (UnicodeDecodeError, sqlite3.Error)
"""What a statement raises, apart from the mistakes of a caller."""


@dataclass(slots=True, eq=False)
class _Connections:
    """The connections to one file that all its indexes in this process share."""

    writer: sqlite3.Connection | None
    reader: sqlite3.Connection
    key: _Key | None = None
    changing: threading.RLock = field(default_factory=threading.RLock)
    reading: threading.RLock = field(default_factory=threading.RLock)
    changer: int | None = None
    """The thread whose transaction is open."""
    deleted: bool = True
    """Whether rows may still lie in the log that were deleted, also by a process that was killed."""
    users: int = 0
    copied: bool = False
    """Whether what is read is a copy of an older index, as it was when that was opened."""


_BUSY = 30
"""Seconds that a connection waits for another process."""
_OPEN: dict[_Key, _Connections] = {}
_OPENING = threading.RLock()
"""Held while a database is created, opened or closed in this process. POSIX drops all locks that a process
has on a file as soon as it closes any descriptor of it: nobody may open one beside SQLite."""


@contextmanager
def unopened(path: Path) -> Iterator[None]:
    """Within it, a database file may be read as plain bytes: `StoreLockedError` where this process has it
    open, and nobody in it opens it meanwhile."""
    with _OPENING:
        real, process = os.path.realpath(path), os.getpid()
        if any(key.path == real and key.process == process for key in _OPEN):
            raise StoreLockedError(f"{path} is in use by this process: close what uses it first")
        yield


class Index:
    """The index of one store, for any thread.

    A change is on the disk when `writing` ends, or it never happened. Reading waits for no writer: it has a
    separate connection, which sees what was there before the change until the change is whole. All indexes
    of one file in one process share their connections. To read an older one does not change it: a copy is
    migrated and read.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        readonly: bool,
        migrations: Sequence[str] | None = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        advice: str = "`perdure cache verify` rebuilds it from the files beside it",
        erases: bool = False,
        before_migration: Callable[[Index, int], None] | None = None,
    ) -> None:
        """Without a path, in memory. Without `migrations` it has the tables of blocks. `functions` are for
        its SQL, `advice` is for the error of a damaged index. With `erases`, what is deleted is in none of
        its files once the change is made. `before_migration` is called with the version of an older one that
        is about to be changed."""
        self._path = path
        self._erases = erases
        if migrations is None:
            from perdure.store.block_schema import MIGRATIONS

            migrations = MIGRATIONS
        self._migrations = tuple(migrations)
        self._functions = functions or {}
        self._advice = advice
        self._before_migration = before_migration
        self.readonly = readonly
        self.created = False
        """Whether there was no index before."""
        self._closed = False
        with self._typed(), _OPENING:
            self._connections = self._share()
            self._connections.users += 1

    # Use.

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction: all of it, or on any error nothing."""
        if self.readonly:
            raise StoreReadOnlyError(f"{self._path} was opened for reading")
        shared = self._open_connections()
        assert shared.writer is not None
        with shared.changing:
            try:
                shared.writer.execute("BEGIN IMMEDIATE")
                shared.changer = threading.get_ident()
                try:
                    yield
                    shared.writer.execute("COMMIT")
                    self._erase(shared)
                finally:
                    shared.changer = None
                    # Some errors end a transaction by themselves, others leave it open.
                    if shared.writer.in_transaction:
                        with suppress(sqlite3.Error):
                            shared.writer.execute("ROLLBACK")
            except _ERRORS as error:
                raise self._store_error(error) from error

    def run(self, statement: str, *values: Any) -> None:
        """One statement of the transaction that `writing` has open."""
        self.replace(statement, *values)
        if statement.startswith("DELETE"):
            self._connections.deleted = True

    def replace(self, statement: str, *values: Any) -> None:
        """`run` for a deletion of words that are kept elsewhere: nothing is erased for it."""
        shared = self._connections
        if shared.writer is None or shared.changer != threading.get_ident():
            raise StoreError("a change of the index belongs into a transaction")
        try:
            shared.writer.execute(statement, values)
        except _ERRORS as error:
            raise self._store_error(error) from error

    def vacuum(self) -> None:
        """Leave nothing of deleted rows in the file, nor in its log. Not within a transaction."""
        shared = self._open_connections()
        with self._typed(), shared.changing, shared.reading:
            assert shared.writer is not None
            shared.writer.execute("VACUUM")
            shared.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _erase(self, shared: _Connections) -> None:
        """Empty the log of a database with deleted rows. While another connection reads, that is left to the
        next change, or to the end: nobody waits for a reader."""
        if not (self._erases and shared.deleted and shared.writer is not None):
            return
        shared.writer.execute("PRAGMA busy_timeout = 0")
        try:
            busy = shared.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        except sqlite3.Error:
            # The change is made: a log that cannot be emptied now is emptied later.
            return
        finally:
            shared.writer.execute(f"PRAGMA busy_timeout = {_BUSY * 1000}")
        shared.deleted = bool(busy)

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What is there; inside a transaction, with its changes so far."""
        shared = self._connections
        # Without `_typed`: a context manager takes twice as long as a short query, and a turn has twenty.
        try:
            if shared.writer is not None and shared.changer == threading.get_ident():
                return shared.writer.execute(query, values).fetchall()
            with self._open_connections().reading:
                return shared.reader.execute(query, values).fetchall()
        except _ERRORS as error:
            raise self._store_error(error) from error

    def check(self, table: str | None = None, reader: sqlite3.Connection | None = None) -> None:
        """Raise `StoreDamagedError` unless every page of the index, or of one table in it, is sound."""
        query = f"PRAGMA integrity_check({table or 1})"
        with self._typed():
            rows = self.rows(query) if reader is None else reader.execute(query).fetchall()
        if rows != [("ok",)]:
            raise self._damaged(rows[0][0] if rows else "no answer")

    def check_schema(self) -> None:
        """Raise `StoreDamagedError` unless its tables are those that are made here.

        SQLite takes a damaged description of a table for another one, which may forbid every change.
        """
        made = Index(None, readonly=False, migrations=self._migrations, functions=self._functions)
        try:
            expected = made.rows(_SCHEMA)
        finally:
            made.close()
        if self.rows(_SCHEMA) != expected:
            raise self._damaged("its tables are not as they were made")

    def connect_reader(self) -> sqlite3.Connection | None:
        """One more connection for reading, which the caller closes. None where there is one copy alone."""
        shared = self._open_connections()
        if self._path is None or shared.copied:
            return None
        with self._typed():
            return self._connect("mode=rw") if shared.writer is not None else self._connect_to_read()[0]

    def copy_to(self, path: Path) -> None:
        """Copy the database into a new file, of whatever version it is, as it is between two changes."""
        with translate_os_errors(path):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | system.BINARY, PRIVATE))
        try:
            with self._typed():
                source, _ = self._connect_to_read()
                with closing(source), closing(sqlite3.connect(path)) as copy:
                    source.backup(copy)
                    copy.execute("PRAGMA journal_mode = DELETE")
        except BaseException:
            for suffix in ("", "-wal", "-shm", "-journal"):
                with suppress(OSError):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)
            raise

    @contextmanager
    def reading_apart(self) -> Iterator[Callable[..., list[tuple[Any, ...]]]]:
        """`rows` over a separate connection, for long queries: nobody else waits for them."""
        db = self.connect_reader()
        if db is None:
            yield self.rows
            return

        def rows(query: str, *values: Any) -> list[tuple[Any, ...]]:
            with self._typed():
                return db.execute(query, values).fetchall()

        with closing(db):
            yield rows

    def close(self) -> None:
        with _OPENING:
            if self._closed:
                return
            self._closed = True
            shared = self._connections
            shared.users -= 1
            if shared.users:
                return
            if shared.key is not None:
                del _OPEN[shared.key]
            with shared.changing, shared.reading:
                shared.reader.close()
                if shared.writer is not None:
                    shared.writer.close()

    # Opening.

    def _open_connections(self) -> _Connections:
        check_may_wait("a store was touched")
        if self._closed:
            raise StoreError(f"the index {self._path} cannot be used: it was closed")
        return self._connections

    def _share(self) -> _Connections:
        """The connections of this file in this process, opened where there are none."""
        if self._path is None:
            db = self._open_for_writing()
            # What is in memory has one connection, where a change must not be seen before it is whole.
            one = threading.RLock()
            return _Connections(db, db, changing=one, reading=one)
        if not self.readonly:
            # Its log and the like get the same permissions from SQLite.
            make_private(self._path)
        if not self._path.exists():
            raise StoreError(f"there is no store at {self._path.parent}")
        real = os.path.realpath(self._path)
        known = os.stat(real)
        key = _Key(os.getpid(), real, known.st_dev, known.st_ino, self.readonly, len(self._migrations))
        if key in _OPEN:
            return _OPEN[key]
        writer, copied = (None if self.readonly else self._open_for_writing()), False
        try:
            if writer is None:
                reader, copied = self._open_for_reading()
            else:
                reader = self._connect("mode=rw")
        except BaseException:
            if writer is not None:
                writer.close()
            raise
        shared = _OPEN[key] = _Connections(writer, reader, key=key, copied=copied)
        with shared.changing:
            self._erase(shared)
        return shared

    def _open_for_writing(self) -> sqlite3.Connection:
        db = self._connect("mode=rwc")
        try:
            # Looked at before anything is changed: it may not be ours.
            version = self._version(db)
            self.created = not version
            if self._before_migration is not None and 0 < version < len(self._migrations):
                self._before_migration(self, version)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            # macOS's plain fsync leaves bytes in the drive's own memory; elsewhere these do nothing.
            db.execute("PRAGMA fullfsync = ON")
            db.execute("PRAGMA checkpoint_fullfsync = ON")
            db.execute("PRAGMA foreign_keys = ON")
            if self._erases:
                # Else what was deleted lies in free pages until something else is written there.
                db.execute("PRAGMA secure_delete = ON")
            for number in range(version, len(self._migrations)):
                _migrate(db, number, self._migrations[number])
        except BaseException:
            db.close()
            raise
        return db

    def _open_for_reading(self) -> tuple[sqlite3.Connection, bool]:
        """A connection, and whether it is to a copy of an older index."""
        db, version = self._connect_to_read()
        if version == len(self._migrations):
            return db, False
        with closing(db):
            return self._migrated_copy(db, version), True

    def _connect_to_read(self) -> tuple[sqlite3.Connection, int]:
        """A connection to the file as it is, and its version."""
        assert self._path is not None, "nobody else writes to what is in memory"
        try:
            return self._checked("mode=ro")
        except sqlite3.OperationalError:
            # Beside an index that nobody writes to, a folder that may not be written needs no log either.
            if self._path.with_name(f"{self._path.name}-wal").exists():
                raise
            return self._checked("mode=ro&immutable=1")

    def _checked(self, mode: str) -> tuple[sqlite3.Connection, int]:
        db = self._connect(mode)
        try:
            return db, self._version(db)
        except BaseException:
            db.close()
            raise

    def _migrated_copy(self, source: sqlite3.Connection, version: int) -> sqlite3.Connection:
        """In a file without a name, which the system removes however this process ends."""
        copy = self._connect(None)
        try:
            source.backup(copy)
            for number in range(version, len(self._migrations)):
                _migrate(copy, number, self._migrations[number])
            self.check(reader=copy)
        except BaseException:
            copy.close()
            raise
        return copy

    def _connect(self, mode: str | None) -> sqlite3.Connection:
        """In a mode of SQLite's addresses; without one, to a new database that only this connection sees."""
        named = f"{self._path.absolute().as_uri()}?{mode}" if self._path is not None else ":memory:"
        db = sqlite3.connect(
            named if mode is not None else "",
            uri=True,
            check_same_thread=False,
            isolation_level=None,
            timeout=_BUSY,
        )
        for name, function in self._functions.items():
            db.create_function(name, -1, function, deterministic=True)
        return db

    def _version(self, db: sqlite3.Connection) -> int:
        [(mark,)] = db.execute("PRAGMA application_id")
        [(version,)] = db.execute("PRAGMA user_version")
        [(things,)] = db.execute("SELECT count(*) FROM sqlite_master")
        if mark != APPLICATION and (mark or version or things):
            raise StoreError(f"{self._path} is a database, but not of a perdure store")
        known = len(self._migrations)
        if version < 0:
            raise self._damaged(f"it says to be of version {version}")
        if version > known:
            raise StoreVersionError(
                f"{self._path} is of version {version}, this perdure knows up to {known}: update perdure",
                found=version,
                known=known,
            )
        return int(version)

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except _ERRORS as error:
            raise self._store_error(error) from error

    def _store_error(self, error: UnicodeDecodeError | sqlite3.Error) -> StoreError:
        if isinstance(error, UnicodeDecodeError):
            # Of a text that was damaged, or of the words with which SQLite says that one was.
            return self._damaged(error)
        if isinstance(error, sqlite3.ProgrammingError):
            return StoreError(f"the index {self._path} cannot be used: {error}")
        name = getattr(error, "sqlite_errorname", None) or "SQLITE_ERROR"
        # What SQLite maps into memory fails as a broken disk does where there is no room for it.
        if name.startswith("SQLITE_FULL") or (name.startswith("SQLITE_IOERR") and self._disk_is_full()):
            return StoreFullError(f"the disk is full: no room for {self._path}. Free some space", needed=0)
        if name.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_CANTOPEN", "SQLITE_AUTH")):
            return StoreReadOnlyError(f"cannot open {self._path}: {error}")
        # Our statements are right, so one that makes no sense to SQLite met a table that is not.
        if name in ("SQLITE_ERROR", "SQLITE_NOTADB") or name.startswith(("SQLITE_CORRUPT", "SQLITE_CONS")):
            return self._damaged(error)
        return StoreError(f"the index {self._path} failed: {error}")

    def _disk_is_full(self) -> bool:
        """Whether a piece of SQLite's shared memory has no room beside the file any more."""
        with suppress(OSError):
            return self._path is not None and shutil.disk_usage(self._path.parent).free < _PIECE
        return False

    def _damaged(self, why: object) -> StoreDamagedError:
        return StoreDamagedError(f"the index {self._path} is damaged ({why}): {self._advice}")


def _migrate(db: sqlite3.Connection, number: int, statements: str) -> None:
    """Take the index from version `number` to the next, or leave it."""
    db.execute("BEGIN IMMEDIATE")
    try:
        for statement in statements.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {number + 1}")
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
