"""Labelled turns of sessions, that can be woken by their address."""

from __future__ import annotations

from collections.abc import Callable

from perdure.errors import AmbiguousError, SessionNotFoundError
from perdure.sessions.info import SessionMemory, parse_address
from perdure.sessions.session import Session
from perdure.sessions.store.base import SessionStore

_MANY = 20
"""How many addresses are told where one must be chosen."""


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

    def get(self, address: str, namespace: str = "") -> SessionMemory:
        name, turn, label = parse_address(address)
        found = self._store.memories(namespace, session=name, turn=turn, label=label)
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
