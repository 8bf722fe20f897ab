"""Labelled turns of sessions, that can be woken by their address."""

from __future__ import annotations

from collections.abc import Callable

from perdure.errors import AmbiguousError, SessionNotFoundError
from perdure.sessions.info import SessionMemory, parse_address
from perdure.sessions.session import Session
from perdure.sessions.storage.schema import valid_text
from perdure.sessions.storage.session_store import SessionStore

_MANY = 20
"""How many addresses are told where one must be chosen."""


_LOOKED_AT = 64
"""How many memories are looked through for a text in one go."""


class Memories:
    """The index of memories. Safe from any thread."""

    def __init__(self, store: SessionStore, wake: Callable[[SessionMemory, str], Session]) -> None:
        self._store = store
        self._wake = wake

    def search(
        self,
        *,
        label: str | None = None,
        kind: str | None = None,
        text: str | None = None,
        session: str | None = None,
        namespace: str = "",
        limit: int | None = None,
        after: str | None = None,
    ) -> list[SessionMemory]:
        """Those that fit everything given, the oldest first; `text` is looked for in notes and in what was
        said. Up to `limit` of them, behind the one with the address `after`."""
        where, values = ["m.namespace = ?"], [namespace]
        for column, value in (("label", label), ("kind", kind), ("session", session)):
            if value is not None:
                where.append(f"m.{column} = ?")
                values.append(value)
        last = self.get(after, namespace).number if after is not None else 0
        if text is None:
            where.append(f"m.number > {last}")
            return self._store.memories.find(" AND ".join(where), *values, limit=limit)
        with valid_text():
            text.encode()
        where.append("(instr(lower(m.note), lower(?)) OR instr(lower(t.text), lower(?)))")
        found: list[SessionMemory] = []
        # A few at a time: all their texts are read, and others wait for the index meanwhile.
        while page := self._store.memories.numbers(namespace, after=last, limit=_LOOKED_AT):
            within = [*where, f"m.number > {last}", f"m.number <= {page[-1]}"]
            left = None if limit is None else limit - len(found)
            found += self._store.memories.find(" AND ".join(within), *values, text, text, limit=left)
            last = page[-1]
            if len(found) == limit:
                break
        return found

    def get(self, address: str, namespace: str = "") -> SessionMemory:
        name, turn, label = parse_address(address)
        found = self._store.memories.find(
            "m.namespace = ? AND m.session = ? AND m.depth = ? AND m.label = ?", namespace, name, turn, label
        )
        if not found:
            raise SessionNotFoundError(f"there is no memory at {address}")
        return found[0]

    def wake(self, address: str | None, name: str, *, namespace: str = "") -> Session:
        """A new session at a memory. Without an address there must be exactly one memory."""
        return self._wake(
            self.get(address, namespace) if address is not None else self._only(namespace), name
        )

    def forget(self, address: str, namespace: str = "") -> None:
        self._store.forget(self.get(address, namespace))

    def _only(self, namespace: str) -> SessionMemory:
        found = self.search(namespace=namespace, limit=_MANY)
        if not found:
            raise SessionNotFoundError("there is no memory yet: label a turn of a session first")
        if len(found) > 1:
            many = f"{len(found)} memories" if len(found) < _MANY else "many memories"
            raise AmbiguousError(
                f"there are {many}: give the address of one", found=[memory.address for memory in found]
            )
        return found[0]
