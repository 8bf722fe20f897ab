"""Sessions in PostgreSQL: the tables with their migrations, its own words of SQL, and numbers.

The tables are those of SQLite (`sqlite/store`), with the same rows and checksums, and beside them leases and
the key of the cluster. JSON is kept as text: a checksum is over the bytes as written.
"""

from __future__ import annotations

from typing import NamedTuple

from perdure.spi.sessions import Database, Dialect


def _json(column: str) -> str:
    """A column of JSON text as a value. PostgreSQL has no NUL in any text, so one is shown as U+FFFD."""
    # A pair of backslashes is no escape of what follows: it is out of the way meanwhile, as a character that
    # JSON never has.
    clean = rf"replace(replace(replace({column}, '\\', chr(1)), '\u0000', '\ufffd'), chr(1), '\\')"
    return rf"(CASE WHEN strpos({column}, '\u0000') > 0 THEN {clean} ELSE {column} END)::json"


def _has(value: str) -> str:
    """The collation C: the lower case of ASCII letters alone, as in SQLite."""
    return f'strpos(lower({value} COLLATE "C"), lower(?::text COLLATE "C")) > 0'


DIALECT = Dialect(
    length="coalesce(octet_length({}), 0)",
    saying=f"""
        coalesce({_has(f"({_json('t.reply')} ->> 'content')")}, false) OR EXISTS (
            SELECT 1 FROM json_array_elements({_json("t.messages")}) AS said
            WHERE {_has("(said ->> 'content')")}
        )
    """,
    last_said=f"({_json('t.messages')} -> -1 ->> 'content')",
    replied=f"({_json('t.reply')} ->> 'content')",
    contains=_has("{}"),
)


class SchemaMigration(NamedTuple):
    """One step from the tables of a version to the next."""

    name: str
    statements: str


MIGRATIONS = (
    SchemaMigration(
        "sessions, turns and memories",
        """
        CREATE TABLE turn (
            number BIGINT PRIMARY KEY,
            parent BIGINT REFERENCES turn (number),
            depth INTEGER NOT NULL,
            kind TEXT COLLATE "C" NOT NULL,
            messages TEXT COLLATE "C" NOT NULL,
            reply TEXT COLLATE "C",
            keep_chars BIGINT NOT NULL,
            keep_tokens BIGINT NOT NULL,
            text TEXT COLLATE "C" NOT NULL,
            tokens BYTEA NOT NULL,
            cuts BYTEA NOT NULL,
            settings TEXT COLLATE "C" NOT NULL,
            seed BIGINT NOT NULL,
            finish_reason TEXT COLLATE "C" NOT NULL,
            usage TEXT COLLATE "C" NOT NULL,
            dropped BIGINT NOT NULL,
            model TEXT COLLATE "C" NOT NULL,
            created DOUBLE PRECISION NOT NULL,
            digest BYTEA NOT NULL,
            seal BYTEA NOT NULL
        );
        CREATE INDEX turn_parent ON turn (parent);
        CREATE TABLE session (
            number BIGINT PRIMARY KEY,
            namespace TEXT COLLATE "C" NOT NULL,
            name TEXT COLLATE "C" NOT NULL,
            kind TEXT COLLATE "C" NOT NULL,
            head BIGINT NOT NULL REFERENCES turn (number),
            settings TEXT COLLATE "C" NOT NULL,
            origin TEXT COLLATE "C" NOT NULL,
            created DOUBLE PRECISION NOT NULL,
            updated DOUBLE PRECISION NOT NULL,
            seal BYTEA NOT NULL DEFAULT '',
            UNIQUE (namespace, name)
        );
        CREATE INDEX session_head ON session (head);
        CREATE INDEX session_latest ON session (namespace, updated, number) WHERE kind != 'response';
        CREATE INDEX session_all ON session (updated, number) WHERE kind != 'response';
        CREATE INDEX session_response ON session (updated, number) WHERE kind = 'response';
        CREATE TABLE memory (
            number BIGINT PRIMARY KEY,
            namespace TEXT COLLATE "C" NOT NULL,
            session TEXT COLLATE "C" NOT NULL,
            turn BIGINT NOT NULL REFERENCES turn (number),
            depth INTEGER NOT NULL,
            label TEXT COLLATE "C" NOT NULL,
            kind TEXT COLLATE "C" NOT NULL,
            note TEXT COLLATE "C" NOT NULL,
            digest BYTEA NOT NULL,
            created DOUBLE PRECISION NOT NULL,
            seal BYTEA NOT NULL,
            UNIQUE (namespace, session, depth, label)
        );
        CREATE INDEX memory_turn ON memory (turn);
        CREATE INDEX memory_order ON memory (namespace, number);
        CREATE SEQUENCE turn_number;
        CREATE SEQUENCE session_number;
        CREATE SEQUENCE memory_number;
        CREATE TABLE usage (
            namespace TEXT COLLATE "C" PRIMARY KEY, sessions BIGINT NOT NULL, nbytes BIGINT NOT NULL
        )
        """,
    ),
    SchemaMigration(
        "leases, with a fencing token each",
        """
        CREATE SEQUENCE holder_number;
        CREATE TABLE lease (
            session BIGINT PRIMARY KEY REFERENCES session (number) ON DELETE CASCADE,
            token BIGINT NOT NULL,
            holder BIGINT,
            expires TIMESTAMPTZ NOT NULL
        );
        CREATE INDEX lease_holder ON lease (holder)
        """,
    ),
    SchemaMigration(
        "the key of the cluster",
        """
        CREATE TABLE register (one BOOLEAN PRIMARY KEY DEFAULT true CHECK (one), id TEXT NOT NULL,
            key BYTEA NOT NULL)
        """,
    ),
    SchemaMigration(
        "keys of clients, and what they have used",
        """
        CREATE TABLE api_key (
            digest TEXT COLLATE "C" PRIMARY KEY,
            line TEXT COLLATE "C",
            added TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp()
        );
        CREATE TABLE api_key_minute (
            digest TEXT COLLATE "C" PRIMARY KEY, times DOUBLE PRECISION[] NOT NULL
        );
        CREATE TABLE api_key_day (
            digest TEXT COLLATE "C" NOT NULL,
            day INTEGER NOT NULL,
            requests BIGINT NOT NULL,
            prompt_tokens BIGINT NOT NULL,
            cached_tokens BIGINT NOT NULL,
            completion_tokens BIGINT NOT NULL,
            PRIMARY KEY (digest, day)
        )
        """,
    ),
    SchemaMigration(
        "records of streams by their age",
        "CREATE INDEX session_stream ON session (updated, number) WHERE kind = 'stream'",
    ),
    # Counted anew here once, and with the table of records again.
    SchemaMigration(
        "what namespaces store, with all that sessions and memories have besides turns", "DELETE FROM usage"
    ),
    SchemaMigration(
        "stored responses and records of streams apart from sessions",
        f"""
        CREATE TABLE record (
            number BIGINT PRIMARY KEY,
            namespace TEXT COLLATE "C" NOT NULL,
            name TEXT COLLATE "C" NOT NULL,
            kind TEXT COLLATE "C" NOT NULL,
            head BIGINT REFERENCES turn (number),
            settings TEXT COLLATE "C" NOT NULL,
            origin TEXT COLLATE "C" NOT NULL,
            created DOUBLE PRECISION NOT NULL,
            updated DOUBLE PRECISION NOT NULL,
            seal BYTEA NOT NULL,
            UNIQUE (namespace, kind, name)
        );
        INSERT INTO record SELECT number, namespace, name, kind, head, settings, origin, created, updated,
            seal FROM session WHERE kind IN ('response', 'stream');
        ALTER TABLE lease DROP CONSTRAINT lease_session_fkey;
        DELETE FROM session WHERE kind IN ('response', 'stream');
        CREATE INDEX record_head ON record (head);
        CREATE INDEX record_age ON record (kind, updated, number);
        DROP INDEX session_latest, session_all, session_response, session_stream;
        CREATE INDEX session_latest ON session (namespace, updated, number);
        CREATE INDEX session_all ON session (updated, number);
        DELETE FROM usage;
        INSERT INTO usage {DIALECT.usage_without_files}
        """,
    ),
    SchemaMigration(
        "files that turns name",
        """
        CREATE TABLE file (
            number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            namespace TEXT COLLATE "C" NOT NULL,
            digest TEXT COLLATE "C" NOT NULL,
            data BYTEA NOT NULL,
            checksum BYTEA NOT NULL,
            created DOUBLE PRECISION NOT NULL,
            UNIQUE (namespace, digest)
        );
        CREATE TABLE turn_file (
            turn BIGINT NOT NULL REFERENCES turn (number),
            file BIGINT NOT NULL REFERENCES file (number),
            PRIMARY KEY (turn, file)
        );
        CREATE INDEX turn_file_file ON turn_file (file)
        """,
    ),
)


class Sequences:
    """Numbers out of PostgreSQL's sequences: one that was drawn is never drawn again, also by a transaction
    that did not end well."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def next(self, table: str) -> int:
        [(number,)] = self._db.rows("SELECT nextval(?::text::regclass)", f"{table}_number")
        return int(number)

    def check(self) -> None:
        """Nothing to prove: PostgreSQL logs a sequence ahead of what it gives out."""
