"""The tree that a conversation and its branches make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.errors import CorruptStateError, InvalidInputError, SessionNotFoundError
from perdure.sessions.info import SessionInfo, SessionMemory
from perdure.sessions.storage.schema import ADVICE, MEMORY, SESSION, TURN_SEAL, seal
from perdure.sessions.storage.session_store import SessionStore

ID_BYTES = 16
"""Of a turn's digest, by which it is known in a tree."""
_SHOWN = 160
"""Characters of a message that are shown."""
_BRANCHES = 1000
"""Sessions and memories of one tree that are told, each."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeTurn:
    """A turn as it is shown in a tree: its place, which is proved, and the first words of it."""

    id: str
    parent: str | None
    depth: int
    kind: str
    said: str
    reply: str
    finish_reason: str
    created: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Turns that start alike, each after the one it follows, and what stands at them."""

    turns: Sequence[TreeTurn]
    sessions: Sequence[SessionInfo] = ()
    memories: Sequence[SessionMemory] = ()


def turn_id(digest: bytes) -> str:
    return digest[:ID_BYTES].hex()


def read_tree(store: SessionStore, session: SessionInfo, *, limit: int, after: str | None = None) -> Tree:
    """The tree that `session` is a branch of: up to `limit` turns, behind the one with the id `after`.
    Sessions and memories come with the first of them."""
    store.wait_checked()
    start = _number(store, session, after) if after is not None else -1
    rows = store.index.rows(
        f"{_TREE} SELECT {', '.join(f't.{column}' for column in TURN_SEAL)}, t.seal, p.digest, t.kind,"
        f" substr(json_extract(t.messages, '$[#-1].content'), 1, {_SHOWN}),"
        f" substr(json_extract(t.reply, '$.content'), 1, {_SHOWN}), t.finish_reason, t.created"
        " FROM tree JOIN turn t ON t.number = tree.number LEFT JOIN turn p ON p.number = t.parent"
        " WHERE t.number > ? ORDER BY t.number LIMIT ?",
        session.head,
        start,
        limit,
    )
    turns = []
    for *place, sealed, before, kind, said, reply, reason, created in rows:
        if seal(*place) != sealed:
            raise CorruptStateError(f"a turn of session {session.name!r} is damaged: {ADVICE}")
        turns.append(
            TreeTurn(
                id=turn_id(place[3]),
                parent=turn_id(before) if before is not None else None,
                depth=place[2],
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
    sessions = store.index.rows(
        f"{_TREE} {SESSION} WHERE s.head {standing.format('s', 's')}", session.head, session.namespace
    )
    memories = store.index.rows(
        f"{_TREE} {MEMORY} WHERE m.turn {standing.format('m', 'm')}", session.head, session.namespace
    )
    return Tree(
        turns=turns,
        sessions=[store.proved_session(row) for row in sessions],
        memories=[store.memories.proved(row) for row in memories],
    )


def _number(store: SessionStore, session: SessionInfo, id_: str) -> int:
    """The number of a turn of the tree, by its id."""
    try:
        wanted = bytes.fromhex(id_)
    except ValueError:
        wanted = b""
    if len(wanted) != ID_BYTES:
        raise InvalidInputError(f"after is the id of a turn, {2 * ID_BYTES} hexadecimal digits, got {id_!r}")
    found = store.index.rows(
        f"{_TREE} SELECT t.number FROM tree JOIN turn t ON t.number = tree.number"
        f" WHERE substr(t.digest, 1, {ID_BYTES}) = ?",
        session.head,
        wanted,
    )
    if not found:
        raise SessionNotFoundError(f"there is no turn {id_} in the tree of session {session.name!r}")
    return int(found[0][0])
