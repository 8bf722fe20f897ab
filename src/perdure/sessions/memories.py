"""Memories: labelled turns of sessions, which can be woken by their address."""

from __future__ import annotations

from collections.abc import Callable

from perdure.errors import AmbiguousError, SessionNotFoundError
from perdure.sessions.info import SessionMemory, parse_address
from perdure.sessions.session import Session
from perdure.sessions.store.base import SessionStore

_READ_AT_ONCE = 64
"""Memories that are read at a time for a page of them."""
_MANY = 20
"""How many addresses the error lists where one must be chosen."""


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
        last = self.get(after, namespace).number if after is not None else 0
        return self._store.memories(
            namespace, label=label, kind=kind, session=session, text=text, limit=limit, after=last
        )

    def page(
        self,
        *,
        limit: int,
        nbytes: int,
        label: str | None = None,
        kind: str | None = None,
        text: str | None = None,
        session: str | None = None,
        namespace: str = "",
        after: str | None = None,
    ) -> tuple[list[SessionMemory], bool]:
        """What `search` finds, up to `limit` memories and `nbytes` of them together, but one at least; and
        whether there are more. A few are read at a time."""
        page: list[SessionMemory] = []
        last = self.get(after, namespace).number if after is not None else 0
        size = 0
        while True:
            count = min(_READ_AT_ONCE, limit + 1 - len(page))
            more = self._store.memories(
                namespace, label=label, kind=kind, session=session, text=text, limit=count, after=last
            )
            for memory in more:
                size += memory.nbytes
                if page and (len(page) == limit or size > nbytes):
                    return page, True
                page.append(memory)
            if len(more) < count:
                return page, False
            last = more[-1].number

    def get(self, address: str, namespace: str = "") -> SessionMemory:
        name, turn, label = parse_address(address)
        memories = self._store.memories(namespace, session=name, turn=turn, label=label)
        if not memories:
            raise SessionNotFoundError(f"there is no memory at {address}")
        return memories[0]

    def wake(self, address: str | None, name: str, *, namespace: str = "") -> Session:
        """A new session at a memory. Without an address there must be exactly one memory."""
        return self._wake(
            self.get(address, namespace) if address is not None else self._only(namespace), name
        )

    def forget(self, address: str, namespace: str = "") -> None:
        self._store.forget(self.get(address, namespace))

    def _only(self, namespace: str) -> SessionMemory:
        memories = self.search(namespace=namespace, limit=_MANY)
        if not memories:
            raise SessionNotFoundError("there is no memory yet: label a turn of a session first")
        if len(memories) > 1:
            many = f"{len(memories)} memories" if len(memories) < _MANY else "many memories"
            raise AmbiguousError(
                f"there are {many}: give the address of one", found=[memory.address for memory in memories]
            )
        return memories[0]
