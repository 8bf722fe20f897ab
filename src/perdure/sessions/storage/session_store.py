"""Sessions, turns and memories, in SQLite."""

from __future__ import annotations

import builtins
import json
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock

from perdure.checks import is_whole
from perdure.errors import (
    CorruptStateError,
    InvalidInputError,
    SessionError,
    SessionExistsError,
    SessionNotFoundError,
    StoreDamagedError,
)
from perdure.sessions.history import Chunk, Place
from perdure.sessions.info import SessionInfo, SessionMemory
from perdure.sessions.storage.rows import (
    INSERT_TURN,
    MEMORY,
    SAYING,
    SESSION,
    TURN,
    read_memory,
    read_session,
    read_turn,
    turn_values,
)
from perdure.sessions.storage.schema import (
    MEMORY_SEAL,
    MIGRATIONS,
    RESPONSE,
    SESSION_SEAL,
    TURN_SEAL,
    Value,
    seal,
    turn_seal,
)
from perdure.sessions.turn import FIRST, Turn
from perdure.store.durable import explained, make_folder, sync_folder, write_file
from perdure.store.index import Index
from perdure.store.locks import TurnLocks, UseLock
from perdure.store.table_check import TableCheck

FILE, MARK, MENDED, KEY = "sessions.sqlite", "sessions.id", "sessions.mended", "sessions.key"
"""The database; whose it is; what a repair that was interrupted has left; what seals exports."""
TRANSFERS = "transfers"
"""The folder of files that are on their way in or out."""
_OPENING, _PATIENCE = "sessions.opening", 60.0
"""Held while a database is created, migrated and checked; and how many seconds one waits for others."""
ADVICE = "`perdure sessions verify` keeps what can be proved and puts the rest aside"


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
        self._turn_locks: TurnLocks | None = None
        with ExitStack() as held, ExitStack() as opening:
            known = ""
            if folder is not None:
                if not readonly:
                    make_folder(folder)
                    lock = FileLock(folder / _OPENING, timeout=_PATIENCE, thread_local=False, mode=0o600)
                    with explained(folder):
                        opening.enter_context(lock)
                    use = UseLock(folder)
                    held.callback(use.release)
                    if use.first:
                        # Of processes that were killed.
                        shutil.rmtree(folder / TRANSFERS, ignore_errors=True)
                    self._turn_locks = TurnLocks(folder)
                    held.callback(self._turn_locks.close)
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
            # These have a few rows each, however much is kept.
            for table in ("register", "counter"):
                self.index.check(table)
            # So that none of these is missed: what is found through an index is all there is.
            self._check = TableCheck(self.index, ("session", "memory"))
            held.callback(self._check.close)
            if folder is not None:
                self._check_own(folder, known)
            self.key = _key(folder, readonly=readonly)
            """What seals exports, so that the state in them is known again. None where it may not be made."""
            self._held = held.pop_all()

    def close(self) -> None:
        self._held.close()

    def transfers(self) -> Path | None:
        """The folder for files on their way in or out; None where the store has none, or may not be
        written."""
        if self.folder is None or self.readonly:
            return None
        folder = self.folder / TRANSFERS
        make_folder(folder, ours=True)
        return folder

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
    ) -> SessionInfo:
        """A new session: at a turn that is there and has that digest, followed by turns that are not yet."""
        # Before the transaction: a name that is missed would be given away twice.
        self._check.wait()
        with self._writing():
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
            self.check_turn(head, digest)
        for turn in turns:
            head = self._add(head, turn)
        number, now = self._next("session"), time.time()
        self.index.run(
            f"INSERT INTO session ({', '.join(SESSION_SEAL)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            number,
            namespace,
            name,
            kind,
            head,
            json.dumps(dict(settings)),
            json.dumps(dict(origin)),
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
        rows = self._rows(
            f"{SESSION} WHERE {' AND '.join(where)} ORDER BY s.updated DESC, s.number DESC LIMIT ?",
            *values,
            _limit(limit),
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

    def turn_bytes(self, head: int) -> int:
        """What the turns that lead to `head` take, without the overhead of the database."""
        [(total,)] = self.index.rows(
            "WITH RECURSIVE up (number, parent) AS ("
            " SELECT number, parent FROM turn WHERE number = ?"
            " UNION ALL SELECT t.number, t.parent FROM turn t JOIN up ON t.number = up.parent"
            " WHERE t.number < up.number"
            ") SELECT coalesce(sum(length(t.messages) + coalesce(length(t.reply), 0) + length(t.text)"
            " + length(t.tokens) + length(t.cuts) + length(t.settings) + length(t.usage)), 0)"
            " FROM up JOIN turn t ON t.number = up.number",
            head,
        )
        return int(total)

    def chain(self, head: int, name: str = "") -> tuple[Sequence[int], Sequence[Turn]]:
        """The turns that lead to `head`, with it, each proved by its digest. `name` is whose they are."""
        chunk = self._chunk(head, None, -1, name)
        return chunk.numbers, chunk.turns

    def turns(self, place: Place, count: int, name: str) -> Chunk:
        """The turn at `place` and those before it, up to `count`, each proved by the digest of the next."""
        return self._chunk(place.head, place, count, name)

    def _chunk(self, head: int, place: Place | None, count: int, name: str) -> Chunk:
        rows = self.index.rows(
            "WITH RECURSIVE up (number, parent, level) AS ("
            " SELECT number, parent, 0 FROM turn WHERE number = ?"
            # A turn is younger than the one before it: whatever was damaged, this ends.
            " UNION ALL SELECT t.number, t.parent, level + 1 FROM turn t JOIN up ON t.number = up.parent"
            " WHERE t.number < up.number LIMIT ?"
            f") SELECT up.parent, {TURN} FROM up JOIN turn t ON t.number = up.number ORDER BY up.level DESC",
            head,
            count,
        )
        of = f"of session {name!r}" if name else "of a session"
        parent = rows[0][0] if rows else None
        first = 0 if parent is None or place is None else place.depth + 1 - len(rows)
        before = FIRST if parent is None else self._digest(parent)
        numbers: builtins.list[int] = []
        turns: builtins.list[Turn] = []
        for _, *row in rows:
            try:
                turn = read_turn(row, before)
            except CorruptStateError as error:
                raise CorruptStateError(f"turn {first + len(turns)} {of} {error}: {ADVICE}") from error
            numbers.append(int(row[0]))
            turns.append(turn)
            before = turn.digest
        if not turns or (parent is None) != (turns[0].kind == "start") or (parent is not None and first < 1):
            raise CorruptStateError(f"the turns {of} do not lead back to its start: {ADVICE}")
        whole = place is None or parent is not None or len(turns) == place.depth + 1
        if not whole or (place is not None and before != place.digest):
            raise CorruptStateError(f"the turns {of} are not those that led to it: {ADVICE}")
        return Chunk(numbers, turns, None if parent is None else Place(parent, turns[0].before, first - 1))

    def _digest(self, turn: int) -> bytes:
        """What the turn after it was made behind, as it lies: that one proves it."""
        found = self.index.rows("SELECT digest FROM turn WHERE number = ?", turn)
        return found[0][0] if found and isinstance(found[0][0], bytes) else b""

    def start(self, head: int, name: str) -> Turn:
        """The start of the session that stands at `head`. Of the turns between, only the places are read."""
        columns = ", ".join(f"t.{column}" for column in (*TURN_SEAL, "seal"))
        rows = self.index.rows(
            f"WITH RECURSIVE up ({', '.join((*TURN_SEAL, 'seal'))}) AS ("
            f" SELECT {columns} FROM turn t WHERE number = ?"
            f" UNION ALL SELECT {columns} FROM turn t JOIN up ON t.number = up.parent"
            " WHERE t.number < up.number) SELECT * FROM up",
            head,
        )
        whole = bool(rows) and rows[-1][1] is None and all(turn_seal(*row[:-1]) == row[-1] for row in rows)
        if not whole:
            raise CorruptStateError(f"the turns of session {name!r} do not lead back to its start: {ADVICE}")
        return self.chain(rows[-1][0], name)[1][0]

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
                parent = self._add(parent, turn)
                numbers.append(parent)
            self._move(before, parent)
            if following is not None:
                self._move(following, parent)
            return numbers

    def note(self, session: SessionInfo, origin: Mapping[str, Any]) -> SessionInfo:
        """Write down something else of where a session comes from."""
        with self._writing():
            number = self._standing(session).number
            self.index.run("UPDATE session SET origin = ? WHERE number = ?", json.dumps(dict(origin)), number)
            self._seal(number)
            return self._standing(session)

    def move(self, session: SessionInfo, head: int, *, digest: bytes, expected: int) -> None:
        """Let a session stand at another turn. Refused as `add` is."""
        with self._writing():
            before = self._standing(session, expected)
            self.check_turn(head, digest)
            self._move(before, head)

    def delete(self, session: SessionInfo) -> None:
        with self._writing():
            found = self._standing(session)
            self.index.run("DELETE FROM session WHERE number = ?", found.number)
            self._prune(found.head)

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
            self.check_turn(turn, digest)
            key = (session.namespace, session.name, depth, label)
            there = "namespace = ? AND session = ? AND depth = ? AND label = ?"
            before = self.index.rows(f"SELECT number, turn FROM memory WHERE {there}", *key)
            for number, _ in before:
                self.index.run("DELETE FROM memory WHERE number = ?", number)
            said: builtins.list[Value] = [self._next("memory"), session.namespace, session.name, turn]
            said += [depth, label, kind, note, digest, time.time()]
            self.index.run(
                f"INSERT INTO memory ({', '.join(MEMORY_SEAL)}, seal)"
                f" VALUES ({', '.join('?' * len(MEMORY_SEAL))}, ?)",
                *said,
                seal(*said),
            )
            for _, last in before:
                self._prune(last)
            return read_memory([*said, seal(*said)])

    def memories(self, where: str, *values: Value, limit: int | None = None) -> builtins.list[SessionMemory]:
        """Those that fit, the oldest first. `m` is the memory and `t` its turn."""
        self._check.wait()
        rows = self._rows(f"{MEMORY} WHERE {where} ORDER BY m.number LIMIT ?", *values, _limit(limit))
        return [self.proved_memory(row) for row in rows]

    def wait_checked(self) -> None:
        """Return when every page of the tables was found sound; raise where one is not."""
        self._check.wait()

    def proved_session(self, row: tuple[Any, ...]) -> SessionInfo:
        try:
            return read_session(row)
        except CorruptStateError as error:
            raise CorruptStateError(f"{error}: {ADVICE}") from error

    def proved_memory(self, row: tuple[Any, ...]) -> SessionMemory:
        try:
            return read_memory(row)
        except CorruptStateError as error:
            raise CorruptStateError(f"{error}: {ADVICE}") from error

    def memory_numbers(self, namespace: str, *, after: int, limit: int) -> builtins.list[int]:
        """The numbers of a namespace's memories, the lowest first: up to `limit`, behind number `after`."""
        self._check.wait()
        rows = self._rows(
            "SELECT number FROM memory WHERE namespace = ? AND number > ? ORDER BY number LIMIT ?",
            namespace,
            after,
            limit,
        )
        return [int(number) for (number,) in rows]

    def chain_of(self, memory: SessionMemory) -> tuple[Sequence[int], Sequence[Turn]]:
        """The turns that lead to a memory, if they are those that were remembered."""
        rows = self._rows(
            "SELECT turn FROM memory WHERE number = ? AND namespace = ? AND session = ? AND label = ?",
            memory.number,
            memory.namespace,
            memory.session,
            memory.label,
        )
        if not rows:
            raise SessionNotFoundError(f"the memory at {memory.address} is gone")
        numbers, turns = self.chain(rows[0][0], memory.session)
        if turns[-1].digest != memory.digest:
            raise CorruptStateError(
                f"what lies at {memory.address} is not what was remembered: its digest differs; "
                "nothing was woken"
            )
        return numbers, turns

    def forget(self, memory: SessionMemory) -> None:
        with self._writing():
            found = self.index.rows(
                "SELECT turn FROM memory WHERE number = ? AND namespace = ? AND session = ? AND label = ?",
                memory.number,
                memory.namespace,
                memory.session,
                memory.label,
            )
            if not found:
                raise SessionNotFoundError(f"the memory at {memory.address} is gone")
            self.index.run("DELETE FROM memory WHERE number = ?", memory.number)
            self._prune(found[0][0])

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
        self._check.refuse_damaged()
        try:
            with self.index.writing():
                yield
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"this is not valid Unicode text: {error}") from None

    def _rows(self, query: str, *values: Value) -> builtins.list[tuple[Any, ...]]:
        """Rows found by what a caller gave."""
        try:
            return self.index.rows(query, *values)
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"this is not valid Unicode text: {error}") from None

    def _find(self, namespace: str, name: str) -> SessionInfo | None:
        rows = self._rows(f"{SESSION} WHERE s.namespace = ? AND s.name = ?", namespace, name)
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

    def check_turn(self, number: int, digest: bytes) -> int:
        """The depth of a turn, which must be there and be that very one."""
        found = self.index.rows(f"SELECT {', '.join(TURN_SEAL)}, seal FROM turn WHERE number = ?", number)
        if not found:
            raise SessionNotFoundError("the turn to go on from was deleted")
        if seal(*found[0][:-1]) != found[0][-1] or found[0][3] != digest:
            raise CorruptStateError(f"the turn that this one goes on from is damaged: {ADVICE}")
        return int(found[0][2])

    def _add(self, parent: int | None, turn: Turn) -> int:
        depth = 0 if parent is None else self.check_turn(parent, turn.before) + 1
        number = self._next("turn")
        self.index.run(INSERT_TURN, *turn_values(number, parent, depth, turn))
        return number

    def _move(self, session: SessionInfo, head: int) -> None:
        # Later than before, whatever the clock says: lists are in this order.
        now = max(time.time(), session.updated)
        self.index.run("UPDATE session SET head = ?, updated = ? WHERE number = ?", head, now, session.number)
        self._seal(session.number)
        self._prune(session.head)

    def _next(self, table: str) -> int:
        """A number that nothing in `table` has or ever had."""
        number = self._last(table) + 1
        self.index.run(
            "UPDATE counter SET last = ?, seal = ? WHERE name = ?", number, seal(table, number), table
        )
        return number

    def check_numbers(self) -> None:
        """Prove what says which numbers were given out: `CorruptStateError` where it is damaged."""
        for table in ("session", "turn", "memory"):
            self._last(table)

    def _last(self, table: str) -> int:
        rows = self.index.rows("SELECT last, seal FROM counter WHERE name = ?", table)
        if not rows or seal(table, rows[0][0]) != rows[0][1]:
            raise CorruptStateError(f"the last number of a {table} is damaged: {ADVICE}")
        return int(rows[0][0])

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


def _limit(limit: int | None) -> int:
    if limit is None:
        return -1
    if not is_whole(limit) or not 0 < limit < 2**31:
        raise InvalidInputError(f"limit is None or a number from 1, got {limit!r}")
    return limit


def _key(folder: Path | None, *, readonly: bool) -> bytes | None:
    """The store's own secret: it never leaves the folder."""
    if folder is None:
        return secrets.token_bytes(32)
    path = folder / KEY
    with explained(path):
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            found = b""
    if len(found) == 32:
        return found
    if readonly:
        return None
    # Without it, or if it was damaged, older exports are still read, but their state is not known again.
    made = secrets.token_bytes(32)
    write_file(path, [made])
    sync_folder(folder)
    return made


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
