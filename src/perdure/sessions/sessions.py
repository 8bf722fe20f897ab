"""All the conversations of a store."""

from __future__ import annotations

import functools
import hashlib
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.atomic import translate_os_errors
from perdure.backend import Backend
from perdure.chat.chat_format import ChatFormat
from perdure.chat.message import Message
from perdure.closing import Closing
from perdure.errors import (
    ClosedError,
    PerdureError,
    SessionError,
    SessionExistsError,
)
from perdure.extension import part
from perdure.sessions.history import TurnReference
from perdure.sessions.info import RESPONSE, SessionInfo, SessionMemory, check_session_name
from perdure.sessions.pending_turn import PendingTurns
from perdure.sessions.session import Session
from perdure.sessions.store.registry import open_store
from perdure.sessions.turn import (
    Turn,
    check_settings,
    written_settings,
)

if TYPE_CHECKING:
    from perdure.sessions.memories import Memories
    from perdure.sessions.store.base import SessionStore
    from perdure.sessions.tree import Tree

_SAVED_AT_ONCE = 256
"""Tokens that a session has grown by when its state is next written."""
_EXPIRED_AT_ONCE = 4
_AT_HAND, _AT_HAND_BYTES = 64, 32 << 20
"""Sessions whose turns stay in memory when nobody holds them."""
_WEIGHED_EVERY = 4
"""Sessions that are opened between two weighings, while all weigh less than half of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """A session that was imported: what was taken, and why not more."""

    session: Session
    turns: int
    tokens: int
    """Taken as they were; the next turn computes others from the text."""
    state_tokens: int
    """Whose state was taken."""
    left_out: Mapping[str, str]
    """`tokens` and `state`, each with the reason, where the file had some that were not taken."""


class Sessions(Closing):
    """Opens sessions by their names, one object a session. Safe from any thread.

    An engine is needed only to say something and to move state: without one, sessions are listed, read,
    forked, rewound, labelled, exported and imported all the same.
    """

    def __init__(
        self,
        store: Path | SessionStore | None,
        *,
        backend: Backend | None = None,
        chat_format: Callable[[], ChatFormat] | None = None,
        readonly: bool = False,
        keep_open: bool = False,
    ) -> None:
        """With `keep_open`, a session store that others use too is not closed here."""
        self.store = open_store(store, readonly=readonly)
        self._keep_open = keep_open
        self.pending = PendingTurns(self.store, lambda tokens: self.chat_format.part(tokens))
        self._backend = backend
        self._make_chat_format = chat_format
        self._durable = store is not None and (not keep_open or self.store.transfers() is not None)
        self.moving_state = threading.Lock()
        """Held while all the state of a session is in this process, on its way to or from a file."""
        self._closed = False
        self._lock = threading.RLock()
        self._open: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
        """By their numbers, which are never given out again."""
        self._at_hand: OrderedDict[int, tuple[Session, int]] = OrderedDict()
        """Each with the bytes of its origin."""
        self._weighed, self._opened_since = 0, 0
        self._began = time.time(), time.monotonic()

    def close(self) -> None:
        self.pending.close()
        self._closed = True
        if not self._keep_open:
            self.store.close()

    def check_open(self) -> None:
        """Refuse what is asked after `close`."""
        if self._closed:
            raise ClosedError("the runtime was closed, and its sessions with it: open it again")

    @property
    def has_model(self) -> bool:
        return self._backend is not None and self._make_chat_format is not None

    @functools.cached_property
    def memories(self) -> Memories:
        from perdure.sessions.memories import Memories

        return Memories(self.store, self._wake_at)

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            raise SessionError("this takes a model, and none was loaded")
        return self._backend

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        if self._make_chat_format is None:
            raise SessionError("this takes a model, and none was loaded")
        return self._make_chat_format()

    def open(
        self,
        name: str,
        *,
        system: str | None = None,
        namespace: str = "",
        create: bool = True,
        settings: Mapping[str, Any] | None = None,
        agent: str = "",
    ) -> Session:
        """The session of that name, or a new one. `agent` is the program that asks, if it is known."""
        self.check_open()
        if create and not self.store.has(namespace, name):
            # Another process may be faster.
            with suppress(SessionExistsError):
                return self.create(name, system=system, namespace=namespace, settings=settings, agent=agent)
        written = written_settings(settings or {})
        session = self._opened(self.store.find(namespace, name))
        if system is not None and session.system != system:
            raise SessionError(
                f"session {name!r} has another system message: leave it out to go on with that one, or "
                "choose another name"
            )
        if written and written != dict(session.settings):
            raise SessionError(
                f"session {name!r} has other settings: leave them out, or give them with each turn"
            )
        return session.reading_as(settings or {})

    def create(
        self,
        name: str,
        *,
        system: str | None = None,
        namespace: str = "",
        settings: Mapping[str, Any] | None = None,
        agent: str = "",
        parent: str = "",
    ) -> Session:
        """A new session. One of that name that exists already is an error. `agent` is the program that asks
        for it, if it is known, and `parent` the session of the agent that started it."""
        self.check_open()
        check_session_name(name)
        written = written_settings(settings or {})
        check_settings(written)
        start = Turn(
            kind="start",
            messages=(Message(role="system", content=system),) if system is not None else (),
        )
        origin = {name: value for name, value in (("agent", agent), ("parent", parent)) if value}
        made = self.store.create(namespace, name, [start], settings=written, origin=origin)
        return self._opened(made).reading_as(settings or {})

    def temporary_folder(self) -> tempfile.TemporaryDirectory[str]:
        """A new folder for a file on its way in or out, which only the owner may enter."""
        place = self.store.transfers()
        with translate_os_errors(place or Path(tempfile.gettempdir())):
            return tempfile.TemporaryDirectory(prefix="session-", dir=place)

    def get(self, name: str, namespace: str = "") -> Session:
        """The session of that name; an error where there is none."""
        return self.open(name, namespace=namespace, create=False)

    def list(
        self,
        namespace: str = "",
        *,
        limit: int | None = None,
        after: str | None = None,
        text: str | None = None,
    ) -> list[SessionInfo]:
        """Those of a namespace, the latest first: up to `limit`, behind the one that is called `after`. With
        `text`, those that have it in their names or in what was said."""
        self.check_open()
        last = self.store.find(namespace, after) if after is not None else None
        return self.store.list(namespace, limit=limit, after=last, text=text)

    def tree(self, name: str, namespace: str = "", *, limit: int = 1000, after: str | None = None) -> Tree:
        """The session of that name with all that branched off, or that it branched off from."""
        self.check_open()
        return self.store.tree(self.store.find(namespace, name), limit=limit, after=after)

    def delete(self, name: str, namespace: str = "") -> None:
        """Forget a session, also one whose turns cannot be read any more. Forks of it, and memories, stay."""
        self.check_open()
        self._opened(self.store.find(namespace, name)).delete()

    def response(self, name: str, namespace: str = "") -> Session:
        """The stored response of that id, as the session whose last turn it is."""
        self.check_open()
        info = self.store.record(namespace, RESPONSE, name)
        assert isinstance(info, SessionInfo)
        return self._opened(info)

    def expire(self, kind: str, seconds: float) -> None:
        """Delete a few of the records of a kind that are older than that: a few more than one, so that a
        caller with each new one keeps their number bounded at a cost that does not grow."""
        # A clock that was set meanwhile, ahead or right, ends nothing that is not old.
        now = min(time.time(), self._began[0] + time.monotonic() - self._began[1])
        for namespace, name in self.store.expired(now - seconds, limit=_EXPIRED_AT_ONCE, kind=kind):
            # One that is damaged, or in use, must not be in the way of a new one.
            with suppress(PerdureError):
                record = self.store.record(namespace, kind, name)
                if isinstance(record, SessionInfo):
                    self._opened(record).delete()
                elif self.store.take(record):
                    try:
                        self.store.delete(record)
                    finally:
                        self.store.release(record)

    def import_(
        self,
        path: str | Path,
        name: str | None = None,
        *,
        namespace: str = "",
        trust_state: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> ImportResult:
        """A session out of a file that `Session.export` wrote, all of it verified first.

        Tokens are taken if they stand for the text, state if this store wrote the file. With `trust_state`,
        state of another store is believed as well: nothing can prove that it is what the model would compute.
        """
        result: ImportResult = part("sessions.import_", "upkeep")(
            self, Path(path), name, namespace=namespace, trust_state=trust_state, progress=progress
        )
        return result

    def copy(self, session: Session, name: str, *, replace: bool = False) -> Session:
        """A session of another runtime, with all its turns, under a name here; or in the place of the one
        that has that name."""
        check_session_name(name)
        there = replace and self.store.has(session.namespace, name)
        old = self.get(name, session.namespace) if there else None
        for digest in {digest: None for turn in session.standing().turns for digest in turn.files}:
            if (data := session._host.store.file(session.namespace, digest)) is not None:
                self.store.keep_file(session.namespace, digest, data)
        with old._changing() if old is not None else nullcontext():
            info = self.store.create(
                session.namespace,
                name,
                session.standing().turns,
                kind=session.kind,
                settings=session.settings,
                origin=session.origin,
                replaces=old.info if old is not None else None,
            )
            if old is not None:
                old._deleted = True
        return self._opened(info)

    # For sessions.

    def file(self, namespace: str, digest: str) -> bytes | None:
        """A file that turns name, as it was sent; None where it is gone. An encrypted one takes a model."""
        data = self.store.file(namespace, digest)
        if data is None or hashlib.sha256(data).hexdigest() == digest:
            return data
        return self.chat_format.image_reader().file(digest, namespace) if self.has_model else None

    def branch(
        self,
        session: Session,
        name: str,
        place: TurnReference,
        *,
        how: str,
        turns: Sequence[Turn] = (),
        kind: str = "session",
    ) -> Session:
        check_session_name(name)
        title = {each: session.origin[each] for each in ("title", "folder") if session.origin.get(each)}
        made = self._opened(
            self.store.create(
                session.namespace,
                name,
                turns,
                head=place.head,
                digest=place.digest,
                kind=kind,
                settings=session.settings,
                origin=title | {"how": how, "session": session.name, "turn": place.depth},
            )
        )
        made.saved, made._schema = session.saved, session._schema
        return made

    def remove(self, session: Session) -> None:
        self.store.delete(session.info)
        with self._lock:
            if self._open.pop(session.info.number, None) is not None:
                self._at_hand.pop(session.info.number, None)

    def write_behind(
        self,
        tokens: Sequence[int],
        namespace: str,
        saved: int,
        *,
        adapters: Mapping[str, float] | None = None,
    ) -> int:
        """Have the state of a session written now and then, when nobody waits for the engine.

        A few turns at a time: reading a state out of the engine takes longer the longer it is, so it is read
        whenever an eighth of it is new: that costs a token the same in a long session as in a short one.
        What is not written when the process dies is computed from the turns, which are.
        """
        enough = max(_SAVED_AT_ONCE, saved // 8)
        if self._durable and len(tokens) - saved >= enough and self.backend.load == (0, 0):
            with suppress(PerdureError):
                self.backend.cache.save(tokens, namespace=namespace, adapters=adapters)
                return len(tokens)
        return saved

    def save_in_quiet(
        self,
        tokens: Sequence[int],
        namespace: str,
        conversation: str,
        *,
        adapters: Mapping[str, float] | None = None,
    ) -> None:
        """Have the state of a session, and what is read ahead for it, written as soon as the engine has
        nothing to do: whatever dies then, only what is new is read again."""
        if self._durable:
            cache = self.backend.cache
            self.chat_format.prefetcher.then(
                lambda: cache.save(tokens, namespace=namespace, adapters=adapters, conversation=conversation)
            )

    # Inside.

    def _wake_at(self, memory: SessionMemory, name: str) -> Session:
        check_session_name(name)
        at = self.store.locate(memory)
        return self._opened(
            self.store.create(
                memory.namespace,
                name,
                head=at.head,
                digest=at.digest,
                origin={
                    "how": "wake",
                    "session": memory.session,
                    "turn": memory.turn,
                    "label": memory.label,
                },
            )
        )

    def _opened(self, info: SessionInfo) -> Session:
        """The one object for a session. Which sessions there are is for the store to say."""
        with self._lock:
            session = self._open.get(info.number)
            if session is None:
                session = self._open[info.number] = Session(self, info)
            self._keep_at_hand(info.number, session)
            return session

    def _keep_at_hand(self, key: int, session: Session) -> None:
        """Keep a session in memory, and let those go that were not asked for the longest. A stored response
        has its whole request in its origin: one that is large by itself is read again each time."""
        before, nbytes = self._at_hand.pop(key, (None, 0))
        if before is not session:
            nbytes = _weight(session.origin)
            self._weighed += nbytes
        self._at_hand[key] = session, nbytes
        if len(self._at_hand) > _AT_HAND:
            self._at_hand.popitem(last=False)
        self._opened_since += 1
        if self._opened_since < _WEIGHED_EVERY and self._weighed < _AT_HAND_BYTES // 2:
            return
        while (weighed := self.at_hand[1]) > _AT_HAND_BYTES:
            self._at_hand.popitem(last=False)
        self._weighed, self._opened_since = weighed, 0

    @property
    def at_hand(self) -> tuple[int, int]:
        """How many sessions are kept in memory, and about how many bytes these take: they grow in use."""
        entries = self._at_hand.values()
        return len(entries), sum(origin + session.turns_at_hand for session, origin in entries)


def _weight(value: Any) -> int:
    """About how many bytes of memory a JSON value takes."""
    if isinstance(value, str):
        return 56 + len(value)
    if isinstance(value, dict):
        return 64 + sum(_weight(name) + _weight(each) for name, each in value.items())
    return 64 + sum(map(_weight, value)) if isinstance(value, (list, tuple)) else 32
