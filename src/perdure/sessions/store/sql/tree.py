"""The tree of turns that a session is a branch of, read from a database."""

from __future__ import annotations

from perdure.errors import CorruptStateError, SessionNotFoundError
from perdure.sessions.info import SessionInfo
from perdure.sessions.store.sql.database import Database, Dialect
from perdure.sessions.store.sql.memories import MemoryTable
from perdure.sessions.store.sql.tables import (
    ADVICE,
    MEMORY,
    RECORD,
    SESSION,
    TURN_COLUMNS,
    proved_session,
    row_checksum,
)
from perdure.sessions.tree import ID_BYTES, Tree, TreeTurn, parse_turn_id, turn_id

_SHOWN = 160
"""Characters of a message that are shown."""
_BRANCHES = 1000
"""Sessions of one tree that are listed, at most, and as many memories."""

# A turn is younger than the one before it: whatever was damaged, both walks end.
_TREE = """
    WITH RECURSIVE up (number, parent) AS (
        SELECT number, parent FROM turn WHERE number = ?
        UNION ALL SELECT t.number, t.parent FROM turn t JOIN up ON t.number = up.parent
        WHERE t.number < up.number
    ), tree (number) AS (
        SELECT number FROM up WHERE parent IS NULL
        UNION ALL SELECT t.number FROM tree JOIN turn t ON t.parent = tree.number
        WHERE t.number > tree.number
    )
"""


def read_tree(
    database: Database,
    sql: Dialect,
    session: SessionInfo,
    *,
    limit: int,
    after: str | None,
    memories: MemoryTable,
) -> Tree:
    """The tree that `session` is a branch of: up to `limit` turns, behind the one with the id `after`.
    Sessions and memories come with the first of them."""
    start = _number(database, session, after) if after is not None else -1
    rows = database.rows(
        f"{_TREE} SELECT {', '.join(f't.{column}' for column in TURN_COLUMNS)}, t.seal, p.digest, t.kind,"
        f" substr({sql.last_said}, 1, {_SHOWN}), substr({sql.replied}, 1, {_SHOWN}),"
        " t.finish_reason, t.created"
        " FROM tree JOIN turn t ON t.number = tree.number LEFT JOIN turn p ON p.number = t.parent"
        " WHERE t.number > ? ORDER BY t.number LIMIT ?",
        session.head,
        start,
        limit,
    )
    turns = []
    for *columns, checksum, before, kind, said, reply, reason, created in rows:
        if row_checksum(*columns) != checksum:
            raise CorruptStateError(f"a turn of session {session.name!r} is damaged: {ADVICE}")
        turns.append(
            TreeTurn(
                id=turn_id(columns[3]),
                parent=turn_id(before) if before is not None else None,
                depth=columns[2],
                kind=kind,
                said=said or "",
                reply=reply or "",
                finish_reason=reason,
                created=created,
            )
        )
    if after is not None:
        return Tree(turns=turns)
    standing = f"IN (SELECT number FROM tree) AND {{}}.namespace = ? ORDER BY {{}}.number LIMIT {_BRANCHES}"
    sessions = [
        row
        for table in (SESSION, RECORD)
        for row in database.rows(
            f"{_TREE} {table} WHERE s.head {standing.format('s', 's')}", session.head, session.namespace
        )
    ]
    labelled = database.rows(
        f"{_TREE} {MEMORY} WHERE m.turn {standing.format('m', 'm')}", session.head, session.namespace
    )
    return Tree(
        turns=turns,
        sessions=[proved_session(row) for row in sessions],
        memories=[memories.proved(row) for row in labelled],
    )


def _number(database: Database, session: SessionInfo, id_: str) -> int:
    """The number of a turn of the tree, by its id."""
    rows = database.rows(
        f"{_TREE} SELECT t.number FROM tree JOIN turn t ON t.number = tree.number"
        f" WHERE substr(t.digest, 1, {ID_BYTES}) = ?",
        session.head,
        parse_turn_id(id_),
    )
    if not rows:
        raise SessionNotFoundError(f"there is no turn {id_} in the tree of session {session.name!r}")
    return int(rows[0][0])
