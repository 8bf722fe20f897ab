"""Sessions, turns and memories, in SQLite."""

from __future__ import annotations

import json
import tempfile
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from perdure.chat.message import Message
from perdure.chat.transcript import Transcript
from perdure.errors import (
    CorruptStateError,
    InvalidInputError,
    SessionExistsError,
    SessionNotFoundError,
    StoreLockedError,
)
from perdure.sessions.turn import FIRST, Turn, pack_tokens
from perdure.store.durable import explained, sync_folder
from perdure.store.index import Index

MIGRATIONS: Sequence[str] = (
    """
    CREATE TABLE turn (
        number INTEGER PRIMARY KEY,
        parent INTEGER REFERENCES turn (number),
        depth INTEGER NOT NULL,
        kind TEXT NOT NULL,
        messages TEXT NOT NULL,
        reply TEXT,
        keep_chars INTEGER NOT NULL,
        keep_tokens INTEGER NOT NULL,
        text TEXT NOT NULL,
        tokens BLOB NOT NULL,
        cuts BLOB NOT NULL,
        settings TEXT NOT NULL,
        seed INTEGER NOT NULL,
        finish_reason TEXT NOT NULL,
        usage TEXT NOT NULL,
        dropped INTEGER NOT NULL,
        model TEXT NOT NULL,
        created REAL NOT NULL,
        digest BLOB NOT NULL
    );
    CREATE INDEX turn_parent ON turn (parent);
    CREATE TABLE session (
        number INTEGER PRIMARY KEY,
        namespace TEXT NOT NULL,
        name TEXT NOT NULL,
        kind TEXT NOT NULL,
        head INTEGER NOT NULL REFERENCES turn (number),
        settings TEXT NOT NULL,
        origin TEXT NOT NULL,
        created REAL NOT NULL,
        updated REAL NOT NULL,
        UNIQUE (namespace, name)
    );
    CREATE INDEX session_head ON session (head);
    CREATE TABLE memory (
        number INTEGER PRIMARY KEY,
        namespace TEXT NOT NULL,
        session TEXT NOT NULL,
        turn INTEGER NOT NULL REFERENCES turn (number),
        depth INTEGER NOT NULL,
        label TEXT NOT NULL,
        kind TEXT NOT NULL,
        note TEXT NOT NULL,
        digest BLOB NOT NULL,
        created REAL NOT NULL,
        UNIQUE (namespace, session, depth, label)
    );
    CREATE INDEX memory_turn ON memory (turn);
    """,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A session as it is listed."""

    number: int
    namespace: str
    name: str
    kind: str
    head: int
    depth: int
    settings: Mapping[str, Any]
    origin: Mapping[str, Any]
    created: float
    updated: float


class Register:
    """The durable part of sessions. For any thread.

    Always holds: a turn is written once and whole, after the one before it; a session names a turn that is
    there; turns that nothing leads to any more go with what last led to them.
    """

    def __init__(self, folder: Path | None, *, readonly: bool = False) -> None:
        """In `folder`, or without one for as long as this lasts."""
        self.readonly = readonly
        self.folder = folder
        with ExitStack() as held:
            if folder is None:
                path = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="perdure-")))
            else:
                path = folder
                if not readonly:
                    with explained(path):
                        path.mkdir(parents=True, exist_ok=True)
                    held.callback(_locked(path / "sessions.lock").release)
            self.index = Index(
                path / "sessions.sqlite",
                readonly=readonly,
                migrations=MIGRATIONS,
                durable=folder is not None,
                advice="restore it from a copy, or move it away and import what was exported",
            )
            held.callback(self.index.close)
            if folder is not None and not readonly and self.index.created:
                sync_folder(path)
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
    ) -> Row:
        """A new session: at a turn that is there, followed by turns that are not yet."""
        now = time.time()
        with self._writing():
            if self._find(namespace, name) is not None:
                raise SessionExistsError(
                    f"there is a session {name!r} already: choose another name, or delete it"
                )
            for turn in turns:
                head = self._add(head, turn)
            self.index.run(
                "INSERT INTO session (namespace, name, kind, head, settings, origin, created, updated)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                namespace,
                name,
                kind,
                head,
                json.dumps(dict(settings or {})),
                json.dumps(dict(origin or {})),
                now,
                now,
            )
            row = self._find(namespace, name)
            assert row is not None
            return row

    def find(self, namespace: str, name: str) -> Row:
        found = self._find(namespace, name)
        if found is None:
            raise SessionNotFoundError(f"there is no session {name!r}")
        return found

    def has(self, namespace: str, name: str) -> bool:
        return self._find(namespace, name) is not None

    def list(self, namespace: str | None = None) -> list[Row]:
        """The latest first."""
        where, values = ("", ()) if namespace is None else ("WHERE s.namespace = ?", (namespace,))
        return [_row(each) for each in self.index.rows(f"{_SELECT} {where} ORDER BY s.updated DESC", *values)]

    def chain(self, head: int) -> tuple[Sequence[int], Sequence[Turn]]:
        """The turns that lead to `head`, with it, each proved by its digest."""
        rows = self.index.rows(
            "WITH RECURSIVE up (number, parent, level) AS ("
            " SELECT number, parent, 0 FROM turn WHERE number = ?"
            " UNION ALL SELECT t.number, t.parent, level + 1 FROM turn t JOIN up ON t.number = up.parent"
            f") SELECT {_TURN} FROM up JOIN turn t ON t.number = up.number ORDER BY up.level DESC",
            head,
        )
        numbers, turns, before = [], [], FIRST
        for row in rows:
            turn = _turn(row, before)
            numbers.append(int(row[0]))
            turns.append(turn)
            before = turn.digest
        if not turns or turns[0].kind != "start":
            raise CorruptStateError("the turns of a session do not lead back to its start")
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
            [(head,)] = self.index.rows("SELECT head FROM session WHERE number = ?", session)
            self.index.run("DELETE FROM session WHERE number = ?", session)
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
            self.index.run(
                "INSERT OR REPLACE INTO memory"
                " (namespace, session, turn, depth, label, kind, note, digest, created)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                namespace,
                session,
                turn,
                depth,
                label,
                kind,
                note,
                digest,
                time.time(),
            )

    def forget(self, memory: int) -> None:
        with self._writing():
            found = self.index.rows("SELECT turn FROM memory WHERE number = ?", memory)
            self.index.run("DELETE FROM memory WHERE number = ?", memory)
            for (turn,) in found:
                self._prune(turn)

    # Inside.

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with self.index.writing():
                yield
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"this is not valid Unicode text: {error}") from None

    def _find(self, namespace: str, name: str) -> Row | None:
        try:
            rows = self.index.rows(f"{_SELECT} WHERE s.namespace = ? AND s.name = ?", namespace, name)
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"a session's name must be valid Unicode text: {error}") from None
        return _row(rows[0]) if rows else None

    def _add(self, parent: int | None, turn: Turn) -> int:
        depth = 0
        if parent is not None:
            [(depth,)] = self.index.rows("SELECT depth FROM turn WHERE number = ?", parent)
            depth += 1
        cuts = array("q", [figure for cut in turn.added.cuts for figure in cut])
        self.index.run(
            "INSERT INTO turn (parent, depth, kind, messages, reply, keep_chars, keep_tokens, text, tokens,"
            " cuts, settings, seed, finish_reason, usage, dropped, model, created, digest)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            parent,
            depth,
            turn.kind,
            json.dumps([message.to_dict() for message in turn.messages]),
            json.dumps(turn.reply.to_dict()) if turn.reply is not None else None,
            *turn.keep,
            turn.added.text,
            pack_tokens(turn.added.tokens),
            cuts.tobytes(),
            json.dumps(dict(turn.settings)),
            turn.seed,
            turn.finish_reason,
            json.dumps(dict(turn.usage)),
            turn.dropped,
            turn.model,
            turn.created,
            turn.digest,
        )
        [(number,)] = self.index.rows("SELECT last_insert_rowid()")
        return int(number)

    def _move(self, session: int, head: int) -> None:
        found = self.index.rows("SELECT head FROM session WHERE number = ?", session)
        if not found:
            raise SessionNotFoundError("this session was deleted")
        self.index.run(
            "UPDATE session SET head = ?, updated = ? WHERE number = ?", head, time.time(), session
        )
        self._prune(found[0][0])

    def _prune(self, turn: int | None) -> None:
        """Delete a turn that nothing leads to any more, and then what led only to it."""
        while turn is not None:
            [(needed,)] = self.index.rows(
                "SELECT EXISTS (SELECT 1 FROM turn WHERE parent = ?1)"
                " OR EXISTS (SELECT 1 FROM session WHERE head = ?1)"
                " OR EXISTS (SELECT 1 FROM memory WHERE turn = ?1)",
                turn,
            )
            if needed:
                return
            [(parent,)] = self.index.rows("SELECT parent FROM turn WHERE number = ?", turn)
            self.index.run("DELETE FROM turn WHERE number = ?", turn)
            turn = parent


_SELECT = (
    "SELECT s.number, s.namespace, s.name, s.kind, s.head, t.depth, s.settings, s.origin, s.created,"
    " s.updated FROM session s JOIN turn t ON t.number = s.head"
)
_TURN = (
    "t.number, t.kind, t.messages, t.reply, t.keep_chars, t.keep_tokens, t.text, t.tokens, t.cuts,"
    " t.settings, t.seed, t.finish_reason, t.usage, t.dropped, t.model, t.created, t.digest"
)


def _row(row: tuple[Any, ...]) -> Row:
    number, namespace, name, kind, head, depth, settings, origin, created, updated = row
    try:
        return Row(
            number=number,
            namespace=namespace,
            name=name,
            kind=kind,
            head=head,
            depth=depth,
            settings=json.loads(settings),
            origin=json.loads(origin),
            created=created,
            updated=updated,
        )
    except (TypeError, ValueError) as error:
        raise CorruptStateError(f"the entry of session {name!r} is damaged: {error}") from error


def _turn(row: tuple[Any, ...], before: bytes) -> Turn:
    """SQLite has no checksums: a turn that is not what its digest says is refused."""
    (
        _,
        kind,
        messages,
        reply,
        chars,
        tokens,
        text,
        ids,
        cuts,
        settings,
        seed,
        reason,
        usage,
        dropped,
        model,
        created,
        digest,
    ) = row
    try:
        figures = array("q", cuts)
        turn = Turn(
            kind=kind,
            messages=tuple(Message.parse(message) for message in json.loads(messages)),
            reply=Message.parse(json.loads(reply)) if reply is not None else None,
            keep=(chars, tokens),
            added=Transcript(text, array("i", ids), tuple(zip(figures[::2], figures[1::2], strict=True))),
            settings=json.loads(settings),
            seed=seed,
            finish_reason=reason,
            usage=json.loads(usage),
            dropped=dropped,
            model=model,
            created=created,
            before=before,
        )
        found = turn.digest
    except (TypeError, ValueError, AttributeError, InvalidInputError) as error:
        raise CorruptStateError(f"a turn of a session is damaged: {error}") from error
    if found != digest:
        raise CorruptStateError("a turn of a session is not what its digest says: it was damaged or replaced")
    return turn


def _locked(path: Path) -> FileLock:
    lock = FileLock(path, thread_local=False)
    with explained(path):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StoreLockedError(
                f"the sessions in {path.parent} are in use, by another process or another runtime of this "
                "one: close that one, or open the store for reading"
            ) from None
    return lock
