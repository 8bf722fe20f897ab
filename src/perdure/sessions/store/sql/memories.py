"""The memories of a database: labels of turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from perdure.errors import CorruptStateError, SessionNotFoundError
from perdure.sessions.history import TurnReference
from perdure.sessions.info import SessionInfo, SessionMemory
from perdure.sessions.store.sql.database import Database, Dialect, Numbers
from perdure.sessions.store.sql.tables import (
    ADVICE,
    MEMORY,
    MEMORY_COLUMNS,
    Rows,
    Value,
    read_memory,
    row_checksum,
    row_limit,
    text_rows,
)

_SEARCHED = 64
"""Memories that a search reads at a time."""


Condition = tuple[str, *tuple[Value, ...]]
"""A condition in SQL, and its values."""


class MemoryTable:
    """Memories, a row each, proved when they are read. What a turn needs is for the session store to say."""

    def __init__(self, database: Database, dialect: Dialect, numbers: Numbers) -> None:
        self._db = database
        self._sql = dialect
        self._numbers = numbers

    def find(
        self, where: Sequence[Condition], *, after: int = 0, limit: int | None = None
    ) -> list[SessionMemory]:
        """Those that fit each condition, the oldest first. `m` is the memory and `t` its turn."""
        return self._fitting(self._db.rows, [*where, ("m.number > ?", after)], limit)

    def search(
        self, rows: Rows, where: Sequence[Condition], text: str, *, after: int, limit: int | None
    ) -> list[SessionMemory]:
        """Those that also have a text in their notes or turns, a few read at a time."""
        [namespace], matches = where[0][1:], list[SessionMemory]()
        has_text: Condition = (
            f"({self._sql.contains.format('m.note')} OR {self._sql.contains.format('t.text')})",
            text,
            text,
        )
        while page := rows(
            "SELECT number FROM memory WHERE namespace = ? AND number > ? ORDER BY number LIMIT ?",
            namespace,
            after,
            _SEARCHED,
        ):
            last = page[-1][0]
            within = [has_text, *where, ("m.number > ?", after), ("m.number <= ?", last)]
            left = None if limit is None else limit - len(matches)
            matches += self._fitting(rows, within, left)
            after = last
            if len(matches) == limit:
                break
        return matches

    def _fitting(self, rows: Rows, where: Sequence[Condition], limit: int | None) -> list[SessionMemory]:
        query = f"{MEMORY} WHERE {' AND '.join(each for each, *_ in where)} ORDER BY m.number LIMIT ?"
        values = [value for _, *bound in where for value in bound]
        return [self.proved(row) for row in text_rows(rows, query, *values, row_limit(limit))]

    def proved(self, row: tuple[Any, ...]) -> SessionMemory:
        try:
            return read_memory(row)
        except CorruptStateError as error:
            raise CorruptStateError(f"{error}: {ADVICE}") from error

    def turn_of(self, memory: SessionMemory) -> int:
        """The number of the turn that a memory is of."""
        rows = text_rows(
            self._db.rows,
            "SELECT turn FROM memory WHERE number = ? AND namespace = ? AND session = ? AND label = ?",
            memory.number,
            memory.namespace,
            memory.session,
            memory.label,
        )
        if not rows:
            raise SessionNotFoundError(f"the memory at {memory.address} is gone")
        return int(rows[0][0])

    def same(self, namespace: str, session: str, depth: int, label: str) -> list[tuple[Any, ...]]:
        """The number and the turn of the memory that has a label at a turn of a session, if one has."""
        return self._db.rows(
            "SELECT number, turn FROM memory WHERE namespace = ? AND session = ? AND depth = ? AND label = ?",
            *(namespace, session, depth, label),
        )

    def add(self, session: SessionInfo, at: TurnReference, label: str, kind: str, note: str) -> SessionMemory:
        """Write a memory. One of the same turn and label must be gone."""
        return self._write(session.namespace, session.name, at, label, kind, note, time.time())

    def bring(self, memory: SessionMemory, head: int) -> SessionMemory:
        """Write a memory of another store, of turn number `head` here."""
        at = TurnReference(head, memory.digest, memory.turn)
        columns = (memory.namespace, memory.session, at, memory.label, memory.kind, memory.note)
        return self._write(*columns, memory.created)

    def _write(
        self,
        namespace: str,
        session: str,
        at: TurnReference,
        label: str,
        kind: str,
        note: str,
        created: float,
    ) -> SessionMemory:
        columns: list[Value] = [self._numbers.next("memory"), namespace, session, at.head]
        columns += [at.depth, label, kind, note, at.digest, created]
        self._db.run(
            f"INSERT INTO memory ({', '.join(MEMORY_COLUMNS)}, seal)"
            f" VALUES ({', '.join('?' * len(MEMORY_COLUMNS))}, ?)",
            *columns,
            row_checksum(*columns),
        )
        return read_memory([*columns, row_checksum(*columns)])

    def drop(self, number: int) -> None:
        self._db.run("DELETE FROM memory WHERE number = ?", number)
