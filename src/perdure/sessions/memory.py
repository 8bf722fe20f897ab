"""Labelled points of sessions, that can be woken by their address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from perdure.errors import AmbiguousError, CorruptStateError, InvalidInputError, SessionNotFoundError
from perdure.sessions.schema import MEMORY_SEAL, seal
from perdure.sessions.session_store import ADVICE, SessionStore

if TYPE_CHECKING:
    from perdure.sessions.history import History
    from perdure.sessions.session import Session
    from perdure.sessions.sessions import Sessions
    from perdure.sessions.turn import Turn

_SCHEME = "perdure://"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A point of a session that somebody wants to come back to. `digest` proves what led there."""

    session: str
    turn: int
    label: str
    kind: str
    note: str
    digest: bytes
    created: float
    namespace: str = ""
    number: int = 0

    @property
    def address(self) -> str:
        return f"{_SCHEME}{quote(self.session, safe='')}/{self.turn}#{quote(self.label, safe='')}"


def parse_address(address: str) -> tuple[str, int, str]:
    """The session, turn and label of an address."""
    rest = address.removeprefix(_SCHEME)
    place, hash_, label = rest.partition("#")
    name, slash, turn = place.rpartition("/")
    if (
        rest == address
        or not (hash_ and slash and name and label)
        or not turn.isascii()
        or not turn.isdigit()
    ):
        raise InvalidInputError(f"{address!r} is no address: one looks like perdure://session/turn#label")
    return unquote(name), int(turn), unquote(label)


class Memories:
    """The index of memories. Safe from any thread."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def add(self, session: Session, point: History, label: str, *, kind: str, note: str) -> Memory:
        """Label a point of a session."""
        for name, value in (("label", label), ("kind", kind)):
            if not isinstance(value, str) or not value:
                raise InvalidInputError(f"a {name} is a text that is not empty, got {value!r}")
        turn, digest = len(point.turns) - 1, point.turns[-1].digest
        self._sessions.store.label(
            session.namespace, session.name, point.numbers[-1], turn, label, kind, note, digest
        )
        return self.get(
            f"{_SCHEME}{quote(session.name, safe='')}/{turn}#{quote(label, safe='')}", session.namespace
        )

    def search(
        self,
        *,
        label: str | None = None,
        kind: str | None = None,
        text: str | None = None,
        session: str | None = None,
        namespace: str = "",
    ) -> list[Memory]:
        """Those that fit everything given; `text` is looked for in notes and in what was said."""
        where, values = ["m.namespace = ?"], [namespace]
        for column, value in (("label", label), ("kind", kind), ("session", session)):
            if value is not None:
                where.append(f"m.{column} = ?")
                values.append(value)
        if text is not None:
            where.append("(instr(lower(m.note), lower(?)) OR instr(lower(t.text), lower(?)))")
            values += [text, text]
        return self._rows(" AND ".join(where), *values)

    def get(self, address: str, namespace: str = "") -> Memory:
        name, turn, label = parse_address(address)
        found = self._rows(
            "m.namespace = ? AND m.session = ? AND m.depth = ? AND m.label = ?", namespace, name, turn, label
        )
        if not found:
            raise SessionNotFoundError(f"there is no memory at {address}")
        return found[0]

    def wake(self, address: str | None, name: str, *, namespace: str = "") -> Session:
        """A new session at a memory. Without an address there must be exactly one memory."""
        memory = self.get(address, namespace) if address is not None else self._only(namespace)
        numbers, _ = proved(self._sessions.store, memory)
        return self._sessions.wake_at(memory, name, numbers[-1])

    def forget(self, address: str, namespace: str = "") -> None:
        self._sessions.store.forget(self.get(address, namespace).number)

    def _only(self, namespace: str) -> Memory:
        found = self.search(namespace=namespace)
        if not found:
            raise SessionNotFoundError("there is no memory yet: label a point of a session first")
        if len(found) > 1:
            raise AmbiguousError(
                f"there are {len(found)} memories: give the address of one",
                found=[memory.address for memory in found],
            )
        return found[0]

    def _rows(self, where: str, *values: Any) -> list[Memory]:
        rows = self._sessions.store.index.rows(f"{MEMORY} WHERE {where} ORDER BY m.number", *values)
        return [read_memory(row) for row in rows]


def proved(store: SessionStore, memory: Memory) -> tuple[Sequence[int], Sequence[Turn]]:
    """The turns that lead to a memory, if they are those that were remembered."""
    rows = store.index.rows("SELECT turn FROM memory WHERE number = ?", memory.number)
    if not rows:
        raise SessionNotFoundError(f"the memory at {memory.address} is gone")
    numbers, turns = store.chain(rows[0][0], memory.session)
    if turns[-1].digest != memory.digest:
        raise CorruptStateError(
            f"what lies at {memory.address} is not what was remembered: its digest differs; nothing was woken"
        )
    return numbers, turns


MEMORY = (
    f"SELECT {', '.join(f'm.{column}' for column in MEMORY_SEAL)}, m.seal"
    " FROM memory m LEFT JOIN turn t ON t.number = m.turn"
)


def read_memory(row: tuple[Any, ...]) -> Memory:
    """The memory in a row of `MEMORY`, if it is what its seal says."""
    said = dict(zip(MEMORY_SEAL, row, strict=False))
    if seal(*row[:-1]) != row[-1]:
        raise CorruptStateError(
            f"the memory {said['label']!r} of session {said['session']!r} is damaged: {ADVICE}"
        )
    del said["turn"]
    return Memory(turn=said.pop("depth"), **said)
