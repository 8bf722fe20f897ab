"""Sessions, turns and memories, in SQLite."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from perdure.errors import (
    CorruptStateError,
    InvalidInputError,
    SessionExistsError,
    SessionNotFoundError,
    StoreDamagedError,
    StoreLockedError,
)
from perdure.sessions.rows import (
    INSERT_TURN,
    SESSION,
    TURN,
    SessionInfo,
    read_session,
    read_turn,
    turn_values,
)
from perdure.sessions.schema import MEMORY_SEAL, MIGRATIONS, SESSION_SEAL, TURN_SEAL, Value, seal
from perdure.sessions.turn import FIRST, Turn
from perdure.store.durable import explained, sync_folder, write_file
from perdure.store.index import Index

FILE, MARK, MENDED = "sessions.sqlite", "sessions.id", "sessions.mended"
"""The database; whose it is; and what a repair that was interrupted has left."""
ADVICE = "`perdure sessions verify` keeps what can be proved and puts the rest aside"


class SessionStore:
    """The durable part of sessions. For any thread.

    Always holds: a turn is written once and whole, after the one before it; a session names a turn that is
    there; turns that nothing leads to any more go with what last led to them. Each row is proved when it is
    read, and one that is not what it was is refused.
    """

    def __init__(self, folder: Path | None, *, readonly: bool = False) -> None:
        """In `folder`, or without one in memory."""
        self.readonly = readonly
        self.folder = folder
        with ExitStack() as held:
            known = ""
            if folder is not None:
                if not readonly:
                    with explained(folder):
                        folder.mkdir(parents=True, exist_ok=True)
                    held.callback(locked(folder).release)
                known = mark(folder)
                _check_there(folder, known)
            self.index = Index(
                folder / FILE if folder is not None else None,
                readonly=readonly,
                migrations=MIGRATIONS,
                functions={"seal": seal},
                advice=f"{ADVICE}; else restore it from a copy",
            )
            held.callback(self.index.close)
            # So that none of them is missed: what is found through an index is all there is.
            for table in ("session", "memory", "register"):
                self.index.check(table)
            if folder is not None:
                self._check_own(folder, known)
            self._held = held.pop_all()

    def close(self) -> None:
        self._held.close()

    # Sessions.

    def create(
        self,
        namespace: str,
        name: str,
        turns: Sequence[Turn] = (),
        *,
        head: int | None = None,
        kind: str = "session",
        settings: Mapping[str, Any] | None = None,
        origin: Mapping[str, Any] | None = None,
    ) -> SessionInfo:
        """A new session: at a turn that is there, followed by turns that are not yet."""
        now = time.time()
        with self._writing():
            if self._find(namespace, name) is not None:
                raise SessionExistsError(
                    f"there is a session {name!r} already: choose another name, or delete it"
                )
            for turn in turns:
                head = self._add(head, turn)
            number = self._next("session")
            self.index.run(
                f"INSERT INTO session ({', '.join(SESSION_SEAL)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                number,
                namespace,
                name,
                kind,
                head,
                json.dumps(dict(settings or {})),
                json.dumps(dict(origin or {})),
                now,
                now,
            )
            self._seal(number)
            row = self._find(namespace, name)
            assert row is not None
            return row

    def find(self, namespace: str, name: str) -> SessionInfo:
        found = self._find(namespace, name)
        if found is None:
            raise SessionNotFoundError(f"there is no session {name!r}")
        return found

    def has(self, namespace: str, name: str) -> bool:
        return self._find(namespace, name) is not None

    def list(self, namespace: str | None = None) -> list[SessionInfo]:
        """The latest first."""
        where, values = ("", ()) if namespace is None else ("WHERE s.namespace = ?", (namespace,))
        rows = self.index.rows(f"{SESSION} {where} ORDER BY s.updated DESC", *values)
        return [self._read(row) for row in rows]

    def chain(self, head: int, name: str = "") -> tuple[Sequence[int], Sequence[Turn]]:
        """The turns that lead to `head`, with it, each proved by its digest. `name` is whose they are."""
        rows = self.index.rows(
            "WITH RECURSIVE up (number, parent, level) AS ("
            " SELECT number, parent, 0 FROM turn WHERE number = ?"
            # A turn is younger than the one before it: whatever was damaged, this ends.
            " UNION ALL SELECT t.number, t.parent, level + 1 FROM turn t JOIN up ON t.number = up.parent"
            " WHERE t.number < up.number"
            f") SELECT {TURN} FROM up JOIN turn t ON t.number = up.number ORDER BY up.level DESC",
            head,
        )
        of = f"of session {name!r}" if name else "of a session"
        numbers: list[int] = []
        turns: list[Turn] = []
        before = FIRST
        for row in rows:
            try:
                turn = read_turn(row, before)
            except CorruptStateError as error:
                raise CorruptStateError(f"turn {len(turns)} {of} {error}: {ADVICE}") from error
            numbers.append(int(row[0]))
            turns.append(turn)
            before = turn.digest
        if not turns or turns[0].kind != "start":
            raise CorruptStateError(f"the turns {of} do not lead back to its start: {ADVICE}")
        return numbers, turns

    def add(self, session: int, parent: int, turn: Turn) -> int:
        """Make a turn the latest of a session."""
        with self._writing():
            head = self._add(parent, turn)
            self._move(session, head)
            return head

    def move(self, session: int, head: int) -> None:
        """Let a session stand at another turn."""
        with self._writing():
            self._move(session, head)

    def delete(self, session: int) -> None:
        with self._writing():
            found = self.index.rows("SELECT head FROM session WHERE number = ?", session)
            self.index.run("DELETE FROM session WHERE number = ?", session)
            for (head,) in found:
                self._prune(head)

    # Memories.

    def label(
        self,
        namespace: str,
        session: str,
        turn: int,
        depth: int,
        label: str,
        kind: str,
        note: str,
        digest: bytes,
    ) -> None:
        with self._writing():
            said: list[Value] = [self._next("memory"), namespace, session, turn, depth, label, kind, note]
            said += [digest, time.time()]
            there = "namespace = ? AND session = ? AND depth = ? AND label = ?"
            before = self.index.rows(
                f"SELECT turn FROM memory WHERE {there}", namespace, session, depth, label
            )
            self.index.run(
                f"INSERT OR REPLACE INTO memory ({', '.join(MEMORY_SEAL)}, seal)"
                f" VALUES ({', '.join('?' * len(MEMORY_SEAL))}, ?)",
                *said,
                seal(*said),
            )
            for (last,) in before:
                self._prune(last)

    def forget(self, memory: int) -> None:
        with self._writing():
            found = self.index.rows("SELECT turn FROM memory WHERE number = ?", memory)
            self.index.run("DELETE FROM memory WHERE number = ?", memory)
            for (turn,) in found:
                self._prune(turn)

    # Inside.

    def _check_own(self, folder: Path, known: str) -> None:
        """A database of another store is not taken for this one's."""
        own = next((row[0] for row in self.index.rows("SELECT id FROM register")), None)
        if not isinstance(own, str) or not own or (known and own != known):
            raise StoreDamagedError(
                f"{folder / FILE} is not the one that was here: restore it from a copy, or if it is to take "
                f"its place, delete {MARK} beside it"
            )
        if not known and not self.readonly:
            write_file(folder / MARK, [own.encode()])
            sync_folder(folder)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with self.index.writing():
                yield
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"this is not valid Unicode text: {error}") from None

    def _find(self, namespace: str, name: str) -> SessionInfo | None:
        try:
            rows = self.index.rows(f"{SESSION} WHERE s.namespace = ? AND s.name = ?", namespace, name)
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"a session's name must be valid Unicode text: {error}") from None
        return self._read(rows[0]) if rows else None

    def _read(self, row: tuple[Any, ...]) -> SessionInfo:
        try:
            return read_session(row)
        except CorruptStateError as error:
            raise CorruptStateError(f"{error}: {ADVICE}") from error

    def _add(self, parent: int | None, turn: Turn) -> int:
        number, depth = self._next("turn"), 0
        if parent is not None:
            found = self.index.rows(f"SELECT {', '.join(TURN_SEAL)}, seal FROM turn WHERE number = ?", parent)
            if not found or seal(*found[0][:-1]) != found[0][-1] or found[0][3] != turn.before:
                raise CorruptStateError(f"the turn that this one goes on from is damaged: {ADVICE}")
            depth = found[0][2] + 1
        self.index.run(INSERT_TURN, *turn_values(number, parent, depth, turn))
        return number

    def _move(self, session: int, head: int) -> None:
        found = self.index.rows(f"{SESSION} WHERE s.number = ?", session)
        if not found:
            raise SessionNotFoundError("this session was deleted")
        before = self._read(found[0])
        self.index.run(
            "UPDATE session SET head = ?, updated = ? WHERE number = ?", head, time.time(), session
        )
        self._seal(session)
        self._prune(before.head)

    def _next(self, table: str) -> int:
        [(number,)] = self.index.rows(f"SELECT coalesce(max(number), 0) + 1 FROM {table}")
        return int(number)

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
            found = self.index.rows("SELECT parent FROM turn WHERE number = ?", turn)
            self.index.run("DELETE FROM turn WHERE number = ?", turn)
            turn = found[0][0] if found else None


def mark(folder: Path) -> str:
    """Whose the database in `folder` must be; nothing is known of one that is new."""
    with explained(folder / MARK):
        try:
            return (folder / MARK).read_text("utf-8", "replace").strip()
        except FileNotFoundError:
            return ""


def _check_there(folder: Path, known: str) -> None:
    if (folder / MENDED).exists():
        raise StoreDamagedError(
            f"a repair of the sessions in {folder} was interrupted: `perdure sessions verify` ends it"
        )
    file = folder / FILE
    with explained(file):
        gone = known and not (file.exists() and file.stat().st_size)
    if gone:
        raise StoreDamagedError(
            f"{file} is gone: restore it from a copy, or delete {MARK} beside it to begin without any session"
        )


def locked(folder: Path) -> FileLock:
    """Held by the one who writes."""
    lock = FileLock(folder / "sessions.lock", thread_local=False)
    with explained(folder):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StoreLockedError(
                f"the sessions in {folder} are in use, by another process or another runtime of this one: "
                "close that one, or open the store for reading"
            ) from None
    return lock


__all__ = ["ADVICE", "FILE", "MARK", "MENDED", "SessionInfo", "SessionStore", "locked", "mark"]
