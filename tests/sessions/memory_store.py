"""A second session store, in plain Python: nothing but the contract in `sessions/store/base.py`.

Several stores can share one `Data`, as processes share a database over a network: a lease then runs out when
the test says so, and a holder that slept through it is refused by its fencing token.
"""

from __future__ import annotations

import builtins
import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perdure.errors import (
    CorruptStateError,
    InvalidInputError,
    QuotaError,
    SessionError,
    SessionExistsError,
    SessionNotFoundError,
    StoreError,
    StoreReadOnlyError,
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
    is_record,
)
from perdure.sessions.tree import Tree, TreeTurn, parse_turn_id, turn_id
from perdure.sessions.turn import FIRST, Turn


@dataclass(frozen=True)
class Row:
    """A turn as it lies."""

    number: int
    parent: int | None
    depth: int
    text: str
    """JSON, as in an export: so that what is read was parsed, as from any store."""
    digest: bytes

    def turn(self, before: bytes) -> Turn:
        return Turn.from_json(json.loads(self.text), before)


@dataclass
class Data:
    """What is durable."""

    turns: dict[int, Row] = field(default_factory=dict)
    sessions: dict[int, SessionInfo] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
    """Those that stand at no turn."""
    memories: dict[int, tuple[SessionMemory, int]] = field(default_factory=dict)
    files: dict[tuple[str, str], bytes] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    tokens: dict[int, int] = field(default_factory=dict)
    """Fencing tokens: how often each session was taken."""
    holders: dict[int, object] = field(default_factory=dict)
    """Whose leases have not run out."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def run_out(self, session: int) -> None:
        """Let the lease of a session run out, as if its holder had been silent for long."""
        self.holders.pop(session, None)


class MemoryStore:
    """`SessionStore` over `Data`."""

    def __init__(self, data: Data, *, readonly: bool = False, shared: bool = True) -> None:
        self.readonly = readonly
        self.is_shared = shared
        self.key: bytes | None = b"k" * 32
        self.key_store = None
        self._data = data
        self._leases: dict[int, int] = {}
        self._quotas: dict[str, Quota] = {}
        self._open = True

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
        with self._changing() as data:
            if replaces is not None:
                self._delete(replaces)
            if self._named(namespace, name, kind) is not None:
                raise SessionExistsError(f"there is a session {name!r} already")
            if head is not None:
                self._check(head, digest)
            for turn in turns:
                head = self._write(head, turn)
            assert head is not None
            row, now = data.turns[head], time.time()
            info = SessionInfo(
                number=next(data.numbers),
                namespace=_text(namespace),
                name=_text(name),
                kind=kind,
                head=head,
                depth=row.depth,
                settings=_plain(settings or {}),
                origin=_plain(origin or {}),
                created=now,
                updated=now,
                digest=row.digest,
            )
            data.sessions[info.number] = info
            self._check_quota(namespace)
            return info

    def find(self, namespace: str, name: str) -> SessionInfo:
        for kind in ("session", RESPONSE):
            found = self._named(_text(namespace), _text(name), kind)
            if isinstance(found, SessionInfo):
                return found
        raise SessionNotFoundError(f"there is no session {name!r}")

    def has(self, namespace: str, name: str) -> bool:
        found = (self._named(_text(namespace), _text(name), kind) for kind in ("session", RESPONSE))
        return any(each is not None for each in found)

    def put(self, namespace: str, kind: str, name: str, body: Mapping[str, Any]) -> Record:
        with self._changing() as data:
            if self._named(namespace, name, kind) is not None:
                raise SessionExistsError(f"there is a {kind} {name!r} already")
            number, now = next(data.numbers), time.time()
            data.records[number] = Record(
                number=number,
                namespace=_text(namespace),
                name=_text(name),
                kind=kind,
                origin=_plain(body),
                created=now,
                updated=now,
            )
            self._check_quota(namespace)
            return data.records[number]

    def record(self, namespace: str, kind: str, name: str) -> Record:
        found = self._named(_text(namespace), _text(name), kind)
        if found is None:
            raise SessionNotFoundError(f"there is no {kind} {name!r}")
        return found

    def list(
        self,
        namespace: str | None = None,
        *,
        limit: int | None = None,
        after: SessionInfo | None = None,
        text: str | None = None,
    ) -> list[SessionInfo]:
        _check_limit(limit)
        for each in (namespace, text):
            _text(each or "")
        with self._reading() as data:
            found = sorted(data.sessions.values(), key=_order, reverse=True)
            return [
                info
                for info in found
                if not is_record(info.kind)
                and (namespace is None or info.namespace == namespace)
                and (after is None or _order(info) < _order(after))
                and (
                    text is None
                    or _has(info.name, text)
                    or _has(str(info.origin.get("title", "")), text)
                    or self._said(info.head, text)
                )
            ][:limit]

    def expired(
        self, before: float, *, limit: int, kind: str, namespace: str | None = None
    ) -> builtins.list[tuple[str, str]]:
        with self._reading() as data:
            old = sorted([*data.sessions.values(), *data.records.values()], key=_order)
            found = [each for each in old if each.kind == kind and each.updated < before]
            found = [each for each in found if namespace in (None, each.namespace)]
            return [(each.namespace, each.name) for each in found[:limit]]

    def add(
        self,
        session: SessionInfo,
        turns: Sequence[Turn],
        *,
        parent: int,
        expected: int,
        follower: SessionInfo | None = None,
    ) -> Sequence[int]:
        with self._changing():
            for each in (session, follower):
                if each is not None:
                    self._fence(each)
                    self._standing(each, expected)
            numbers: builtins.list[int] = []
            for turn in turns:
                parent = self._write(parent, turn)
                numbers.append(parent)
            for each in (session, follower):
                if each is not None:
                    self._settle(each)
                    self._stand(each, parent)
            self._check_quota(session.namespace)
            return numbers

    def move(self, session: SessionInfo, head: int, *, digest: bytes, expected: int) -> None:
        with self._changing():
            self._fence(session)
            self._standing(session, expected)
            self._check(head, digest)
            self._settle(session)
            self._stand(session, head)

    def note(self, record: Noted, origin: Mapping[str, Any], *, bounded: bool = True) -> Noted:
        with self._changing() as data:
            rows: Any = data.records if record.number in data.records else data.sessions
            if record.number not in rows:
                raise SessionNotFoundError(f"session {record.name!r} was deleted")
            now: Noted = replace(rows[record.number], origin=_plain(origin))
            rows[now.number] = now
            if bounded:
                self._check_quota(record.namespace)
            return now

    def pend(self, session: SessionInfo, body: Mapping[str, Any] | None) -> Record | None:
        with self._changing() as data:
            self._fence(session)
            self._standing(session)
            self._settle(session)
            if body is None:
                return None
            number, now = next(data.numbers), time.time()
            data.records[number] = Record(
                number=number,
                namespace=session.namespace,
                name=str(session.number),
                kind=PENDING,
                origin=_plain(body),
                created=now,
                updated=now,
            )
            return data.records[number]

    def pending(self, session: SessionInfo) -> Record | None:
        return self._named(session.namespace, str(session.number), PENDING)

    def _settle(self, session: Record) -> None:
        if (pending := self._named(session.namespace, str(session.number), PENDING)) is not None:
            del self._data.records[pending.number]

    def delete(self, session: Record) -> None:
        with self._changing():
            self._fence(session)
            self._delete(session)

    def head(self, session: SessionInfo) -> tuple[int, bool]:
        with self._reading():
            return self._standing(session).head, self.pending(session) is not None

    # Turns.

    def read(self, reference: TurnReference, count: int, name: str) -> TurnPage:
        with self._reading():
            numbers, turns = self._chain(reference.head, name)
            if turns[-1].digest != reference.digest:
                raise CorruptStateError(f"the turns of session {name!r} are not those that led to it")
            first = max(0, len(turns) - count)
            before = TurnReference(numbers[first - 1], turns[first - 1].digest, first - 1) if first else None
            return TurnPage(numbers[first:], turns[first:], before)

    def start(self, head: int, name: str) -> Turn:
        with self._reading():
            return self._chain(head, name)[1][0]

    def page(
        self, head: int, name: str, *, after: int, limit: int | None = None, nbytes: int | None = None
    ) -> builtins.list[Turn]:
        with self._reading() as data:
            numbers, turns = self._chain(head, name)
            found: list[Turn] = []
            taken = 0
            for number, turn in list(zip(numbers, turns, strict=True))[after + 1 :][:limit]:
                taken += len(data.turns[number].text)
                if found and nbytes is not None and taken > nbytes:
                    break
                found.append(turn)
            return found

    def nbytes(self, head: int) -> int:
        with self._reading():
            return sum(len(row.text) for row in self._path(head))

    def tree(self, session: SessionInfo, *, limit: int, after: str | None = None) -> Tree:
        with self._reading() as data:
            root = self._path(session.head)[-1].number
            rows = [row for row in data.turns.values() if self._path(row.number)[-1].number == root]
            ids = [turn_id(row.digest) for row in rows]
            first = 0
            if after is not None:
                if parse_turn_id(after).hex() not in ids:
                    raise SessionNotFoundError(f"there is no turn {after} in the tree of {session.name!r}")
                first = ids.index(after) + 1
            turns = [self._shown(row) for row in rows[first:][:limit]]
            if after is not None:
                return Tree(turns=turns)
            numbers = {row.number for row in rows}
            return Tree(
                turns=turns,
                sessions=[
                    each
                    for each in data.sessions.values()
                    if each.head in numbers and each.namespace == session.namespace
                ],
                memories=[
                    memory
                    for memory, turn in data.memories.values()
                    if turn in numbers and memory.namespace == session.namespace
                ],
            )

    # Memories.

    def keep_file(self, namespace: str, digest: str, data: bytes) -> None:
        self._data.files[namespace, digest] = data

    def file(self, namespace: str, digest: str) -> bytes | None:
        return self._data.files.get((namespace, digest))

    def label(
        self, session: SessionInfo, at: TurnReference, label: str, kind: str, note: str
    ) -> SessionMemory:
        with self._changing() as data:
            self._standing(session)
            self._check(at.head, at.digest)
            for memory, turn in list(data.memories.values()):
                same = (memory.namespace, memory.session, memory.turn, memory.label)
                if same == (session.namespace, session.name, at.depth, label):
                    del data.memories[memory.number]
                    self._prune(turn)
            made = SessionMemory(
                session=session.name,
                turn=at.depth,
                label=_text(label),
                kind=_text(kind),
                note=_text(note),
                digest=at.digest,
                created=time.time(),
                namespace=session.namespace,
                number=next(data.numbers),
            )
            data.memories[made.number] = (made, at.head)
            self._check_quota(session.namespace)
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
        _check_limit(limit)
        wanted = {"label": label, "kind": kind, "session": session, "turn": turn}
        for each in (namespace, label, kind, session, text):
            _text(each or "")
        with self._reading() as data:
            return [
                memory
                for memory, head in data.memories.values()
                if memory.namespace == namespace
                and memory.number > after
                and all(value is None or getattr(memory, name) == value for name, value in wanted.items())
                and (text is None or _has(memory.note, text) or _has(self._turn(head).added.text, text))
            ][:limit]

    def locate(self, memory: SessionMemory) -> TurnReference:
        with self._reading() as data:
            if memory.number not in data.memories:
                raise SessionNotFoundError(f"the memory at {memory.address} is gone")
            head = data.memories[memory.number][1]
            turns = self._chain(head, memory.session)[1]
            return TurnReference(head, turns[-1].digest, len(turns) - 1)

    def forget(self, memory: SessionMemory) -> None:
        with self._changing() as data:
            if memory.number not in data.memories:
                raise SessionNotFoundError(f"the memory at {memory.address} is gone")
            self._prune(data.memories.pop(memory.number)[1])

    # One at a time.

    def take(self, session: Record) -> bool:
        with self._reading() as data:
            if data.holders.get(session.number) is not None:
                return False
            data.holders[session.number] = self
            self._leases[session.number] = data.tokens[session.number] = (
                data.tokens.get(session.number, 0) + 1
            )
            return True

    def release(self, session: Record) -> None:
        data = self._data
        with data.lock:
            if self._leases.pop(session.number, None) == data.tokens.get(session.number):
                data.holders.pop(session.number, None)

    # The whole.

    def limit(self, namespace: str, quota: Quota | None) -> None:
        if quota is None:
            self._quotas.pop(namespace, None)
        else:
            self._quotas[namespace] = quota

    def sizes(self) -> builtins.list[NamespaceSize]:
        with self._reading() as data:
            names = sorted({info.namespace for info in data.sessions.values()})
            return [self._size(name) for name in names]

    def own_folder(self) -> Path | None:
        return None

    def transfers(self) -> Path | None:
        return None

    def close(self) -> None:
        with self._data.lock:
            self._open = False
            for number in [number for number, holder in self._data.holders.items() if holder is self]:
                del self._data.holders[number]

    # Inside.

    @contextmanager
    def _reading(self) -> Iterator[Data]:
        with self._data.lock:
            if not self._open:
                raise StoreError("the store cannot be used: it was closed")
            yield self._data

    @contextmanager
    def _changing(self) -> Iterator[Data]:
        """A transaction: all of it, or on any error nothing."""
        if self.readonly:
            raise StoreReadOnlyError("the store was opened for reading")
        with self._reading() as data:
            before = dict(data.turns), dict(data.sessions), dict(data.memories), dict(data.records)
            try:
                yield data
            except BaseException:
                data.turns, data.sessions, data.memories, data.records = before
                raise

    def _fence(self, session: Record) -> None:
        """Refuse a holder whose lease ran out and was taken by another."""
        token = self._leases.get(session.number)
        if token is not None and token != self._data.tokens[session.number]:
            raise SessionError(f"session {session.name!r} was taken over by another: nothing was done")

    def _named(self, namespace: str, name: str, kind: str) -> Record | None:
        with self._reading() as data:
            for info in (*data.sessions.values(), *data.records.values()):
                same = info.kind == kind if is_record(kind) else not is_record(info.kind)
                if same and (info.namespace, info.name) == (namespace, name):
                    return info
            return None

    def _standing(self, session: Record, expected: int | None = None) -> SessionInfo:
        now = self._data.sessions.get(session.number)
        if now is None or (now.namespace, now.name) != (session.namespace, session.name):
            raise SessionNotFoundError(f"session {session.name!r} was deleted")
        if expected is not None and now.head != expected:
            raise SessionError(f"session {session.name!r} was changed meanwhile: nothing was done")
        return now

    def _stand(self, session: SessionInfo, head: int) -> None:
        now, row = self._standing(session), self._data.turns[head]
        self._data.sessions[now.number] = replace(
            now, head=head, depth=row.depth, digest=row.digest, updated=max(time.time(), now.updated)
        )
        self._prune(now.head)

    def _delete(self, session: Record) -> None:
        if self._data.records.pop(session.number, None) is not None:
            return
        now = self._standing(session)
        self._settle(session)
        del self._data.sessions[now.number]
        self._prune(now.head)

    def _write(self, parent: int | None, turn: Turn) -> int:
        data = self._data
        if parent is not None:
            self._check(parent, turn.before)
        turn.check_readable()
        number = next(data.numbers)
        depth = 0 if parent is None else data.turns[parent].depth + 1
        data.turns[number] = Row(number, parent, depth, json.dumps(turn.to_json()), turn.digest)
        return number

    def _check(self, number: int, digest: bytes) -> None:
        row = self._data.turns.get(number)
        if row is None:
            raise SessionNotFoundError("the turn to go on from was deleted")
        if row.digest != digest:
            raise CorruptStateError("the turn that this one goes on from is damaged")

    def _prune(self, number: int | None) -> None:
        data = self._data
        while number is not None and number in data.turns:
            led = {info.head for info in data.sessions.values()}
            led |= {turn for _, turn in data.memories.values()}
            led |= {row.parent for row in data.turns.values() if row.parent is not None}
            if number in led:
                return
            number = data.turns.pop(number).parent

    def _path(self, head: int) -> builtins.list[Row]:
        """The rows that lead to `head`, the last one first."""
        rows: list[Row] = []
        number: int | None = head
        while number is not None:
            if number not in self._data.turns:
                raise CorruptStateError("the turns of a session do not lead back to its start")
            rows.append(self._data.turns[number])
            number = rows[-1].parent
        return rows

    def _chain(self, head: int, name: str) -> tuple[builtins.list[int], builtins.list[Turn]]:
        turns: list[Turn] = []
        rows = self._path(head)[::-1]
        for row in rows:
            turns.append(row.turn(turns[-1].digest if turns else FIRST))
        return [row.number for row in rows], turns

    def _turn(self, number: int) -> Turn:
        return self._chain(number, "")[1][-1]

    def _said(self, head: int, text: str) -> bool:
        return any(
            _has(message.content or "", text)
            for turn in self._chain(head, "")[1]
            for message in (*turn.messages, *([turn.reply] if turn.reply is not None else []))
        )

    def _shown(self, row: Row) -> TreeTurn:
        turn = self._turn(row.number)
        parent = self._data.turns[row.parent].digest if row.parent is not None else None
        return TreeTurn(
            id=turn_id(row.digest),
            parent=turn_id(parent) if parent is not None else None,
            depth=row.depth,
            kind=turn.kind,
            said=(turn.messages[-1].content or "")[:160] if turn.messages else "",
            reply=turn.text[:160],
            finish_reason=turn.finish_reason,
            created=turn.created,
        )

    def _size(self, namespace: str) -> NamespaceSize:
        sessions = [info for info in self._data.sessions.values() if info.namespace == namespace]
        rows = {row.number: row for info in sessions for row in self._path(info.head)}
        own = [each for each in self._data.memories.values() if each[0].namespace == namespace]
        counted = rows | {row.number: row for _, head in own for row in self._path(head)}
        texts = [row.text for row in counted.values()]
        texts += [memory.session + memory.label + memory.kind + memory.note for memory, _ in own]
        texts += [info.name + json.dumps([dict(info.settings), dict(info.origin)]) for info in sessions]
        own_records = [each for each in self._data.records.values() if each.namespace == namespace]
        texts += [each.name + json.dumps(dict(each.origin)) for each in own_records]
        return NamespaceSize(
            namespace=namespace,
            sessions=len(sessions),
            turns=sum(row.depth > 0 for row in rows.values()),
            nbytes=sum(256 + len(text) for text in texts),
        )

    def _check_quota(self, namespace: str) -> None:
        quota = self._quotas.get(namespace)
        if quota is None:
            return
        size = self._size(namespace)
        for total, most in ((size.sessions, quota.sessions), (size.nbytes, quota.nbytes)):
            if most is not None and total > most:
                raise QuotaError("this key has stored as much as it may", needed=total, limit=most)


def _order(info: Record) -> tuple[float, int]:
    return info.updated, info.number


def _has(text: str, part: str) -> bool:
    return part.lower() in text.lower()


def _text(value: str) -> str:
    if not isinstance(value, str):
        raise InvalidInputError(f"a text is a string, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"this is not valid Unicode text: {error}") from None
    return value


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    try:
        text = json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"this cannot be written as JSON: {error}") from None
    parsed: dict[str, Any] = json.loads(_text(text))
    return parsed


def _check_limit(limit: int | None) -> None:
    if limit is not None and (not isinstance(limit, int) or not 0 < limit < 2**31):
        raise InvalidInputError(f"limit is None or a number from 1, got {limit!r}")
