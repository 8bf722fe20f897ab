"""The tables of sessions, and what proves their rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

Value = str | int | float | bytes | None
"""What a column can hold."""
RESPONSE = "response"
"""The kind of a session that is a stored response."""


def seal(*values: Value) -> bytes:
    """What proves a row: SQLite has no checksums, so a bit that turns over on the disk is read as it lies.

    Also a function of our SQL, `seal(...)`.
    """
    plain = [["bytes", value.hex()] if isinstance(value, bytes) else value for value in values]
    return hashlib.sha256(b"perdure/row/1\0" + json.dumps(plain).encode()).digest()


def turn_seal(number: int, parent: int | None, depth: int, digest: Value) -> bytes:
    """The `seal` of a turn's place, made faster: on the way to a start, every turn's is checked."""
    if not isinstance(digest, bytes):
        return b""
    above = "null" if parent is None else parent
    place = f'[{number}, {above}, {depth}, ["bytes", "{digest.hex()}"]]'
    return hashlib.sha256(b"perdure/row/1\0" + place.encode()).digest()


TURN_SEAL = ("number", "parent", "depth", "digest")
"""Its place. What was said is proved by the digest, which is also over all that led there."""
SESSION_SEAL = (
    "number",
    "namespace",
    "name",
    "kind",
    "head",
    "settings",
    "origin",
    "created",
    "updated",
)
"""And then the depth and the digest of the turn at which it stands."""
MEMORY_SEAL = (
    "number",
    "namespace",
    "session",
    "turn",
    "depth",
    "label",
    "kind",
    "note",
    "digest",
    "created",
)

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
    UPDATE turn SET seal = seal({", ".join(TURN_SEAL)});
    ALTER TABLE session ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
    UPDATE session SET seal = seal({", ".join(SESSION_SEAL)},
        (SELECT depth FROM turn WHERE turn.number = head),
        (SELECT digest FROM turn WHERE turn.number = head));
    ALTER TABLE memory ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
    UPDATE memory SET seal = seal({", ".join(MEMORY_SEAL)});
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
)
