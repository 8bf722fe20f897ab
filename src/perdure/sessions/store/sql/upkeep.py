"""What migration and verification need of a session store in SQL, besides the calls of every store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.errors import SessionNotFoundError
from perdure.sessions.info import SessionInfo, SessionMemory
from perdure.sessions.store.sql.store import SqlStore
from perdure.sessions.store.sql.tables import MEMORY, RECORD, SESSION
from perdure.sessions.turn import Turn


def bring_session(
    store: SqlStore, info: SessionInfo, turns: Sequence[Turn], *, head: int | None
) -> SessionInfo:
    """A session of another store: at turn number `head` of this one, followed by turns that are not here
    yet. All but its numbers is as it was there."""
    with store._writing(info.namespace):
        return store._stands(
            store._create(
                info.namespace,
                info.name,
                turns,
                head=head,
                digest=turns[0].before if turns else info.digest,
                kind=info.kind,
                settings=info.settings,
                origin=info.origin,
                created=info.created,
                updated=info.updated,
            )
        )


def bring_memory(store: SqlStore, memory: SessionMemory, turns: Sequence[Turn], *, head: int | None) -> None:
    """A memory of another store, whose turn is number `head` of this one, or the last of `turns`."""
    with store._writing(memory.namespace):
        before = turns[0].before if turns else memory.digest
        at = store._turns.check(head, before) if head is not None else None
        for turn in turns:
            at = store._add_turn(memory.namespace, at, turn)
        assert at is not None
        store._turns.check(at.head, memory.digest)
        replaced = store._forget_same(memory.namespace, memory.session, memory.turn, memory.label)
        store._usage.add(memory.namespace, "memory", store._memories.bring(memory, at.head).number)
        for last in replaced:
            store._prune(memory.namespace, last)


def store_id(store: SqlStore) -> str:
    """What no other store is called."""
    return str(store._db.rows("SELECT id FROM register")[0][0])


def has_turn(store: SqlStore, number: int, digest: bytes) -> bool:
    """Whether a turn is here, and is that very one."""
    try:
        store._turns.check(number, digest)
    except SessionNotFoundError:
        return False
    return True


def every_row(store: SqlStore) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """All rows of sessions with records, and of memories, proved by nothing yet."""
    return [*store._db.rows(SESSION), *store._db.rows(RECORD)], store._db.rows(MEMORY)


def check_turn(store: SqlStore, number: int, digest: bytes) -> None:
    """Raise unless a turn is what its checksum says, which those behind it believe."""
    store._turns.check(number, digest)
