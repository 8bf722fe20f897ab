"""A conversation as it stands in the store: what was said, and who may change it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from perdure.chat.message import Message
from perdure.chat.reply import ChatReply
from perdure.checks import is_whole
from perdure.errors import (
    CorruptStateError,
    InvalidInputError,
    SessionBusyError,
    SessionError,
    SessionNotFoundError,
    StoreError,
)
from perdure.sessions.fold import TurnStream
from perdure.sessions.history import History, Read, TurnPage, TurnReference
from perdure.sessions.info import SessionInfo, SessionMemory
from perdure.sessions.store.base import SessionStore, each_turn
from perdure.sessions.turn import Said, Turn, context, said_messages


class StoreHost(Protocol):
    """What a session needs of those that it is one of, to be read and changed."""

    @property
    def store(self) -> SessionStore: ...
    def remove(self, session: StoredSession) -> None: ...


@dataclass(slots=True, eq=False)
class PendingTurn:
    """A turn on its way, or a fold. A stream that nobody holds any more is cancelled, so it must not be
    held here."""

    head: int
    """The turn at which the session stood when it began."""
    let_go: Callable[[], None]
    stream: weakref.ref[TurnStream] | None = None
    """None while it is being prepared."""
    ended: bool = False

    def release(self) -> None:
        """Let other processes have the session again. Only the first time does something."""
        if not self.ended:
            self.ended = True
            self.let_go()


class StoredSession:
    """A named conversation in a store. Safe from any thread; one change at a time. It needs no model.

    Nothing waits for a model while the session's lock is held. Once it was deleted, it refuses whatever
    would touch the store. What another process has made of it in the meantime is seen by whoever reads or
    changes it next.
    """

    def __init__(self, host: StoreHost, info: SessionInfo) -> None:
        self._host = host
        self._info = info
        self._lock = threading.RLock()
        self._pending: PendingTurn | None = None
        place = TurnReference(info.head, info.digest, info.depth)
        self._history = History.at(place, self._reader())
        self._saved: int | None = None
        """Tokens whose state was written. None before the first turn: that turn then shows it."""
        self._deleted = False
        self.last: ChatReply | None = None
        """The latest reply that this process has made."""
        if host.store.readonly:
            # Somebody else may change it at any time.
            self._history.turns  # noqa: B018

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, {self._turns} turns>"

    # What it is.

    @property
    def name(self) -> str:
        return self._info.name

    @property
    def namespace(self) -> str:
        return self._info.namespace

    @property
    def kind(self) -> str:
        return self._info.kind

    @property
    def origin(self) -> Mapping[str, Any]:
        """What it came from: which session, after how many turns, and how."""
        return self._info.origin

    @property
    def settings(self) -> Mapping[str, Any]:
        """What is asked of every reply, unless a turn asks for something else."""
        return self._info.settings

    @property
    def info(self) -> SessionInfo:
        """As it was listed when it was opened."""
        return self._info

    @property
    def system(self) -> str | None:
        # The start of a session never changes.
        first = self._start.messages
        return first[0].content if first and first[0].role == "system" else None

    @property
    def turns(self) -> int:
        self._refresh()
        return self._turns

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that the model has read and written, as far as it is still in the conversation."""
        self._refresh()
        return tuple(self._history.transcript.tokens)

    @property
    def token_count(self) -> int:
        """How many those are. The last turn says so: no other is read for it."""
        self._refresh()
        return self._history.token_count

    @property
    def turn_bytes(self) -> int:
        """What its turns take in the store, apart from state."""
        return self._host.store.nbytes(self._place(self.turns).head)

    def history(self, *, limit: int | None = None, after: int = 0, nbytes: int | None = None) -> list[Turn]:
        """Its turns, the first one first: up to `limit` of them, behind turn number `after`. With `nbytes`,
        as many as are in so many bytes together, but one at least; no others are read."""
        for name, value, low in (("limit", limit, 1), ("after", after, 0), ("nbytes", nbytes, 1)):
            if value is not None and (not is_whole(value) or value < low):
                raise InvalidInputError(f"{name} is a number from {low}, got {value!r}")
        self._refresh()
        if nbytes is None or self._host.store.readonly:
            return self._history.page(after, limit)
        with self._explaining():
            head = self._history.place.head
            return self._host.store.page(head, self.name, after=after, limit=limit, nbytes=nbytes)

    def messages(self) -> list[Message]:
        """What the next prompt starts with."""
        self._refresh()
        return list(self._history.messages)

    def transcript(self, form: Literal["markdown", "jsonl"] = "markdown") -> str:
        """The conversation as text to read, or as a message a line: everything that the model reads."""
        return "".join(self.transcript_parts(form))

    def transcript_parts(self, form: Literal["markdown", "jsonl"] = "markdown") -> Iterator[str]:
        """The same piece by piece: no more turns are in memory than one piece is made of."""
        if form not in ("markdown", "jsonl"):
            raise InvalidInputError(f"a transcript is markdown or jsonl, not {form!r}")
        self._refresh()
        yield f"# {self.name}\n" if form == "markdown" else ""
        for turn in self._stored_turns():
            for message in context([turn]):
                plain = json.dumps(message.to_dict(), ensure_ascii=False) + "\n" if form == "jsonl" else ""
                yield plain or _markdown(message)

    # Changing it.

    def append(self, said: Said) -> None:
        """Have messages said that nobody answers yet."""
        messages = said_messages(said)
        with self._changing():
            base = self._history
            whole = base.transcript
            turn = Turn(
                kind="turn",
                messages=tuple(messages),
                keep=whole.cuts[-1] if whole.cuts else (0, 0),
                created=time.time(),
                before=base.place.digest,
            )
            numbers = self._host.store.add(self._info, [turn], parent=base.head, expected=base.head)
            self._history = base.then(numbers, [turn])

    def note(self, origin: Mapping[str, Any]) -> None:
        """Add to what is written down of its origin. Entries that are not named here stay."""
        with self._lock:
            self._check_there()
            self._info = self._host.store.note(self._info, {**self._info.origin, **origin})

    def rewind(self, turns: int = 1, *, to: int | None = None) -> None:
        """Go back by a number of turns, or to after turn number `to`."""
        with self._changing():
            if not is_whole(turns) or turns < 0:
                raise InvalidInputError(f"turns is a whole number from 0, got {turns!r}")
            if to is None and turns > self._turns:
                raise InvalidInputError(
                    f"session {self.name!r} has {_turns(self._turns)}, so it cannot go back by {turns}"
                )
            count = self._turns - turns if to is None else to
            self._check_turn(count, 0)
            now, then = self._history, self._history.first(count)
            there = then.place
            self._host.store.move(self._info, there.head, digest=there.digest, expected=now.head)
            self._history = then

    def label(
        self, label: str, *, kind: str = "memory", turn: int | None = None, note: str = ""
    ) -> SessionMemory:
        """Mark a turn of this session, so that it can be woken by its address."""
        for name, value in (("label", label), ("kind", kind)):
            if not isinstance(value, str) or not value:
                raise InvalidInputError(f"a {name} is a text that is not empty, got {value!r}")
        if not isinstance(note, str):
            raise InvalidInputError(f"a note is a text, got {note!r}")
        with self._lock:
            self._check_there()
            self._refresh()
            count = self._turns if turn is None else turn
            self._check_turn(count, 0)
            at = self._place(count)
            return self._host.store.label(self._info, at, label, kind, note)

    def delete(self) -> None:
        """Forget the session. Forks of it, and memories, stay."""
        with self._changing():
            self._host.remove(self)
            self._deleted = True

    async def arewind(self, turns: int = 1, *, to: int | None = None) -> None:
        """Like `rewind`, for asyncio."""
        await asyncio.to_thread(self.rewind, turns, to=to)

    async def alabel(
        self, label: str, *, kind: str = "memory", turn: int | None = None, note: str = ""
    ) -> SessionMemory:
        """Like `label`, for asyncio."""
        return await asyncio.to_thread(self.label, label, kind=kind, turn=turn, note=note)

    async def adelete(self) -> None:
        """Like `delete`, for asyncio."""
        await asyncio.to_thread(self.delete)

    # As it stands.

    @property
    def _turns(self) -> int:
        return len(self._history)

    def _refresh(self) -> None:
        """Take in what another process has made of the session. A store that cannot be read changes nothing:
        whoever writes is told of it."""
        if self._deleted or not self._host.store.is_shared or self._host.store.readonly:
            return
        # First without the lock, which somebody may hold for long: mostly there is nothing new.
        if self._is_current():
            return
        with self._lock, suppress(StoreError):
            if self._is_current():
                return
            now = self._host.store.find(self.namespace, self.name)
            if now.number != self._info.number:
                self._deleted = True
                raise SessionNotFoundError(f"session {self.name!r} was deleted")
            self._info = now
            self._history = History.at(TurnReference(now.head, now.digest, now.depth), self._reader())

    def _is_current(self) -> bool:
        with suppress(StoreError):
            try:
                head = self._host.store.head(self._info)
            except SessionNotFoundError:
                self._deleted = True
                raise
            return head == self._history.head
        return True

    def _reader(self) -> Read:
        """Reads its turns. It does not hold the session: one that nobody holds goes at once."""
        store, name, session = self._host.store, self.name, weakref.ref(self)

        def read(place: TurnReference, count: int) -> TurnPage:
            here = session()
            with here._explaining() if here is not None else nullcontext():
                return store.read(place, count, name)

        return read

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turns that are gone are those of a session that was deleted, or moved by another process."""
        try:
            yield
        except CorruptStateError:
            self._check_there()
            if not self._is_current():
                raise SessionError(f"session {self.name!r} was changed meanwhile: ask again") from None
            raise

    def _stored_turns(self) -> Iterable[Turn]:
        """All its turns as they are now, which can be gone through several times: a page is in memory at
        once, unless somebody else may change the store at any time."""
        history = self._history
        return history.turns if self._host.store.readonly else _StoredTurns(self, history.place.head)

    @property
    def _start(self) -> Turn:
        history = self._history
        return history.start(lambda: self._host.store.start(history.head, self.name))

    def _place(self, count: int) -> TurnReference:
        """After its first `count` turns."""
        return self._history.first(count).place

    # One at a time.

    def _begin(self) -> tuple[PendingTurn, History]:
        """Have the session for a turn or a fold; nobody else gets it before `_end`, or the stream's end."""
        with self._lock:
            self._take()
            try:
                history = self._history
            except BaseException:
                self._host.store.release(self._info)
                raise
            info, store = self._info, self._host.store
            self._pending = pending = PendingTurn(history.head, lambda: store.release(info))
            return pending, history

    def _lend(self, pending: PendingTurn) -> None:
        """Have nobody else change the session while a turn that it is to follow is on its way. Refused where
        the session does not stand where that turn began: the turn could not become part of it."""
        with self._lock:
            self._take()
            if self._history.head != pending.head:
                self._host.store.release(self._info)
                raise SessionError(
                    f"session {self.name!r} has moved on since this turn was asked for, so it cannot become "
                    "part of it: ask again"
                )
            info, store, first = self._info, self._host.store, pending.let_go

            def let_go() -> None:
                first()
                store.release(info)

            pending.let_go = let_go
            self._pending = pending

    def _follow(self, history: History, pending: PendingTurn) -> None:
        with self._lock:
            self._history = history
            if self._pending is pending:
                self._pending = None

    def _end(self, pending: PendingTurn) -> None:
        with self._lock:
            pending.release()
            if self._pending is pending:
                self._pending = None

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Held while a session is moved about: nobody else does, and no turn is on its way."""
        with self._lock:
            self._take()
            try:
                yield
            finally:
                self._host.store.release(self._info)

    def _take(self) -> None:
        """Have the session as it is now, before all other threads and processes."""
        self._check_there()
        self._check_free()
        if self._pending is not None:
            self._pending.release()
        if not self._host.store.take(self._info):
            raise SessionBusyError(
                f"session {self.name!r} is answering another turn in another program: wait for it, or fork it"
            )
        try:
            self._refresh()
        except BaseException:
            self._host.store.release(self._info)
            raise

    def _check_free(self) -> None:
        pending = self._pending
        if pending is None or pending.ended:
            return
        stream = pending.stream() if pending.stream is not None else None
        if pending.stream is None or (stream is not None and not (stream.done or stream.cancelled)):
            raise SessionBusyError(
                f"session {self.name!r} is answering another turn: wait for it, cancel it, or fork it"
            )

    def _check_there(self) -> None:
        if self._deleted:
            raise SessionNotFoundError(f"session {self.name!r} was deleted")

    def _check_turn(self, turn: int, low: int) -> None:
        if not is_whole(turn) or not low <= turn <= self._turns:
            known = (
                f"turns are numbered from {low} to {self._turns}"
                if self._turns >= low
                else "none can be named"
            )
            raise InvalidInputError(
                f"session {self.name!r} has {_turns(self._turns)} and no turn {turn!r}: {known}"
            )


@dataclass(frozen=True, slots=True)
class _StoredTurns:
    """The turns of a session that lead to `head`, read again each time they are gone through."""

    session: StoredSession
    head: int

    def __iter__(self) -> Iterator[Turn]:
        with self.session._explaining():
            yield from each_turn(self.session._host.store, self.head, self.session.name)


def _markdown(message: Message) -> str:
    named = f" ({message.name})" if message.name else ""
    thought = f"\n*reasoning*\n\n{message.reasoning}\n" if message.reasoning else ""
    calls = "".join(f"\n`{call.name}({call.arguments})`\n" for call in message.tool_calls)
    return f"\n**{message.role}**{named}\n{thought}\n{message.content or ''}\n{calls}"


def _turns(count: int) -> str:
    return f"{count} turn{'' if count == 1 else 's'}"
