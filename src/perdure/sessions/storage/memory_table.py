"""The memories of a database: labels of turns."""

from __future__ import annotations

import time
from typing import Any

from perdure.errors import CorruptStateError, SessionNotFoundError
from perdure.sessions.info import SessionInfo, SessionMemory
from perdure.sessions.storage.schema import (
    ADVICE,
    MEMORY,
    MEMORY_SEAL,
    Counters,
    Value,
    read_memory,
    row_limit,
    seal,
    text_rows,
)
from perdure.store.index import Index, TableCheck


class MemoryTable:
    """Memories, a row each, proved when they are read. What a turn needs is for the session store to say."""

    def __init__(self, index: Index, counters: Counters, check: TableCheck) -> None:
        self._index = index
        self._counters = counters
        self._check = check

    def find(self, where: str, *values: Value, limit: int | None = None) -> list[SessionMemory]:
        """Those that fit, the oldest first. `m` is the memory and `t` its turn."""
        self._check.wait()
        query = f"{MEMORY} WHERE {where} ORDER BY m.number LIMIT ?"
        return [self.proved(row) for row in text_rows(self._index, query, *values, row_limit(limit))]

    def numbers(self, namespace: str, *, after: int, limit: int) -> list[int]:
        """The numbers of a namespace's memories, the lowest first: up to `limit`, behind number `after`."""
        self._check.wait()
        rows = text_rows(
            self._index,
            "SELECT number FROM memory WHERE namespace = ? AND number > ? ORDER BY number LIMIT ?",
            namespace,
            after,
            limit,
        )
        return [int(number) for (number,) in rows]

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
        self, session: SessionInfo, turn: int, depth: int, digest: bytes, label: str, kind: str, note: str
    ) -> tuple[SessionMemory, list[int]]:
        """Write a memory in the place of those of the same turn and label; and the turns of those."""
        key = (session.namespace, session.name, depth, label)
        there = "namespace = ? AND session = ? AND depth = ? AND label = ?"
        before = self._index.rows(f"SELECT number, turn FROM memory WHERE {there}", *key)
        for number, _ in before:
            self.drop(number)
        said: list[Value] = [self._counters.next("memory"), session.namespace, session.name, turn]
        said += [depth, label, kind, note, digest, time.time()]
        self._index.run(
            f"INSERT INTO memory ({', '.join(MEMORY_SEAL)}, seal)"
            f" VALUES ({', '.join('?' * len(MEMORY_SEAL))}, ?)",
            *said,
            seal(*said),
        )
        return read_memory([*said, seal(*said)]), [last for _, last in before]

    def drop(self, number: int) -> None:
        self._index.run("DELETE FROM memory WHERE number = ?", number)
