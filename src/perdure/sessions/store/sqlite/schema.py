"""Sessions in SQLite: the tables with their migrations, its own words of SQL, and numbers."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.errors import CorruptStateError
from perdure.sessions.store.sql.database import Dialect
from perdure.sessions.store.sql.rows import (
    ADVICE,
    MEMORY_COLUMNS,
    SESSION_COLUMNS,
    TURN_COLUMNS,
    row_checksum,
)
from perdure.store.index import Index

TURN_BYTES = (
    "length(CAST(t.messages AS BLOB)) + coalesce(length(CAST(t.reply AS BLOB)), 0)"
    " + length(CAST(t.text AS BLOB)) + length(t.tokens) + length(t.cuts) + length(CAST(t.settings AS BLOB))"
)
"""What a turn takes, without the overhead of the database."""
DIALECT = Dialect(
    turn_bytes=TURN_BYTES,
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
    # What a namespace stores, for its quota.
    f"""
    CREATE TABLE usage (
        namespace TEXT PRIMARY KEY, sessions INTEGER NOT NULL, nbytes INTEGER NOT NULL
    ) WITHOUT ROWID;
    INSERT INTO usage {USAGE}
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
