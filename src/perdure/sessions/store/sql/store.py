"""The session store in SQL: sessions, records, turns and memories, every change as one transaction."""

from __future__ import annotations

import builtins
import functools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from perdure.errors import (
    CorruptStateError,
    SessionError,
    SessionExistsError,
    SessionNotFoundError,
)
from perdure.sessions.history import TurnPage, TurnReference
from perdure.sessions.info import (
    PENDING,
    RESPONSE,
    NamespaceSize,
    Noted,
    Quota,
    Record,
    SessionInfo,
    SessionMemory,
)
from perdure.sessions.store.sql.database import Check, Database, Dialect, Numbers
from perdure.sessions.store.sql.tables import (
    ADVICE,
    INSERT_SESSION,
    PENDING_NUMBER,
    RECORD,
    SESSION,
    SESSION_COLUMNS,
    Rows,
    TurnTable,
    Value,
    check_session,
    check_text,
    invalid_text,
    json_text,
    proved_record,
    proved_session,
    row_checksum,
    row_limit,
    table_of,
    text_rows,
)
from perdure.sessions.store.sql.usage import UsageTable
from perdure.sessions.turn import FIRST, Turn

if TYPE_CHECKING:
    from perdure.sessions.store.sql.files import FileTable
    from perdure.sessions.store.sql.memories import Condition, MemoryTable
    from perdure.sessions.tree import Tree

_NAMESPACE, _HEAD, _UPDATED = map(SESSION_COLUMNS.index, ("namespace", "head", "updated"))
_TABLES = {"session": SESSION, "record": RECORD}
_STANDING = {
    table: query.replace(" FROM ", f", {PENDING_NUMBER} FROM ", 1) for table, query in _TABLES.items()
}
"""And the number of a session's pending turn, or NULL."""


class SqlStore:
    """The calls of `SessionStore` over a database; leases, files and the opening are for those above. For any
    thread.

    Always holds: a turn is written once and whole, after the one before it; a session names a turn that is
    there; turns that nothing leads to any more go with what last led to them. Each row is proved when it is
    read, and one that is not what it was is refused. Numbers of sessions, turns and memories are never
    given out again, and a change of a session checks its number, namespace and name. Several processes may
    write to one: a change is a transaction, and sees what the others have done.
    """

    def __init__(self, database: Database, dialect: Dialect, numbers: Numbers, check: Check) -> None:
        self._db = database
        self._sql = dialect
        self._numbers = numbers
        self._check = check
        self._turns = TurnTable(database, dialect, numbers)
        self._usage = UsageTable(database, dialect)
        self._searching: dict[str | None, threading.Lock] = {}

    @functools.cached_property
    def _memories(self) -> MemoryTable:
        from perdure.sessions.store.sql.memories import MemoryTable

        return MemoryTable(self._db, self._sql, self._numbers)

    @functools.cached_property
    def _turn_files(self) -> FileTable:
        from perdure.sessions.store.sql.files import FileTable

        return FileTable(self._db, self._usage)

    @property
    def key_store(self) -> object:
        return None

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
        with self._writing(namespace):
            if replaces is not None:
                self._delete(replaces)
            return self._stands(
                self._create(
                    namespace,
                    name,
                    turns,
                    head=head,
                    digest=digest,
                    kind=kind,
                    settings=settings or {},
                    origin=origin or {},
                )
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
        created: float | None = None,
        updated: float | None = None,
        bounded: bool = True,
    ) -> Record:
        """`create` and `put` within a transaction."""
        if self._find(namespace, name, kind) is not None:
            raise SessionExistsError(
                f"there is a session {name!r} already: choose another name, or delete it"
            )
        at = self._turns.check(head, digest) if head is not None else None
        for turn in turns:
            at = self._add_turn(namespace, at, turn)
        self._insert(
            namespace,
            name,
            at,
            kind=kind,
            settings=settings,
            origin=origin,
            created=created,
            updated=updated,
            bounded=bounded,
        )
        made = self._find(namespace, name, kind)
        assert made is not None
        return made

    def _insert(
        self,
        namespace: str,
        name: str,
        at: TurnReference | None,
        *,
        kind: str,
        settings: Mapping[str, Any] = MappingProxyType({}),
        origin: Mapping[str, Any] = MappingProxyType({}),
        created: float | None = None,
        updated: float | None = None,
        bounded: bool = True,
    ) -> Sequence[Any]:
        """A new row of a session or record, whose name is free; as it is read, without the turn's usage."""
        now, table = time.time(), table_of(kind)
        number = self._numbers.next("session")
        row: builtins.list[Value] = [
            number,
            namespace,
            name,
            kind,
            at.head if at is not None else None,
            json_text(dict(settings)),
            json_text(dict(origin)),
            now if created is None else created,
            now if updated is None else updated,
        ]
        place = (at.depth, at.digest) if at is not None else (None, None)
        checksum = row_checksum(*row, *place)
        self._db.run(INSERT_SESSION.format(table), *row, checksum)
        self._usage.add(namespace, table, number, bounded=bounded)
        return [*row, *place, checksum, None]

    def find(self, namespace: str, name: str) -> SessionInfo:
        session = self._find(namespace, name, "session") or self._find(namespace, name, RESPONSE)
        if session is None:
            raise SessionNotFoundError(f"there is no session {name!r}")
        return self._stands(session)

    def has(self, namespace: str, name: str) -> bool:
        return any(self._find(namespace, name, kind) is not None for kind in ("session", RESPONSE))

    def list(
        self,
        namespace: str | None = None,
        *,
        limit: int | None = None,
        after: SessionInfo | None = None,
        text: str | None = None,
    ) -> list[SessionInfo]:
        """The latest first: those of a namespace or all, up to `limit`, of those that come behind `after`.
        With `text`, those that have it in their names or in what was said."""
        self._check.wait()
        if text is None:
            return [proved_session(row) for row in self._page(self._db.rows, namespace, limit, after)]
        row_limit(limit)
        check_text(text)
        from perdure.sessions.store.sql.search import SEARCHED, search

        with self._searches(namespace), self._db.reading_apart() as rows:
            return search(
                rows,
                self._sql,
                lambda last: self._page(rows, namespace, SEARCHED, last),
                text,
                limit=limit,
                after=after,
            )

    def put(self, namespace: str, kind: str, name: str, body: Mapping[str, Any]) -> Record:
        """A new record that stands at no turn."""
        self._check.wait()
        with self._writing(namespace):
            return self._create(namespace, name, (), kind=kind, origin=body)

    def record(self, namespace: str, kind: str, name: str) -> Record:
        record = self._find(namespace, name, kind)
        if record is None:
            raise SessionNotFoundError(f"there is no {kind} {name!r}")
        return record

    def expired(
        self, before: float, *, limit: int, kind: str, namespace: str | None = None
    ) -> builtins.list[tuple[str, str]]:
        """Namespaces and names of records of a kind, last changed before a time, the oldest first: of one
        namespace, or of all."""
        where, values = ("", ()) if namespace is None else (" AND namespace = ?", (namespace,))
        rows = self._db.rows(
            f"SELECT namespace, name FROM record WHERE kind = ? AND updated < ?{where}"
            " ORDER BY updated, number LIMIT ?",
            kind,
            before,
            *values,
            limit,
        )
        return [(namespace, name) for namespace, name in rows]

    def pend(self, session: SessionInfo, body: Mapping[str, Any] | None) -> Record | None:
        """Write down the turn that a session is asked, in the place of the one that was; None forgets it."""
        name = str(session.number)
        # Before the transaction: one that is missed would be lost.
        self._check.wait()
        with self._writing(session.namespace):
            self._fence(session)
            self._settle(session, self._standing(session))
            if body is None:
                return None
            row = self._insert(session.namespace, name, None, kind=PENDING, origin=body, bounded=False)
            return proved_record(row)

    def pending(self, session: SessionInfo) -> Record | None:
        """The turn that was asked of a session and is no part of it yet."""
        return self._find(session.namespace, str(session.number), PENDING)

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
        with self._writing(session.namespace):
            self._fence(session)
            row = self._standing(session, expected)
            if follower is not None:
                self._fence(follower)
            following = self._standing(follower, expected) if follower is not None else None
            at = self._turns.check(parent, turns[0].before)
            numbers: builtins.list[int] = []
            # First: what it says is part of the turn, and counts once.
            self._settle(session, row, kept=True)
            for turn in turns:
                at = self._add_turn(session.namespace, at, turn)
                numbers.append(at.head)
            self._move(row, at)
            if following is not None and follower is not None:
                self._settle(follower, following, kept=True)
                self._move(following, at)
            return numbers

    def note(self, record: Noted, origin: Mapping[str, Any], *, bounded: bool = True) -> Noted:
        """Write down something else of where a session comes from, or of what a record says. What is not
        `bounded` counts, and is never refused: how a response ended is known also where its key may store no
        more."""
        with self._writing(record.namespace):
            row, table = self._standing(record), table_of(record.kind)
            self._usage.remove(record.namespace, table, record.number)
            self._update(row, origin=json_text(dict(origin)))
            self._usage.add(record.namespace, table, record.number, bounded=bounded)
            noted = proved_record(self._standing(record)[:-1])
            assert isinstance(noted, type(record))
            return noted

    def move(self, session: SessionInfo, head: int, *, digest: bytes, expected: int) -> None:
        """Let a session stand at another turn. Refused as `add` is."""
        with self._writing(session.namespace):
            self._fence(session)
            row = self._standing(session, expected)
            self._settle(session, row)
            self._move(row, self._turns.check(head, digest))

    def delete(self, session: Record) -> None:
        with self._writing(session.namespace):
            self._fence(session)
            self._delete(session)

    def head(self, session: SessionInfo) -> tuple[int, bool]:
        """The number of the turn at which a session stands now, also if another process moved it; and whether
        it has a pending turn."""
        rows = self._db.rows(
            f"SELECT s.head, {PENDING_NUMBER} FROM {table_of(session.kind)} s"
            " WHERE s.number = ? AND s.namespace = ? AND s.name = ?",
            session.number,
            session.namespace,
            session.name,
        )
        if not rows:
            raise SessionNotFoundError(f"session {session.name!r} was deleted")
        head, pending = rows[0]
        return int(head), pending is not None

    # Files.

    def keep_file(self, namespace: str, digest: str, data: bytes) -> None:
        """Have a file that turns are about to name, durable when this returns."""
        with self._writing(namespace):
            self._turn_files.keep(namespace, digest, data)

    def file(self, namespace: str, digest: str) -> bytes | None:
        """The bytes of a file; None where it is gone or damaged."""
        return self._turn_files.read(namespace, digest)

    # Turns.

    def read(self, reference: TurnReference, count: int, name: str) -> TurnPage:
        """That turn and those before it, up to `count`, each proved by the digest of the next."""
        return self._turns.read(reference, count, name)

    def start(self, head: int, name: str) -> Turn:
        """The first turn of the session that stands at `head`. Of the turns between, only the checksums are
        read."""
        return self._turns.start(head, name)

    def page(
        self, head: int, name: str, *, after: int, limit: int | None = None, nbytes: int | None = None
    ) -> builtins.list[Turn]:
        """The turns that lead to `head`, from depth `after` + 1 on: up to `limit`, and to `nbytes` together,
        but one at least."""
        return self._turns.page(head, name, after=after, limit=limit, nbytes=nbytes)

    def nbytes(self, head: int) -> int:
        """What the turns that lead to `head` take, without the overhead of the database."""
        return self._turns.nbytes(head)

    def tree(self, session: SessionInfo, *, limit: int, after: str | None = None) -> Tree:
        """The tree that a session is a branch of: up to `limit` turns, behind the one with the id `after`."""
        from perdure.sessions.store.sql.tree import read_tree

        self._check.wait()
        return read_tree(self._db, self._sql, session, limit=limit, after=after, memories=self._memories)

    # Memories.

    def label(
        self, session: SessionInfo, at: TurnReference, label: str, kind: str, note: str
    ) -> SessionMemory:
        """Remember a turn of a session, in the place of what had that label there."""
        with self._writing(session.namespace):
            self._standing(session)
            self._turns.check(at.head, at.digest)
            replaced = self._forget_same(session.namespace, session.name, at.depth, label)
            made = self._memories.add(session, at, label, kind, note)
            self._usage.add(session.namespace, "memory", made.number)
            for last in replaced:
                self._prune(session.namespace, last)
            return made

    def memories(
        self,
        namespace: str,
        *,
        label: str | None = None,
        kind: str | None = None,
        session: str | None = None,
        turn: int | None = None,
        text: str | None = None,
        limit: int | None = None,
        after: int = 0,
    ) -> builtins.list[SessionMemory]:
        """Those that fit everything given, the oldest first: up to `limit`, behind number `after`."""
        where: builtins.list[Condition] = [("m.namespace = ?", namespace)]
        for column, value in (("label", label), ("kind", kind), ("session", session), ("depth", turn)):
            if value is not None:
                where.append((f"m.{column} = ?", value))
        self._check.wait()
        if text is None:
            return self._memories.find(where, after=after, limit=limit)
        row_limit(limit)
        check_text(text)
        with self._searches(namespace), self._db.reading_apart() as rows:
            return self._memories.search(rows, where, text, after=after, limit=limit)

    def locate(self, memory: SessionMemory) -> TurnReference:
        """The turn that was remembered, after proving all that led to it."""
        numbers, turns = self.chain_of(memory)
        return TurnReference(numbers[-1], turns[-1].digest, len(turns) - 1)

    def chain_of(self, memory: SessionMemory) -> tuple[Sequence[int], Sequence[Turn]]:
        """The turns that lead to a memory, if they are those that were remembered."""
        numbers, turns = self._turns.chain(self._memories.turn_of(memory), memory.session)
        if turns[-1].digest != memory.digest:
            raise CorruptStateError(
                f"what lies at {memory.address} is not what was remembered: its digest differs; "
                "nothing was woken"
            )
        return numbers, turns

    def forget(self, memory: SessionMemory) -> None:
        with self._writing(memory.namespace):
            turn = self._memories.turn_of(memory)
            self._forget(memory.namespace, memory.number)
            self._prune(memory.namespace, turn)

    # The whole.

    def limit(self, namespace: str, quota: Quota | None) -> None:
        """What a namespace may store from now on, by this process; None lifts the bound."""
        self._usage.limit(namespace, quota)

    def sizes(self) -> builtins.list[NamespaceSize]:
        """What every namespace that has sessions stores, by its name."""
        return self._usage.sizes()

    # For `verify`, which proves everything.

    def chain(self, head: int, name: str) -> tuple[Sequence[int], Sequence[Turn]]:
        """The numbers and turns that lead to `head`, each proved by its digest."""
        return self._turns.chain(head, name)

    def check_counts(self) -> None:
        """Raise unless the numbers given out, and what each namespace stores, are what was written."""
        self._numbers.check()
        self._usage.check()
        self._turn_files.check()

    # Inside.

    @contextmanager
    def _writing(self, namespace: str) -> Iterator[None]:
        """A change of a namespace: a transaction that sees what the changes before it have done."""
        self._check.refuse_damaged()
        try:
            with self._db.writing():
                self._lock_namespace(namespace)
                yield
        except UnicodeEncodeError as error:
            raise invalid_text(error) from None

    def _lock_namespace(self, namespace: str) -> None:
        """Have changes of a namespace follow each other, where the database does not see to that itself."""

    def _fence(self, session: Record) -> None:
        """Refuse a holder that lost its session to another one, in stores where that can happen."""

    def _find(self, namespace: str, name: str, kind: str) -> Record | None:
        """The session of that name, or where the kind is one of records, the record."""
        where, values = "s.namespace = ? AND s.name = ?", [namespace, name]
        if table_of(kind) == "record":
            where, values = f"{where} AND s.kind = ?", [*values, kind]
        rows = text_rows(self._db.rows, f"{_TABLES[table_of(kind)]} WHERE {where}", *values)
        if not rows:
            self._check.wait()
            return None
        found = proved_record(rows[0])
        if (found.namespace, found.name) != (namespace, name):
            raise CorruptStateError(f"another session is found in the place of {name!r}: {ADVICE}")
        return found

    def _stands(self, record: Record) -> SessionInfo:
        assert isinstance(record, SessionInfo), "a session stands at a turn"
        return record

    def _standing(self, session: Record, expected: int | None = None) -> Sequence[Any]:
        """The row of that very session as it is now, proved; and then the number of its pending turn."""
        rows = self._db.rows(
            f"{_STANDING[table_of(session.kind)]} WHERE s.number = ? AND s.namespace = ? AND s.name = ?",
            session.number,
            session.namespace,
            session.name,
        )
        if not rows:
            raise SessionNotFoundError(f"session {session.name!r} was deleted")
        check_session(rows[0][:-1], f": {ADVICE}")
        if expected is not None and rows[0][_HEAD] != expected:
            raise SessionError(f"session {session.name!r} was changed meanwhile: nothing was done")
        return rows[0]

    def _delete(self, session: Record) -> None:
        row, table = self._standing(session), table_of(session.kind)
        self._settle(session, row)
        self._usage.remove(session.namespace, table, session.number)
        self._db.run(f"DELETE FROM {table} WHERE number = ?", session.number)
        if table == "record":
            self._turn_files.unpend(session.namespace, row[SESSION_COLUMNS.index("origin")])
        self._prune(session.namespace, row[_HEAD])

    def _settle(self, session: Record, row: Sequence[Any], *, kept: bool = False) -> None:
        """Forget the pending turn of a session, if its row (`_standing`) names one. Of one whose words are
        `kept` nothing has to be erased."""
        if (number := row[-1]) is not None:
            self._usage.remove(session.namespace, "record", number)
            if kept:
                self._db.replace("DELETE FROM record WHERE number = ?", number)
                return
            [(origin,)] = self._db.rows("SELECT origin FROM record WHERE number = ?", number)
            self._db.run("DELETE FROM record WHERE number = ?", number)
            self._turn_files.unpend(session.namespace, origin)

    def _forget(self, namespace: str, memory: int) -> None:
        """Delete the memory of that number. What it led to may be pruned then."""
        self._usage.remove(namespace, "memory", memory)
        self._memories.drop(memory)

    def _forget_same(self, namespace: str, session: str, depth: int, label: str) -> builtins.list[int]:
        """Delete the memory in whose place another comes; its turn."""
        same = self._memories.same(namespace, session, depth, label)
        for number, _ in same:
            self._forget(namespace, number)
        return [turn for _, turn in same]

    def _move(self, row: Sequence[Any], at: TurnReference) -> None:
        """Let the session of a row stand at a turn."""
        # Later than before, whatever the clock says: lists are in this order.
        self._update(row, at, head=at.head, updated=max(time.time(), row[_UPDATED]))
        self._prune(row[_NAMESPACE], row[_HEAD])

    def _update(self, row: Sequence[Any], at: TurnReference | None = None, **columns: Value) -> None:
        """Write some columns of the session of a row, and its checksum: over the turn at which it stands,
        which is `at` from now on, or stays."""
        after = {**dict(zip(SESSION_COLUMNS, row, strict=False)), **columns}
        depth, digest = (at.depth, at.digest) if at is not None else row[len(after) : len(after) + 2]
        self._db.run(
            f"UPDATE {table_of(after['kind'])}"
            f" SET {', '.join(f'{column} = ?' for column in columns)}, seal = ? WHERE number = ?",
            *columns.values(),
            row_checksum(*after.values(), depth, digest),
            after["number"],
        )

    def _add_turn(self, namespace: str, at: TurnReference | None, turn: Turn) -> TurnReference:
        added = self._turns.add(at, turn)
        self._usage.add(namespace, "turn", added.head)
        if turn.files:
            self._turn_files.name(namespace, added.head, turn)
        return added

    def _page(
        self, rows: Rows, namespace: str | None, limit: int | None, after: SessionInfo | None
    ) -> builtins.list[tuple[Any, ...]]:
        """Rows of `SESSION`, the latest first."""
        where, values = ["1 = 1"], builtins.list[Value]()
        if namespace is not None:
            where.append("s.namespace = ?")
            values.append(namespace)
        if after is not None:
            where.append("(s.updated, s.number) < (?, ?)")
            values += [after.updated, after.number]
        query = f"{SESSION} WHERE {' AND '.join(where)} ORDER BY s.updated DESC, s.number DESC LIMIT ?"
        return text_rows(rows, query, *values, row_limit(limit))

    def _searches(self, namespace: str | None) -> threading.Lock:
        """Held while a namespace is searched: one search of it at a time reads everything it has."""
        return self._searching.setdefault(namespace, threading.Lock())

    def _prune(self, namespace: str, turn: int | None) -> None:
        """Delete a turn that nothing leads to any more, and then what led only to it."""
        files: set[int] = set()
        while turn is not None:
            unneeded = self._db.rows(
                "SELECT t.parent, EXISTS (SELECT 1 FROM turn_file WHERE turn = t.number) FROM turn t"
                " WHERE t.number = ?"
                " AND NOT EXISTS (SELECT 1 FROM turn WHERE parent = ?)"
                " AND NOT EXISTS (SELECT 1 FROM session WHERE head = ?)"
                " AND NOT EXISTS (SELECT 1 FROM record WHERE head = ?)"
                " AND NOT EXISTS (SELECT 1 FROM memory WHERE turn = ?)",
                *(turn,) * 5,
            )
            if not unneeded:
                break
            # What leads to it must not have been missed.
            self._check.wait()
            self._usage.remove(namespace, "turn", turn)
            [(parent, names_files)] = unneeded
            if names_files:
                files.update(self._turn_files.unname(turn))
            self._db.run("DELETE FROM turn WHERE number = ?", turn)
            turn = parent
        if files:
            self._turn_files.drop_unnamed(namespace, sorted(files))
