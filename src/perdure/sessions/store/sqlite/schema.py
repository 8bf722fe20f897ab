"""The tables of sessions, turns and memories: migrations, and rows, each proved when it is read."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from perdure.chat.message import Message
from perdure.chat.transcript import Transcript
from perdure.checks import is_whole
from perdure.errors import CorruptStateError, InvalidInputError
from perdure.sessions.info import SessionInfo, SessionMemory
from perdure.sessions.turn import Turn, pack_tokens
from perdure.store.index import Index

Rows = Callable[..., list[tuple[Any, ...]]]
"""Runs a query with its values."""
Value = str | int | float | bytes | None
"""What a column can hold."""


def row_checksum(*values: Value) -> bytes:
    """What proves a row: SQLite has no checksums, so a bit that turns over on the disk is read as it lies.

    It lies in the column `seal`, and the SQL of migrations knows it by that name.
    """
    plain = [["bytes", value.hex()] if isinstance(value, bytes) else value for value in values]
    return hashlib.sha256(b"perdure/row/1\0" + json.dumps(plain).encode()).digest()


def turn_checksum(number: int, parent: int | None, depth: int, digest: Value) -> bytes:
    """The `row_checksum` of a turn, made faster: on the way to a start, every turn's is checked."""
    if not isinstance(digest, bytes):
        return b""
    above = "null" if parent is None else parent
    place = f'[{number}, {above}, {depth}, ["bytes", "{digest.hex()}"]]'
    return hashlib.sha256(b"perdure/row/1\0" + place.encode()).digest()


TURN_COLUMNS = ("number", "parent", "depth", "digest")
"""Its place. What was said is proved by the digest, which is also over all that led there."""
SESSION_COLUMNS = (
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
MEMORY_COLUMNS = (
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

TURN_BYTES = (
    "length(CAST(t.messages AS BLOB)) + coalesce(length(CAST(t.reply AS BLOB)), 0)"
    " + length(CAST(t.text AS BLOB)) + length(t.tokens) + length(t.cuts) + length(CAST(t.settings AS BLOB))"
)
"""What a turn takes, without the overhead of the database."""
USAGE = f"""
    WITH RECURSIVE up (namespace, number) AS (
        SELECT namespace, head FROM session UNION SELECT namespace, turn FROM memory
        UNION SELECT up.namespace, t.parent FROM up JOIN turn t ON t.number = up.number
        WHERE t.parent IS NOT NULL
    )
    SELECT up.namespace, (SELECT count(*) FROM session s WHERE s.namespace = up.namespace),
    sum({TURN_BYTES}) FROM up JOIN turn t ON t.number = up.number GROUP BY up.namespace
"""
"""What each namespace stores: sessions, and bytes of the turns that they and its memories lead to."""

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


SESSION = (
    f"SELECT {', '.join(f's.{column}' for column in SESSION_COLUMNS)}, t.depth, t.digest, s.seal"
    " FROM session s LEFT JOIN turn t ON t.number = s.head"
)
TURN = (
    "t.number, t.kind, t.messages, t.reply, t.keep_chars, t.keep_tokens, t.text, t.tokens, t.cuts,"
    " t.settings, t.seed, t.finish_reason, t.usage, t.dropped, t.model, t.created, t.digest"
)
_FIELDS = (
    "kind, messages, reply, keep_chars, keep_tokens, text, tokens, cuts, settings, seed, finish_reason,"
    " usage, dropped, model, created, digest"
)
MEMORY = (
    f"SELECT {', '.join(f'm.{column}' for column in MEMORY_COLUMNS)}, m.seal"
    " FROM memory m LEFT JOIN turn t ON t.number = m.turn"
)
SAYING = """
    WITH RECURSIVE own (number, parent) AS (
        SELECT t.number, t.parent FROM turn t WHERE t.number IN ({heads})
        UNION SELECT t.number, t.parent FROM own JOIN turn t ON t.number = own.parent
    )
    SELECT own.number, own.parent, instr(lower(json_extract(t.reply, '$.content')), lower(?))
    OR EXISTS (
        SELECT 1 FROM json_each(t.messages) WHERE instr(lower(json_extract(value, '$.content')), lower(?))
    )
    FROM own JOIN turn t ON t.number = own.number ORDER BY own.number
"""
"""The turns that lead to some heads, those before others first, and whether a text was said in each."""
INSERT_TURN = (
    f"INSERT INTO turn (number, parent, depth, {_FIELDS}, seal)"
    f" VALUES ({', '.join('?' * (len(_FIELDS.split(',')) + 4))})"
)
ADVICE = "`perdure sessions verify` keeps what can be proved and puts the rest aside"


def text_rows(index: Index, query: str, *values: Value) -> list[tuple[Any, ...]]:
    """Rows found by what a caller gave, which may be no text at all."""
    with valid_text():
        return index.rows(query, *values)


@contextmanager
def valid_text() -> Iterator[None]:
    """Within it, text that UTF-8 cannot write is told as the caller's mistake."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"this is not valid Unicode text: {error}") from None


def row_limit(limit: int | None) -> int:
    """How many rows a query returns at most: SQLite takes -1 for all."""
    if limit is None:
        return -1
    if not is_whole(limit) or not 0 < limit < 2**31:
        raise InvalidInputError(f"limit is None or a number from 1, got {limit!r}")
    return limit


def read_session(row: Sequence[Value]) -> SessionInfo:
    """The session in a row of `SESSION`."""
    *said, depth, digest, found = row
    number, namespace, name, kind, head, settings, origin, created, updated = said
    if row_checksum(*said, depth, digest) != found:
        raise CorruptStateError(f"the entry of session {name!r} is damaged, or the turn it names is gone")
    # What is proved was once written by us.
    return SessionInfo(
        number=number,  # type: ignore[arg-type]
        namespace=namespace,  # type: ignore[arg-type]
        name=name,  # type: ignore[arg-type]
        kind=kind,  # type: ignore[arg-type]
        head=head,  # type: ignore[arg-type]
        depth=depth,  # type: ignore[arg-type]
        settings=json.loads(settings),  # type: ignore[arg-type]
        origin=json.loads(origin),  # type: ignore[arg-type]
        created=created,  # type: ignore[arg-type]
        updated=updated,  # type: ignore[arg-type]
        digest=digest,  # type: ignore[arg-type]
    )


def proved_session(row: Sequence[Any]) -> SessionInfo:
    """`read_session`, with what to do where it is damaged."""
    try:
        return read_session(row)
    except CorruptStateError as error:
        raise CorruptStateError(f"{error}: {ADVICE}") from error


def read_memory(row: Sequence[Any]) -> SessionMemory:
    """The memory in a row of `MEMORY`, if it is what its checksum says."""
    said = dict(zip(MEMORY_COLUMNS, row, strict=False))
    if row_checksum(*row[:-1]) != row[-1]:
        raise CorruptStateError(f"the memory {said['label']!r} of session {said['session']!r} is damaged")
    del said["turn"]
    return SessionMemory(turn=said.pop("depth"), **said)


def read_turn(row: Sequence[Any], before: bytes) -> Turn:
    """The turn in a row of `TURN`, if it is what its digest says."""
    turn = parse_turn(row, before)
    if turn.digest != row[-1]:
        raise CorruptStateError("is not what its digest says: it was damaged or replaced")
    return turn


def parse_turn(row: Sequence[Any], before: bytes) -> Turn:
    """What a row of `TURN` says, proved by nothing yet."""
    _, kind, messages, reply, chars, tokens, text, ids, cuts, settings, seed, *rest = row
    reason, usage, dropped, model, created, _ = rest
    try:
        figures = array("q", cuts)
        turn = Turn(
            kind=kind,
            messages=tuple(Message.parse(message) for message in json.loads(messages)),
            reply=Message.parse(json.loads(reply)) if reply is not None else None,
            keep=(chars, tokens),
            added=Transcript(text, array("i", ids), tuple(zip(figures[::2], figures[1::2], strict=True))),
            settings=json.loads(settings),
            seed=seed,
            finish_reason=reason,
            usage=json.loads(usage),
            dropped=dropped,
            model=model,
            created=created,
            before=before,
        )
        turn.digest  # noqa: B018
    except (TypeError, ValueError, AttributeError, RecursionError, InvalidInputError) as error:
        raise CorruptStateError(f"is damaged ({error})") from error
    return turn


def json_text(value: Mapping[str, Any]) -> str:
    """A column of JSON that anybody can be shown; `InvalidInputError` where it could not be."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return json.dumps(value)
    except UnicodeEncodeError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"this cannot be written as JSON: {error}") from None


def turn_values(number: int, parent: int | None, depth: int, turn: Turn) -> list[Value]:
    """What `INSERT_TURN` writes."""
    cuts = array("q", [figure for cut in turn.added.cuts for figure in cut])
    digest = turn.digest
    return [
        number,
        parent,
        depth,
        turn.kind,
        json.dumps([message.to_dict() for message in turn.messages]),
        json.dumps(turn.reply.to_dict()) if turn.reply is not None else None,
        *turn.keep,
        turn.added.text,
        pack_tokens(turn.added.tokens),
        cuts.tobytes(),
        json.dumps(dict(turn.settings)),
        turn.seed,
        turn.finish_reason,
        json.dumps(dict(turn.usage)),
        turn.dropped,
        turn.model,
        turn.created,
        digest,
        row_checksum(number, parent, depth, digest),
    ]


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
