"""Sessions, turns and memories, in SQLite: every change as one transaction."""

from __future__ import annotations

import builtins
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock

from perdure.errors import (
    CorruptStateError,
    SessionError,
    SessionExistsError,
    SessionNotFoundError,
)
from perdure.sessions.info import SessionInfo, SessionMemory
from perdure.sessions.storage.memory_table import MemoryTable
from perdure.sessions.storage.schema import (
    ADVICE,
    MIGRATIONS,
    RESPONSE,
    SAYING,
    SESSION,
    SESSION_SEAL,
    Counters,
    Value,
    json_text,
    read_session,
    row_limit,
    seal,
    text_rows,
    valid_text,
)
from perdure.sessions.storage.session_folder import SessionFolder
from perdure.sessions.storage.turn_table import TurnTable
from perdure.sessions.turn import FIRST, Turn
from perdure.store.durable import make_folder, translate_os_errors
from perdure.store.index import Index, TableCheck
from perdure.store.locks import TurnLocks, UseLock

_OPENING, _PATIENCE = "sessions.opening", 60.0
"""Held while a database is created, migrated and checked; and how many seconds one waits for others."""


class SessionStore:
    """The durable part of sessions. For any thread.

    Always holds: a turn is written once and whole, after the one before it; a session names a turn that is
    there; turns that nothing leads to any more go with what last led to them. Each row is proved when it is
    read, and one that is not what it was is refused. Numbers of sessions, turns and memories are never
    given out again, and a change of a session checks its number, namespace and name. Several processes may
    write to one: a change is a transaction, and sees what the others have done.
    """

    def __init__(self, folder: Path | None, *, readonly: bool = False) -> None:
        """In `folder`, or without one in memory."""
        self.readonly = readonly
        self.folder = folder
        self._files = SessionFolder(folder) if folder is not None else None
        self._turn_locks: TurnLocks | None = None
        with ExitStack() as held, ExitStack() as opening:
            known = ""
            if folder is not None and self._files is not None:
                if not readonly:
                    make_folder(folder)
                    lock = FileLock(folder / _OPENING, timeout=_PATIENCE, thread_local=False, mode=0o600)
                    with translate_os_errors(folder):
                        opening.enter_context(lock)
                    use = UseLock(folder)
                    held.callback(use.release)
                    if use.first:
                        # Of processes that were killed.
                        self._files.clear_transfers()
                    self._turn_locks = TurnLocks(folder)
                    held.callback(self._turn_locks.close)
                known = self._files.mark()
                self._files.check_there(known)
            self.index = Index(
                self._files.database if self._files is not None else None,
                readonly=readonly,
                migrations=MIGRATIONS,
                functions={"seal": seal},
                advice=f"{ADVICE}; else restore it from a copy",
            )
            held.callback(self.index.close)
            # These have a few rows each, however much is kept.
            for table in ("register", "counter"):
                self.index.check(table)
            # So that none of these is missed: what is found through an index is all there is.
            self._check = TableCheck(self.index, ("session", "memory"))
            held.callback(self._check.close)
            self.counters = Counters(self.index)
            self.turns = TurnTable(self.index, self.counters)
            self.memories = MemoryTable(self.index, self.counters, self._check)
            self.key: bytes | None = secrets.token_bytes(32)
            """What seals exports, so that the state in them is known again. None where it may not be made."""
            if self._files is not None:
                own = next((row[0] for row in self.index.rows("SELECT id FROM register")), None)
                self._files.check_own(own, known, readonly=readonly)
                self.key = self._files.key(readonly=readonly)
            self._held = held.pop_all()

    def close(self) -> None:
        self._held.close()

    def transfers(self) -> Path | None:
        """The folder for files on their way in or out; None where the store has none, or may not be
        written."""
        return None if self._files is None or self.readonly else self._files.transfers()

    # Sessions.

    def create(
        self,
        namespace: str,
        name: str,
        turns: Sequence[Turn] = (),
        *,
        head: int | None = None,
        digest: bytes = FIRST,
        kind: str = "session",
        settings: Mapping[str, Any] | None = None,
        origin: Mapping[str, Any] | None = None,
        replaces: SessionInfo | None = None,
    ) -> SessionInfo:
        """A new session: at a turn that is there and has that digest, followed by turns that are not yet.
        With `replaces`, that session goes in the same moment."""
        # Before the transaction: a name that is missed would be given away twice.
        self._check.wait()
        with self._writing():
            if replaces is not None:
                self._delete(replaces)
            return self._create(
                namespace,
                name,
                turns,
                head=head,
                digest=digest,
                kind=kind,
                settings=settings or {},
                origin=origin or {},
            )

    def _create(
        self,
        namespace: str,
        name: str,
        turns: Sequence[Turn],
        *,
        head: int | None = None,
        digest: bytes = FIRST,
        kind: str = "session",
        settings: Mapping[str, Any] = MappingProxyType({}),
        origin: Mapping[str, Any] = MappingProxyType({}),
    ) -> SessionInfo:
        """`create` within a transaction."""
        if self._find(namespace, name) is not None:
            raise SessionExistsError(
                f"there is a session {name!r} already: choose another name, or delete it"
            )
        if head is not None:
            self.turns.check(head, digest)
        for turn in turns:
            head = self.turns.add(head, turn)
        number, now = self.counters.next("session"), time.time()
        self.index.run(
            f"INSERT INTO session ({', '.join(SESSION_SEAL)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            number,
            namespace,
            name,
            kind,
            head,
            json_text(dict(settings)),
            json_text(dict(origin)),
            now,
            now,
        )
        self._seal(number)
        info = self._find(namespace, name)
        assert info is not None
        return info

    def find(self, namespace: str, name: str) -> SessionInfo:
        found = self._find(namespace, name)
        if found is None:
            raise SessionNotFoundError(f"there is no session {name!r}")
        return found

    def has(self, namespace: str, name: str) -> bool:
        return self._find(namespace, name) is not None

    def list(
        self,
        namespace: str | None = None,
        *,
        limit: int | None = None,
        after: SessionInfo | None = None,
        text: str | None = None,
    ) -> list[SessionInfo]:
        """The latest first: those of a namespace or all, up to `limit`, of those that come behind `after`.
        Stored responses are found by their ids, and not listed. With `text`, those that have it in their
        names or in what was said."""
        self._check.wait()
        # In these words: the indexes are of what they say.
        where, values = [f"s.kind != '{RESPONSE}'"], builtins.list[Value]()
        if namespace is not None:
            where.append("s.namespace = ?")
            values.append(namespace)
        if after is not None:
            where.append("(s.updated, s.number) < (?, ?)")
            values += [after.updated, after.number]
        if text is not None:
            where.append(f"(instr(lower(s.name), lower(?)) OR s.head IN ({SAYING}))")
            values += [text, namespace, namespace, text, text]
        rows = text_rows(
            self.index,
            f"{SESSION} WHERE {' AND '.join(where)} ORDER BY s.updated DESC, s.number DESC LIMIT ?",
            *values,
            row_limit(limit),
        )
        return [self.proved_session(row) for row in rows]

    def old_responses(self, before: float, *, limit: int) -> builtins.list[tuple[str, str]]:
        """Namespaces and names of stored responses that were last changed before a time, the oldest first."""
        rows = self.index.rows(
            f"SELECT namespace, name FROM session WHERE kind = '{RESPONSE}' AND updated < ?"
            " ORDER BY updated, number LIMIT ?",
            before,
            limit,
        )
        return [(namespace, name) for namespace, name in rows]

    def add(
        self,
        session: SessionInfo,
        turns: Sequence[Turn],
        *,
        parent: int,
        expected: int,
        follower: SessionInfo | None = None,
    ) -> Sequence[int]:
        """Make turns the latest of a session, behind turn number `parent`: all of them or none.

        Refused where the session does not stand at turn number `expected` any more. A `follower` that stands
        there too goes to the same turn.
        """
        with self._writing():
            before = self._standing(session, expected)
            following = self._standing(follower, expected) if follower is not None else None
            numbers: builtins.list[int] = []
            for turn in turns:
                parent = self.turns.add(parent, turn)
                numbers.append(parent)
            self._move(before, parent)
            if following is not None:
                self._move(following, parent)
            return numbers

    def note(self, session: SessionInfo, origin: Mapping[str, Any]) -> SessionInfo:
        """Write down something else of where a session comes from."""
        with self._writing():
            number = self._standing(session).number
            self.index.run("UPDATE session SET origin = ? WHERE number = ?", json_text(dict(origin)), number)
            self._seal(number)
            return self._standing(session)

    def move(self, session: SessionInfo, head: int, *, digest: bytes, expected: int) -> None:
        """Let a session stand at another turn. Refused as `add` is."""
        with self._writing():
            before = self._standing(session, expected)
            self.turns.check(head, digest)
            self._move(before, head)

    def delete(self, session: SessionInfo) -> None:
        with self._writing():
            self._delete(session)

    def head(self, session: SessionInfo) -> int:
        """The number of the turn at which a session stands now, whoever moved it."""
        rows = self.index.rows(
            "SELECT head FROM session WHERE number = ? AND namespace = ? AND name = ?",
            session.number,
            session.namespace,
            session.name,
        )
        if not rows:
            raise SessionNotFoundError(f"session {session.name!r} was deleted")
        return int(rows[0][0])

    def take(self, session: SessionInfo) -> bool:
        """Have a session for a turn or a change; False where another process, or another runtime of this
        one, has it. Within a runtime, sessions see to that themselves."""
        return self._turn_locks is None or self._turn_locks.take(session.number)

    def release(self, session: SessionInfo) -> None:
        if self._turn_locks is not None:
            self._turn_locks.release(session.number)

    def exists(self, session: SessionInfo) -> bool:
        """Whether that very session is still there, and not another one of its name."""
        found = self._find(session.namespace, session.name)
        return found is not None and found.number == session.number

    # Memories.

    def label(
        self, session: SessionInfo, turn: int, depth: int, digest: bytes, label: str, kind: str, note: str
    ) -> SessionMemory:
        """Remember turn number `turn` of a session, which must have that digest."""
        with self._writing():
            self._standing(session)
            self.turns.check(turn, digest)
            made, replaced = self.memories.add(session, turn, depth, digest, label, kind, note)
            for last in replaced:
                self._prune(last)
            return made

    def chain_of(self, memory: SessionMemory) -> tuple[Sequence[int], Sequence[Turn]]:
        """The turns that lead to a memory, if they are those that were remembered."""
        numbers, turns = self.turns.chain(self.memories.turn_of(memory), memory.session)
        if turns[-1].digest != memory.digest:
            raise CorruptStateError(
                f"what lies at {memory.address} is not what was remembered: its digest differs; "
                "nothing was woken"
            )
        return numbers, turns

    def forget(self, memory: SessionMemory) -> None:
        with self._writing():
            turn = self.memories.turn_of(memory)
            self.memories.drop(memory.number)
            self._prune(turn)

    def wait_checked(self) -> None:
        """Return when every page of the tables was found sound; raise where one is not."""
        self._check.wait()

    def proved_session(self, row: tuple[Any, ...]) -> SessionInfo:
        try:
            return read_session(row)
        except CorruptStateError as error:
            raise CorruptStateError(f"{error}: {ADVICE}") from error

    # Inside.

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._check.refuse_damaged()
        with valid_text(), self.index.writing():
            yield

    def _find(self, namespace: str, name: str) -> SessionInfo | None:
        rows = text_rows(self.index, f"{SESSION} WHERE s.namespace = ? AND s.name = ?", namespace, name)
        if not rows:
            self._check.wait()
            return None
        found = self.proved_session(rows[0])
        if (found.namespace, found.name) != (namespace, name):
            raise CorruptStateError(f"another session is found in the place of {name!r}: {ADVICE}")
        return found

    def _standing(self, session: SessionInfo, expected: int | None = None) -> SessionInfo:
        """That very session as it is now."""
        found = self.index.rows(
            f"{SESSION} WHERE s.number = ? AND s.namespace = ? AND s.name = ?",
            session.number,
            session.namespace,
            session.name,
        )
        if not found:
            raise SessionNotFoundError(f"session {session.name!r} was deleted")
        now = self.proved_session(found[0])
        if expected is not None and now.head != expected:
            raise SessionError(f"session {session.name!r} was changed meanwhile: nothing was done")
        return now

    def _delete(self, session: SessionInfo) -> None:
        found = self._standing(session)
        self.index.run("DELETE FROM session WHERE number = ?", found.number)
        self._prune(found.head)

    def _move(self, session: SessionInfo, head: int) -> None:
        # Later than before, whatever the clock says: lists are in this order.
        now = max(time.time(), session.updated)
        self.index.run("UPDATE session SET head = ?, updated = ? WHERE number = ?", head, now, session.number)
        self._seal(session.number)
        self._prune(session.head)

    def _seal(self, session: int) -> None:
        """After a change."""
        [(*said, _)] = self.index.rows(f"{SESSION} WHERE s.number = ?", session)
        self.index.run("UPDATE session SET seal = ? WHERE number = ?", seal(*said), session)

    def _prune(self, turn: int | None) -> None:
        """Delete a turn that nothing leads to any more, and then what led only to it."""
        while turn is not None:
            [(needed,)] = self.index.rows(
                "SELECT EXISTS (SELECT 1 FROM turn WHERE parent = ?)"
                " OR EXISTS (SELECT 1 FROM session WHERE head = ?)"
                " OR EXISTS (SELECT 1 FROM memory WHERE turn = ?)",
                *(turn,) * 3,
            )
            if needed:
                return
            # What leads to it must not have been missed.
            self._check.wait()
            found = self.index.rows("SELECT parent FROM turn WHERE number = ?", turn)
            self.index.run("DELETE FROM turn WHERE number = ?", turn)
            turn = found[0][0] if found else None
