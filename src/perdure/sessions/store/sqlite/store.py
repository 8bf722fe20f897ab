"""The session store in SQLite: a database in the folder of a store, or in memory.

Below in this order: the tables with their migrations and SQLite's own words of SQL, the files of a folder,
the locks between processes, and the store itself. Its calls are in `sql/store`.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from perdure import system
from perdure.atomic import (
    TABLE_BYTES,
    make_folder,
    read_file,
    read_text,
    sync_folder,
    translate_os_errors,
    write_file,
)
from perdure.errors import CorruptStateError, StoreDamagedError, StoreLockedError
from perdure.sessions.info import Record
from perdure.sessions.store.sql.database import Dialect
from perdure.sessions.store.sql.store import SqlStore
from perdure.sessions.store.sql.tables import (
    ADVICE,
    MEMORY_COLUMNS,
    SESSION_COLUMNS,
    TURN_COLUMNS,
    row_checksum,
)
from perdure.store.index import Index, TableCheck

DIALECT = Dialect(
    length="coalesce(length(CAST({} AS BLOB)), 0)",
    saying="""
        instr(lower(json_extract(t.reply, '$.content')), lower(?)) OR EXISTS (
            SELECT 1 FROM json_each(t.messages) WHERE instr(lower(json_extract(value, '$.content')), lower(?))
        )
    """,
    last_said="json_extract(t.messages, '$[#-1].content')",
    replied="json_extract(t.reply, '$.content')",
    contains="instr(lower({}), lower(?))",
)
USAGE = DIALECT.usage

MIGRATIONS: Sequence[str] = (
    """
    CREATE TABLE turn (
        number INTEGER PRIMARY KEY,
        parent INTEGER REFERENCES turn (number),
        depth INTEGER NOT NULL,
        kind TEXT NOT NULL,
        messages TEXT NOT NULL,
        reply TEXT,
        keep_chars INTEGER NOT NULL,
        keep_tokens INTEGER NOT NULL,
        text TEXT NOT NULL,
        tokens BLOB NOT NULL,
        cuts BLOB NOT NULL,
        settings TEXT NOT NULL,
        seed INTEGER NOT NULL,
        finish_reason TEXT NOT NULL,
        usage TEXT NOT NULL,
        dropped INTEGER NOT NULL,
        model TEXT NOT NULL,
        created REAL NOT NULL,
        digest BLOB NOT NULL
    );
    CREATE INDEX turn_parent ON turn (parent);
    CREATE TABLE session (
        number INTEGER PRIMARY KEY,
        namespace TEXT NOT NULL,
        name TEXT NOT NULL,
        kind TEXT NOT NULL,
        head INTEGER NOT NULL REFERENCES turn (number),
        settings TEXT NOT NULL,
        origin TEXT NOT NULL,
        created REAL NOT NULL,
        updated REAL NOT NULL,
        UNIQUE (namespace, name)
    );
    CREATE INDEX session_head ON session (head);
    CREATE TABLE memory (
        number INTEGER PRIMARY KEY,
        namespace TEXT NOT NULL,
        session TEXT NOT NULL,
        turn INTEGER NOT NULL REFERENCES turn (number),
        depth INTEGER NOT NULL,
        label TEXT NOT NULL,
        kind TEXT NOT NULL,
        note TEXT NOT NULL,
        digest BLOB NOT NULL,
        created REAL NOT NULL,
        UNIQUE (namespace, session, depth, label)
    );
    CREATE INDEX memory_turn ON memory (turn);
    """,
    f"""
    ALTER TABLE turn ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
    UPDATE turn SET seal = seal({", ".join(TURN_COLUMNS)});
    ALTER TABLE session ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
    UPDATE session SET seal = seal({", ".join(SESSION_COLUMNS)},
        (SELECT depth FROM turn WHERE turn.number = head),
        (SELECT digest FROM turn WHERE turn.number = head));
    ALTER TABLE memory ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
    UPDATE memory SET seal = seal({", ".join(MEMORY_COLUMNS)});
    CREATE TABLE register (id TEXT NOT NULL);
    INSERT INTO register VALUES (lower(hex(randomblob(16))))
    """,
    # The last number that was given out, so that none is given out again; and the order of lists.
    """
    CREATE TABLE counter (name TEXT PRIMARY KEY, last INTEGER NOT NULL, seal BLOB NOT NULL) WITHOUT ROWID;
    INSERT INTO counter SELECT 'session', n, seal('session', n)
        FROM (SELECT coalesce(max(number), 0) AS n FROM session);
    INSERT INTO counter SELECT 'turn', n, seal('turn', n)
        FROM (SELECT coalesce(max(number), 0) AS n FROM turn);
    INSERT INTO counter SELECT 'memory', n, seal('memory', n)
        FROM (SELECT coalesce(max(number), 0) AS n FROM memory);
    CREATE INDEX session_latest ON session (namespace, updated, number);
    CREATE INDEX session_all ON session (updated, number);
    CREATE INDEX memory_order ON memory (namespace, number)
    """,
    # Lists leave out stored responses, of which there may be many more than of anything else; and these are
    # found by their age.
    """
    DROP INDEX session_latest;
    DROP INDEX session_all;
    CREATE INDEX session_latest ON session (namespace, updated, number) WHERE kind != 'response';
    CREATE INDEX session_all ON session (updated, number) WHERE kind != 'response';
    CREATE INDEX session_response ON session (updated, number) WHERE kind = 'response'
    """,
    # What a namespace stores, for its quota: counted below.
    """
    CREATE TABLE usage (
        namespace TEXT PRIMARY KEY, sessions INTEGER NOT NULL, nbytes INTEGER NOT NULL
    ) WITHOUT ROWID""",
    # Records of streams by their age.
    "CREATE INDEX session_stream ON session (updated, number) WHERE kind = 'stream'",
    # What a namespace stores was counted anew here, and is below.
    "DELETE FROM usage",
    # Stored responses and records of streams apart from sessions: their rows prove themselves as before.
    f"""
    CREATE TABLE record (
        number INTEGER PRIMARY KEY,
        namespace TEXT NOT NULL,
        name TEXT NOT NULL,
        kind TEXT NOT NULL,
        head INTEGER REFERENCES turn (number),
        settings TEXT NOT NULL,
        origin TEXT NOT NULL,
        created REAL NOT NULL,
        updated REAL NOT NULL,
        seal BLOB NOT NULL,
        UNIQUE (namespace, kind, name)
    );
    INSERT INTO record SELECT {", ".join(SESSION_COLUMNS)}, seal FROM session
        WHERE kind IN ('response', 'stream');
    DELETE FROM session WHERE kind IN ('response', 'stream');
    CREATE INDEX record_head ON record (head);
    CREATE INDEX record_age ON record (kind, updated, number);
    DROP INDEX session_latest;
    DROP INDEX session_all;
    DROP INDEX session_response;
    DROP INDEX session_stream;
    CREATE INDEX session_latest ON session (namespace, updated, number);
    CREATE INDEX session_all ON session (updated, number);
    DELETE FROM usage;
    INSERT INTO usage {DIALECT.usage_without_files}
    """,
    # Files that turns name: images.
    """
    CREATE TABLE file (
        number INTEGER PRIMARY KEY,
        namespace TEXT NOT NULL,
        digest TEXT NOT NULL,
        data BLOB NOT NULL,
        checksum BLOB NOT NULL,
        created REAL NOT NULL,
        UNIQUE (namespace, digest)
    );
    CREATE TABLE turn_file (
        turn INTEGER NOT NULL REFERENCES turn (number),
        file INTEGER NOT NULL REFERENCES file (number),
        PRIMARY KEY (turn, file)
    ) WITHOUT ROWID;
    CREATE INDEX turn_file_file ON turn_file (file)
    """,
)


class Counters:
    """The last number of each table. A number is never given out again."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def next(self, table: str) -> int:
        """A number that nothing in `table` has or ever had."""
        number = self._last(table) + 1
        self._index.run(
            "UPDATE counter SET last = ?, seal = ? WHERE name = ?", number, row_checksum(table, number), table
        )
        return number

    def check(self) -> None:
        """Prove what says which numbers were given out: `CorruptStateError` where it is damaged."""
        for table in ("session", "turn", "memory"):
            self._last(table)

    def _last(self, table: str) -> int:
        rows = self._index.rows("SELECT last, seal FROM counter WHERE name = ?", table)
        if not rows or row_checksum(table, rows[0][0]) != rows[0][1]:
            raise CorruptStateError(f"the last number of a {table} is damaged: {ADVICE}")
        return int(rows[0][0])


FILE, MARK, MENDED, KEY = "sessions.sqlite", "sessions.id", "sessions.mended", "sessions.key"
"""The database; whose it is; what a repair that was interrupted has left; what signs exports."""
TRANSFERS = "transfers"
"""The folder of files that are on their way in or out."""
_BEFORE = "sessions.version-{}.sqlite"
"""The database as it was before it was migrated from a version."""
_BEFORE_DAYS = 7
"""That it stays: sessions that are deleted meanwhile are still in it."""

logger = logging.getLogger("perdure.sessions")


@dataclass(frozen=True, slots=True)
class SessionFolder:
    """Where a session store lies. A database of another store is not taken for this one's."""

    path: Path

    @property
    def database(self) -> Path:
        return self.path / FILE

    def transfers(self) -> Path:
        """The folder for files on their way in or out."""
        folder = self.path / TRANSFERS
        make_folder(folder, ours=True)
        if system.is_root():
            # A backup that root makes must not keep the store's own user out.
            owner = self.path.stat()
            os.chown(folder, owner.st_uid, owner.st_gid)
        return folder

    def clear_leftovers(self) -> None:
        """Remove what killed processes have left, and copies of older versions that have been kept long
        enough."""
        shutil.rmtree(self.path / TRANSFERS, ignore_errors=True)
        with translate_os_errors(self.path):
            for path in self.path.glob(_BEFORE.format("*")):
                if path.stat().st_mtime < time.time() - _BEFORE_DAYS * 86400:
                    path.unlink(missing_ok=True)

    def keep_version(self, index: Index, version: int) -> None:
        """Copy the database before it is migrated from a version: whole, or not at all."""
        copy, kept = self.transfers() / _BEFORE.format(version), self.path / _BEFORE.format(version)
        index.copy_to(copy)
        with translate_os_errors(kept):
            os.replace(copy, kept)
        sync_folder(self.path)
        logger.warning(
            "the sessions in %s are migrated to this version of perdure; %s has them as they were and is "
            "deleted after %d days",
            self.path,
            kept.name,
            _BEFORE_DAYS,
        )

    def mark(self) -> str:
        """Whose the database must be; nothing is known of one that is new."""
        with translate_os_errors(self.path / MARK):
            try:
                return read_text(self.path / MARK, errors="replace").strip()
            except FileNotFoundError:
                return ""

    def check_there(self, known: str) -> None:
        """Raise where a database that was here is gone, or is being repaired."""
        if (self.path / MENDED).exists():
            raise StoreDamagedError(
                f"a repair of the sessions in {self.path} was interrupted: `perdure sessions verify` ends it"
            )
        with translate_os_errors(self.database):
            gone = known and not (self.database.exists() and self.database.stat().st_size)
        if gone:
            raise StoreDamagedError(
                f"{self.database} is gone: restore it from a copy, or delete {MARK} beside it to begin "
                "without any session"
            )

    def check_own(self, own: object, known: str, *, readonly: bool) -> None:
        """Raise where the database with the id `own` is another store's; one that is new is marked."""
        if not isinstance(own, str) or not own or (known and own != known):
            raise StoreDamagedError(
                f"{self.database} is not the one that was here: restore it from a copy, or if it is to take "
                f"its place, delete {MARK} beside it"
            )
        if not known and not readonly:
            self._write(MARK, own.encode())

    def key(self, *, readonly: bool) -> bytes | None:
        """The store's own secret: it never leaves the folder."""
        path = self.path / KEY
        with translate_os_errors(path):
            try:
                key = read_file(path, TABLE_BYTES)
            except FileNotFoundError:
                key = b""
        if len(key) == 32:
            return key
        if readonly:
            return None
        # Without it, or if it was damaged, older exports are still read, but their state is not known again.
        made = secrets.token_bytes(32)
        self._write(KEY, made)
        return made

    def _write(self, name: str, content: bytes) -> None:
        write_file(self.path / name, [content])
        sync_folder(self.path)


# Locks between the processes that use one store. The system drops them with a process, however it ends.

USERS, TURNS = "sessions.users", "sessions.turns"


class UseLock:
    """Held while a store's sessions are in use: by many at once, or by one that needs them `alone`.

    A process opens a store while no other does: `first` is whether nobody else had it then.
    """

    def __init__(self, folder: Path, *, alone: bool = False) -> None:
        from perdure.store.owner import described

        self._handle = _opened(folder / USERS)
        self.first = system.lock_file(self._handle)
        # Windows shares no locks: there, one process has a store alone.
        if not (self.first if alone or not system.POSIX else system.lock_file(self._handle, shared=True)):
            os.close(self._handle)
            raise StoreLockedError(
                f"the sessions in {folder} are in use by {described(folder)}: close that one, or choose "
                "another store"
            )

    def release(self) -> None:
        os.close(self._handle)


@dataclass(slots=True, eq=False)
class _LockFile:
    """The lock file of one store in this process. It is open once: the system would drop all locks on it as
    soon as any handle to it is closed."""

    handle: int
    users: int = 0
    taken: set[int] = field(default_factory=set)


_FILES: dict[str, _LockFile] = {}
_CHANGING = threading.RLock()
"""Reentrant: the garbage collector may drop a job, and so release its session, in the middle of a call."""


class TurnLocks:
    """Which sessions are answering a turn or are being changed, over all processes that use a store."""

    def __init__(self, folder: Path) -> None:
        self._path = os.path.realpath(folder / TURNS)
        with _CHANGING:
            if self._path not in _FILES:
                _FILES[self._path] = _LockFile(_opened(folder / TURNS))
            self._file = _FILES[self._path]
            self._file.users += 1
        self._taken: set[int] = set()
        """Those that were taken through this one: others of this process have theirs in the same file."""

    def take(self, session: int) -> bool:
        """Have the session of that number until `release`; False where another has it."""
        with _CHANGING:
            if session in self._file.taken or not system.lock_byte(self._file.handle, session):
                return False
            self._file.taken.add(session)
            self._taken.add(session)
            return True

    def release(self, session: int) -> None:
        with _CHANGING:
            # A job may outlive the runtime that it was for, and release what another has taken since.
            if session in self._taken and _FILES.get(self._path) is self._file:
                self._taken.discard(session)
                self._file.taken.discard(session)
                system.unlock_byte(self._file.handle, session)

    def close(self) -> None:
        with _CHANGING:
            for session in list(self._taken):
                self.release(session)
            self._file.users -= 1
            if not self._file.users:
                del _FILES[self._path]
                os.close(self._file.handle)


def _opened(path: Path) -> int:
    with translate_os_errors(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | system.BINARY, 0o600)


_OPENING, _PATIENCE = "sessions.opening", 60.0
"""Held while a database is created, migrated and checked; and how many seconds one waits for others."""


@contextmanager
def opening_lock(folder: Path) -> Iterator[None]:
    """While this is open, no other process opens the sessions in `folder` for writing."""
    lock = FileLock(folder / _OPENING, timeout=_PATIENCE, thread_local=False, mode=0o600)
    with ExitStack() as stack:
        with translate_os_errors(folder):
            stack.enter_context(lock)
        yield


class SqliteStore(SqlStore):
    """`SessionStore` in a folder, or without one in memory. For any thread.

    SQLite lets one process write at a time, so no namespace is locked; locks of turns are the system's and
    end with a process, so no lease runs out.
    """

    def __init__(self, folder: Path | None, *, readonly: bool = False) -> None:
        """In `folder`, or without one in memory."""
        self.readonly = readonly
        self.is_shared = folder is not None
        self._files = SessionFolder(folder) if folder is not None else None
        self._turn_locks: TurnLocks | None = None
        alone = False

        def before_migration(index: Index, version: int) -> None:
            from perdure.store.owner import described

            assert self._files is not None, "what is in memory is new"
            if not alone:
                # It would go on writing as its own version does.
                raise StoreLockedError(
                    f"the sessions in {folder} are of version {version}, and an older perdure uses them "
                    f"({described(self._files.path)}): close that one, and they are migrated when opened"
                )
            self._files.keep_version(index, version)

        with ExitStack() as stack, ExitStack() as opening:
            known = ""
            if folder is not None and self._files is not None:
                if not readonly:
                    make_folder(folder)
                    opening.enter_context(opening_lock(folder))
                    use = UseLock(folder)
                    stack.callback(use.release)
                    alone = use.first
                    if alone:
                        self._files.clear_leftovers()
                    self._turn_locks = TurnLocks(folder)
                    stack.callback(self._turn_locks.close)
                known = self._files.mark()
                self._files.check_there(known)
            self.index = Index(
                self._files.database if self._files is not None else None,
                readonly=readonly,
                migrations=MIGRATIONS,
                functions={"seal": row_checksum},
                advice=f"{ADVICE}; else restore it from a copy",
                erases=True,
                before_migration=before_migration,
            )
            stack.callback(self.index.close)
            # These have a few rows each, however much is kept.
            for table in ("register", "counter"):
                self.index.check(table)
            # So that none of these is missed: what is found through an index is all there is.
            check = TableCheck(self.index, ("session", "record", "memory"))
            stack.callback(check.close)
            super().__init__(self.index, DIALECT, Counters(self.index), check)
            self.key: bytes | None = secrets.token_bytes(32)
            """What signs exports, so that the state in them is known again. None where it may not be made."""
            if self._files is not None:
                own = next((row[0] for row in self.index.rows("SELECT id FROM register")), None)
                self._files.check_own(own, known, readonly=readonly)
                self.key = self._files.key(readonly=readonly)
            self._held = stack.pop_all()

    def close(self) -> None:
        self._held.close()

    def own_folder(self) -> Path | None:
        """The folder of the store; None where it has none, or may not be written."""
        return None if self._files is None or self.readonly else self._files.path

    def transfers(self) -> Path | None:
        """The folder for files on their way in or out; None where the store has none, or may not be
        written."""
        return None if self._files is None or self.readonly else self._files.transfers()

    def take(self, session: Record) -> bool:
        """Have a session for a turn or a change; False where another process, or another runtime of this
        one, has it. Within a runtime, sessions see to that themselves."""
        return self._turn_locks is None or self._turn_locks.take(session.number)

    def release(self, session: Record) -> None:
        if self._turn_locks is not None:
            self._turn_locks.release(session.number)
