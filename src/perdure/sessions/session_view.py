"""A session to be read: what it is, and its turns as the store has them."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from perdure.backend import Backend
from perdure.chat.message import Message
from perdure.chat.transcript import Transcript
from perdure.checks import is_whole
from perdure.errors import (
    CorruptStateError,
    InvalidInputError,
    SessionError,
    SessionNotFoundError,
    StoreError,
)
from perdure.sessions.history import History, Read, TurnPage, TurnReference
from perdure.sessions.info import SessionInfo
from perdure.sessions.turn import Turn, context, transcript

if TYPE_CHECKING:
    from perdure.sessions.store.base import SessionStore

_PAGE_BYTES = 1 << 20


class StoreHost(Protocol):
    """What reading a session needs of those that it is one of."""

    @property
    def store(self) -> SessionStore: ...
    @property
    def backend(self) -> Backend:
        """Raises where no model was loaded."""
        ...

    def check_open(self) -> None:
        """Raises after `close`."""
        ...


class SessionView:
    """A session as it stands in the store. Turns are read when they are asked for. The next read sees what
    another process has changed in the meantime."""

    def __init__(self, host: StoreHost, info: SessionInfo) -> None:
        self._host = host
        self._info = info
        self._lock = threading.RLock()
        place = TurnReference(info.head, info.digest, info.depth)
        self._history = History.at(place, self._reader())
        self._deleted = False
        if host.store.readonly:
            # Another process may change it at any time.
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
    def turns_at_hand(self) -> int:
        """Bytes of memory that those of its turns take that were read, about."""
        return self._history.nbytes

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
        self._refresh()
        return "".join(_transcript(self.name, self._history.turns, form))

    def transcript_parts(self, form: Literal["markdown", "jsonl"] = "markdown") -> Iterator[str]:
        """The same piece by piece: no more turns are in memory than one piece is made of."""
        self._refresh()
        return _transcript(self.name, self._stored_turns(), form)

    # As it stands.

    def standing(self, turn: int | None = None) -> History:
        """Its turns as they are at one moment, whatever follows; up to turn number `turn`, if it is given."""
        self._refresh()
        history = self._history
        if turn is None:
            return history
        self._check_turn(turn, 0)
        return history.first(turn)

    @property
    def _turns(self) -> int:
        return len(self._history)

    def _refresh(self) -> bool:
        """Take in what another process has made of the session; whether it may have a pending turn. A store
        that cannot be read changes nothing: the next write raises the error."""
        if self._deleted or not self._host.store.is_shared or self._host.store.readonly:
            return True
        # First without the lock, which another thread may hold for long: mostly there is nothing new.
        head, has_pending = self._stored_head()
        if head == self._history.head:
            return has_pending
        with self._lock, suppress(StoreError):
            head, has_pending = self._stored_head()
            if head == self._history.head:
                return has_pending
            now = self._host.store.record(self.namespace, self.kind, self.name)
            if not isinstance(now, SessionInfo) or now.number != self._info.number:
                self._deleted = True
                raise SessionNotFoundError(f"session {self.name!r} was deleted")
            self._info = now
            self._history = History.at(TurnReference(now.head, now.digest, now.depth), self._reader())
        return True

    def _stored_head(self) -> tuple[int, bool]:
        """`SessionStore.head`; of a store that cannot be read, what is known."""
        with suppress(StoreError):
            try:
                return self._host.store.head(self._info)
            except SessionNotFoundError:
                self._deleted = True
                raise
        return self._history.head, True

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
            if self._stored_head()[0] != self._history.head:
                raise SessionError(f"session {self.name!r} was changed meanwhile: ask again") from None
            raise

    def _stored_turns(self) -> Iterable[Turn]:
        """All its turns as they are now, which can be gone through several times: a page is in memory at
        once, unless another process may change the store at any time."""
        history = self._history
        return history.turns if self._host.store.readonly else _StoredTurns(self, history.place.head)

    @property
    def _start(self) -> Turn:
        history = self._history
        return history.start(lambda: self._host.store.start(history.head, self.name))

    def _place(self, count: int) -> TurnReference:
        """After its first `count` turns."""
        return self._history.first(count).place

    @property
    def _usable(self) -> Transcript:
        return self._usable_of(self._history)

    def _usable_of(self, history: History) -> Transcript:
        """Its transcript, if the tokens are of this model."""
        return history.transcript_under(self._host.backend.model.digest)

    def _tokens_with_state(self) -> Sequence[int]:
        """The tokens of its transcript, if they are of this model. Its turns are read page by page: no more
        of them is in memory than the transcript itself, and nothing stays."""
        models: set[str] = set()

        def read() -> Iterator[Turn]:
            for turn in self._stored_turns():
                if turn.keep == (0, 0):
                    models.clear()
                if turn.kind != "start" and turn.added.tokens:
                    models.add(turn.model)
                yield turn

        tokens = transcript(read()).tokens
        return tokens if models <= {self._host.backend.model.digest} else ()

    def _check_there(self) -> None:
        self._host.check_open()
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
                f"session {self.name!r} has {count_turns(self._turns)} and no turn {turn!r}: {known}"
            )


@dataclass(frozen=True, slots=True)
class _StoredTurns:
    """The turns of a session that lead to `head`, read again each time they are gone through."""

    session: SessionView
    head: int

    def __iter__(self) -> Iterator[Turn]:
        with self.session._explaining():
            yield from _each_turn(self.session._host.store, self.head, self.session.name)


def _transcript(name: str, turns: Iterable[Turn], form: str) -> Iterator[str]:
    if form not in ("markdown", "jsonl"):
        raise InvalidInputError(f"a transcript is markdown or jsonl, not {form!r}")
    if form == "markdown":
        yield f"# {name}\n"
    for turn in turns:
        for message in context([turn]):
            plain = json.dumps(message.to_dict(), ensure_ascii=False) + "\n" if form == "jsonl" else ""
            yield plain or _markdown(message)


def _markdown(message: Message) -> str:
    named = f" ({message.name})" if message.name else ""
    thought = f"\n*reasoning*\n\n{message.reasoning}\n" if message.reasoning else ""
    calls = "".join(f"\n`{call.name}({call.arguments})`\n" for call in message.tool_calls)
    return f"\n**{message.role}**{named}\n{thought}\n{message.content or ''}\n{calls}"


def count_turns(count: int) -> str:
    return f"{count} turn{'' if count == 1 else 's'}"


def _each_turn(store: SessionStore, head: int, name: str, *, after: int = -1) -> Iterator[Turn]:
    """The turns that lead to `head`, the first one first, read in pages of a mebibyte."""
    while page := store.page(head, name, after=after, nbytes=_PAGE_BYTES):
        yield from page
        after += len(page)
