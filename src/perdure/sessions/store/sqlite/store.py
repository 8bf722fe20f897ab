"""The session store in SQLite: a database in the folder of a store, or in memory.

Below in this order: the tables with their migrations and SQLite's own words of SQL, and the store itself. Its
calls are in `sql/store`, the files of its folder in `folder`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.atomic import (
    make_folder,
)
from perdure.errors import CorruptStateError, StoreLockedError
from perdure.sessions.info import Record
from perdure.sessions.store.sql.database import Check, Dialect, NeverDamaged
from perdure.sessions.store.sql.store import SqlStore
from perdure.sessions.store.sql.tables import (
    ADVICE,
    MEMORY_COLUMNS,
    SESSION_COLUMNS,
    TURN_COLUMNS,
    row_checksum,
)
from perdure.store.index import Index

if TYPE_CHECKING:
    from perdure.sessions.store.sqlite.folder import SessionFolder, TurnLocks

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


class SqliteStore(SqlStore):
    """`SessionStore` in a folder, or without one in memory. For any thread.

    SQLite lets one process write at a time, so no namespace is locked; locks of turns are the system's and
    end with a process, so no lease runs out.
    """

    def __init__(self, folder: Path | None, *, readonly: bool = False) -> None:
        """In `folder`, or without one in memory."""
        self.readonly = readonly
        self.is_shared = folder is not None
        self._files: SessionFolder | None = None
        self._turn_locks: TurnLocks | None = None
        if folder is not None:
            from perdure.sessions.store.sqlite.folder import SessionFolder

            self._files = SessionFolder(folder)
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
                    from perdure.sessions.store.sqlite.folder import TurnLocks, UseLock, opening_lock

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
            check: Check = NeverDamaged()
            if self._files is not None:
                from perdure.store.table_check import TableCheck

                check = table_check = TableCheck(self.index, ("session", "record", "memory"))
                stack.callback(table_check.close)
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
