"""All the conversations of a runtime."""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from perdure.backend import Backend
from perdure.chat.chat_format import ChatFormat
from perdure.chat.message import Message
from perdure.errors import InvalidInputError, PerdureError, SessionError
from perdure.sessions.history import History
from perdure.sessions.memory import Memories, Memory
from perdure.sessions.rows import SessionInfo
from perdure.sessions.session import Session
from perdure.sessions.session_store import SessionStore
from perdure.sessions.turn import Turn

_SAVED_AT_ONCE = 256
"""Tokens that a session has grown by when its state is next written."""


class Sessions:
    """Opens sessions by their names, one object a session. Safe from any thread."""

    def __init__(self, backend: Backend, chat_format: Callable[[], ChatFormat], store: Path | None) -> None:
        self.backend = backend
        self.store = SessionStore(store)
        self.memories = Memories(self)
        self._chat_format = chat_format
        self._durable = store is not None
        self._lock = threading.RLock()
        self._open: weakref.WeakValueDictionary[tuple[str, str], Session] = weakref.WeakValueDictionary()

    @property
    def chat_format(self) -> ChatFormat:
        return self._chat_format()

    def open(
        self,
        name: str,
        *,
        system: str | None = None,
        namespace: str = "",
        create: bool = True,
        settings: Mapping[str, Any] | None = None,
    ) -> Session:
        """The session of that name, or a new one."""
        if not isinstance(name, str) or not name:
            raise InvalidInputError(f"a session's name is a text that is not empty, got {name!r}")
        with self._lock:
            if not self.store.has(namespace, name):
                if not create:
                    self.store.find(namespace, name)
                start = Turn(
                    kind="start",
                    messages=(Message(role="system", content=system),) if system is not None else (),
                )
                self.store.create(namespace, name, [start], settings=settings)
            session = self._opened(self.store.find(namespace, name))
            if system is not None and session.system != system:
                raise SessionError(
                    f"session {name!r} has another system message: leave it out to go on with that one, or "
                    "choose another name"
                )
            if settings and dict(settings) != dict(session.settings):
                raise SessionError(
                    f"session {name!r} has other settings: leave them out, or give them with each turn"
                )
            return session

    def get(self, name: str, namespace: str = "") -> Session:
        """The session of that name; an error where there is none."""
        return self.open(name, namespace=namespace, create=False)

    def list(self, namespace: str = "") -> list[SessionInfo]:
        """Those of a namespace, the latest first."""
        return self.store.list(namespace)

    def import_(
        self,
        path: str | Path,
        name: str | None = None,
        *,
        namespace: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> Session:
        """A session out of a file that `Session.export` wrote, all of it verified first."""
        from perdure.sessions.export import read_export

        export = read_export(Path(path), progress=progress)
        with self._lock:
            row = self.store.create(
                namespace,
                name or export.name,
                export.turns,
                kind=export.kind,
                settings=export.settings,
                origin={"how": "import", "session": export.name, "turn": len(export.turns) - 1},
            )
        if export.identity is not None and export.blocks:
            # State that does not fit here is computed anew; the text has come over.
            with suppress(PerdureError):
                self.backend.cache.unpack(export.identity, export.blocks, namespace=namespace)
        return self._opened(row)

    def copy(self, session: Session, name: str, *, replace: bool = False) -> Session:
        """A session of another runtime, with all its turns, under a name here; or in the place of the one
        that has that name."""
        with self._lock:
            if replace and self.store.has(session.namespace, _name(name)):
                self.get(name, session.namespace).delete()
            row = self.store.create(
                session.namespace,
                _name(name),
                session._history.turns,
                kind=session.kind,
                settings=session.settings,
                origin=session.origin,
            )
            return self._opened(row)

    def close(self) -> None:
        self.store.close()

    # For sessions.

    def branch(
        self,
        session: Session,
        name: str,
        point: History,
        *,
        how: str,
        turns: Sequence[Turn] = (),
        kind: str = "session",
    ) -> Session:
        with self._lock:
            row = self.store.create(
                session.namespace,
                _name(name),
                turns,
                head=point.numbers[-1],
                kind=kind,
                settings=session.settings,
                origin={"how": how, "session": session.name, "turn": len(point.turns) - 1},
            )
            return self._opened(row)

    def wake_at(self, memory: Memory, name: str, head: int) -> Session:
        with self._lock:
            row = self.store.create(
                memory.namespace,
                _name(name),
                head=head,
                origin={"how": "wake", "session": memory.session, "turn": memory.turn, "label": memory.label},
            )
            return self._opened(row)

    def remove(self, session: Session) -> None:
        with self._lock:
            self.store.delete(session._row.number)
            self._open.pop((session.namespace, session.name), None)

    def write_behind(self, tokens: array[int], namespace: str, saved: int) -> int:
        """Have the state of a session written now and then, when nobody waits for the engine.

        A few turns at a time: reading a state out of the engine takes longer the longer it is. What is not
        written when the process dies is computed from the turns, which are.
        """
        if self._durable and len(tokens) - saved >= _SAVED_AT_ONCE and self.backend.load == (0, 0):
            with suppress(PerdureError):
                self.backend.cache.save(tokens, namespace=namespace)
                return len(tokens)
        return saved

    def _opened(self, row: SessionInfo) -> Session:
        key = (row.namespace, row.name)
        with self._lock:
            session = self._open.get(key)
            if session is None:
                session = self._open[key] = Session.open(self, row)
            return session


def _name(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise InvalidInputError(f"a session's name is a text that is not empty, got {name!r}")
    return name
