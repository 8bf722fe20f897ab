"""The memories of a database: labels of turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from perdure.errors import CorruptStateError, SessionNotFoundError
from perdure.sessions.history import TurnReference
from perdure.sessions.info import SessionInfo, SessionMemory
from perdure.sessions.store.sqlite.schema import (
    ADVICE,
    MEMORY,
    MEMORY_COLUMNS,
    Counters,
    Rows,
    Value,
    read_memory,
    row_checksum,
    row_limit,
    text_rows,
    valid_text,
)
from perdure.store.index import Index

_SEARCHED = 64
"""Memories that a search reads at a time."""


class MemoryTable:
    """Memories, a row each, proved when they are read. What a turn needs is for the session store to say."""

    def __init__(self, index: Index, counters: Counters) -> None:
        self._index = index
        self._counters = counters

    def find(
        self, where: Sequence[tuple[str, Value]], *, after: int = 0, limit: int | None = None
    ) -> list[SessionMemory]:
        """Those that fit each condition, the oldest first. `m` is the memory and `t` its turn."""
        return self._fitting(self._index.rows, [*where, ("m.number > ?", after)], limit)

    def search(
        self, rows: Rows, where: Sequence[tuple[str, Value]], text: str, *, after: int, limit: int | None
    ) -> list[SessionMemory]:
        """Those that also have a text in their notes or turns, a few read at a time."""
        namespace, matches = where[0][1], list[SessionMemory]()
        has_text = (
            "(SELECT instr(lower(m.note), sought) OR instr(lower(t.text), sought)"
            " FROM (SELECT lower(?) AS sought))",
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

    def _fitting(
        self, rows: Rows, where: Sequence[tuple[str, Value]], limit: int | None
    ) -> list[SessionMemory]:
        query = f"{MEMORY} WHERE {' AND '.join(each for each, _ in where)} ORDER BY m.number LIMIT ?"
        with valid_text():
            return [self.proved(row) for row in rows(query, *(value for _, value in where), row_limit(limit))]

    def proved(self, row: tuple[Any, ...]) -> SessionMemory:
        try:
            return read_memory(row)
        except CorruptStateError as error:
            raise CorruptStateError(f"{error}: {ADVICE}") from error

    def turn_of(self, memory: SessionMemory) -> int:
        """The number of the turn that a memory is of."""
        rows = text_rows(
            self._index,
            "SELECT turn FROM memory WHERE number = ? AND namespace = ? AND session = ? AND label = ?",
            memory.number,
            memory.namespace,
            memory.session,
            memory.label,
        )
        if not rows:
            raise SessionNotFoundError(f"the memory at {memory.address} is gone")
        return int(rows[0][0])

    def add(
        self, session: SessionInfo, at: TurnReference, label: str, kind: str, note: str
    ) -> tuple[SessionMemory, list[int]]:
        """Write a memory in the place of those of the same turn and label; and the turns of those."""
        key = (session.namespace, session.name, at.depth, label)
        there = "namespace = ? AND session = ? AND depth = ? AND label = ?"
        before = self._index.rows(f"SELECT number, turn FROM memory WHERE {there}", *key)
        for number, _ in before:
            self.drop(number)
        said: list[Value] = [self._counters.next("memory"), session.namespace, session.name, at.head]
        said += [at.depth, label, kind, note, at.digest, time.time()]
        self._index.run(
            f"INSERT INTO memory ({', '.join(MEMORY_COLUMNS)}, seal)"
            f" VALUES ({', '.join('?' * len(MEMORY_COLUMNS))}, ?)",
            *said,
            row_checksum(*said),
        )
        return read_memory([*said, row_checksum(*said)]), [last for _, last in before]

    def drop(self, number: int) -> None:
        self._index.run("DELETE FROM memory WHERE number = ?", number)
