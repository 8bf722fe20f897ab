"""All the conversations of a store."""

from __future__ import annotations

import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from perdure.backend import Backend
from perdure.chat.chat_format import ChatFormat
from perdure.chat.message import Message
from perdure.errors import (
    InvalidInputError,
    PerdureError,
    SessionError,
    SessionExistsError,
    TemplateError,
)
from perdure.sessions.export import read_export
from perdure.sessions.history import TurnReference
from perdure.sessions.importing import ImportResult, check_settings, take_state, why_not_tokens
from perdure.sessions.info import SessionInfo, SessionMemory
from perdure.sessions.memories import Memories
from perdure.sessions.session import Session
from perdure.sessions.store.base import RESPONSE, SessionStore
from perdure.sessions.store.registry import open_store
from perdure.sessions.tree import Tree
from perdure.sessions.turn import Turn, said_messages, transcript, without_tokens
from perdure.store.durable import translate_os_errors

_SAVED_AT_ONCE = 256
"""Tokens that a session has grown by when its state is next written."""
_EXPIRED_AT_ONCE = 4
_AT_HAND = 64
"""Sessions whose turns stay in memory when nobody holds them."""


class Sessions:
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
    ) -> None:
        self.store = open_store(store, readonly=readonly)
        self.memories = Memories(self.store, self._wake_at)
        self._backend = backend
        self._chat_format = chat_format
        self._durable = store is not None
        self.moving_state = threading.Lock()
        """Held while all the state of a session is in this process, on its way to or from a file."""
        self._lock = threading.RLock()
        self._open: weakref.WeakValueDictionary[tuple[str, str], Session] = weakref.WeakValueDictionary()
        self._at_hand: OrderedDict[tuple[str, str], Session] = OrderedDict()

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Sessions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            raise SessionError("this takes a model, and none was loaded")
        return self._backend

    @property
    def chat_format(self) -> ChatFormat:
        if self._chat_format is None:
            raise SessionError("this takes a model, and none was loaded")
        return self._chat_format()

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
        _check_name(name)
        if create and not self.store.has(namespace, name):
            # Somebody else may be faster.
            with suppress(SessionExistsError):
                return self.create(name, system=system, namespace=namespace, settings=settings, agent=agent)
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

    def create(
        self,
        name: str,
        *,
        system: str | None = None,
        namespace: str = "",
        settings: Mapping[str, Any] | None = None,
        agent: str = "",
    ) -> Session:
        """A new session. One of that name that exists already is an error. `agent` is the program that asks
        for it, if it is known."""
        _check_name(name)
        check_settings(settings or {})
        start = Turn(
            kind="start",
            messages=(Message(role="system", content=system),) if system is not None else (),
        )
        origin = {"agent": agent} if agent else {}
        return self._opened(self.store.create(namespace, name, [start], settings=settings, origin=origin))

    def temporary_folder(self) -> tempfile.TemporaryDirectory[str]:
        """A folder of its own for a file on its way in or out, which only the owner may enter."""
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
        last = self.store.find(namespace, after) if after is not None else None
        return self.store.list(namespace, limit=limit, after=last, text=text)

    def tree(self, name: str, namespace: str = "", *, limit: int = 1000, after: str | None = None) -> Tree:
        """The session of that name with all that branched off, or that it branched off from."""
        return self.store.tree(self.store.find(namespace, name), limit=limit, after=after)

    def delete(self, name: str, namespace: str = "") -> None:
        """Forget a session, also one whose turns cannot be read any more. Forks of it, and memories, stay."""
        _check_name(name)
        self._opened(self.store.find(namespace, name)).delete()

    def respond(
        self,
        name: str,
        origin: Mapping[str, Any],
        *,
        after: Session | None = None,
        namespace: str = "",
        kind: str = RESPONSE,
        said: Sequence[Message] = (),
    ) -> Session:
        """A session for one response: it starts where `after` stands, and its next turn is the response.
        A new one may begin with what was `said` already.

        Its origin says where that is. History and number of turns are of one moment: `after` may go on
        meanwhile.
        """
        _check_name(name)
        if after is None:
            origin = {"session": None, "turn": 0, **origin}
            turns = [Turn(kind="start", messages=())]
            if said:
                messages = tuple(said_messages(said))
                turns.append(
                    Turn(kind="turn", messages=messages, created=time.time(), before=turns[0].digest)
                )
            with self._lock:
                info = self.store.create(namespace, name, turns, kind=kind, origin=origin)
                return self._opened(info)
        history, saved = after.standing(), after.saved
        origin = {"session": after.name, "turn": len(history), **origin}
        with self._lock:
            info = self.store.create(
                namespace, name, head=history.head, digest=history.place.digest, kind=kind, origin=origin
            )
            session = self._opened(info)
            session.stand_at(history, saved)
            return session

    def expire_responses(self, seconds: float) -> None:
        """Delete a few of the responses that were stored longer ago than that: a few more than one, so that
        whoever calls this with each new one keeps their number bounded at a cost that does not grow."""
        for namespace, name in self.store.expired(time.time() - seconds, limit=_EXPIRED_AT_ONCE):
            # One that is damaged, or in use, must not be in the way of a new one.
            with suppress(PerdureError):
                self.delete(name, namespace)

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
        export = read_export(Path(path), progress=progress)
        _check_name(export.name if name is None else name)
        check_settings(export.settings)
        own = export.signed_by(self.store.key)
        turns: Sequence[Turn] = export.turns
        left_out: dict[str, str] = {}
        why = "" if own else self._why_not_tokens(turns)
        if why:
            turns = without_tokens(turns)
            if any(turn.added.tokens for turn in export.turns):
                left_out["tokens"] = why
        tokens = transcript(turns).tokens
        session = self._opened(
            self.store.create(
                namespace,
                export.name if name is None else name,
                turns,
                # A session that came in is listed, whatever it says to be.
                kind=export.kind if export.kind != RESPONSE else "session",
                settings=export.settings,
                origin={"how": "import", "session": export.name, "turn": len(turns) - 1},
            )
        )
        state = 0
        if export.has_state:
            if self._backend is None:
                left_out["state"] = "no model was loaded to take it"
            elif why:
                left_out["state"] = f"its tokens were not taken: {why}"
            elif not own and not trust_state:
                left_out["state"] = "another store wrote it, and trust_state was not given"
            else:
                with self.moving_state:
                    state, why = take_state(export, self._backend, turns, namespace)
                if why:
                    left_out["state"] = why
        return ImportResult(
            session=session, turns=session.turns, tokens=len(tokens), state_tokens=state, left_out=left_out
        )

    def copy(self, session: Session, name: str, *, replace: bool = False) -> Session:
        """A session of another runtime, with all its turns, under a name here; or in the place of the one
        that has that name."""
        _check_name(name)
        there = replace and self.store.has(session.namespace, name)
        old = self.get(name, session.namespace) if there else None
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
        _check_name(name)
        made = self._opened(
            self.store.create(
                session.namespace,
                name,
                turns,
                head=place.head,
                digest=place.digest,
                kind=kind,
                settings=session.settings,
                origin={"how": how, "session": session.name, "turn": place.depth},
            )
        )
        made.saved = session.saved
        return made

    def remove(self, session: Session) -> None:
        self.store.delete(session.info)
        key = (session.namespace, session.name)
        with self._lock:
            if self._open.get(key) is session:
                del self._open[key]
                self._at_hand.pop(key, None)

    def write_behind(self, tokens: Sequence[int], namespace: str, saved: int) -> int:
        """Have the state of a session written now and then, when nobody waits for the engine.

        A few turns at a time: reading a state out of the engine takes longer the longer it is, so it is read
        whenever an eighth of it is new: that costs a token the same in a long session as in a short one.
        What is not written when the process dies is computed from the turns, which are.
        """
        enough = max(_SAVED_AT_ONCE, saved // 8)
        if self._durable and len(tokens) - saved >= enough and self.backend.load == (0, 0):
            with suppress(PerdureError):
                self.backend.cache.save(tokens, namespace=namespace)
                return len(tokens)
        return saved

    # Inside.

    def _wake_at(self, memory: SessionMemory, name: str) -> Session:
        _check_name(name)
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

    def _why_not_tokens(self, turns: Sequence[Turn]) -> str:
        if self._backend is None or self._chat_format is None:
            return why_not_tokens(turns, None, None)
        try:
            return why_not_tokens(turns, self.chat_format.tokenizer, self._backend.model)
        except TemplateError as error:
            return f"the model has no chat template to compare them with ({error})"

    def _opened(self, info: SessionInfo) -> Session:
        """The one object for a session. Which sessions there are is for the store to say."""
        key = (info.namespace, info.name)
        with self._lock:
            session = self._open.get(key)
            if session is not None and session.info.number > info.number:
                # It was deleted meanwhile, and its name has gone to a later one: this handle refuses.
                return Session(self, info)
            if session is None or session.info.number != info.number:
                session = self._open[key] = Session(self, info)
            self._at_hand[key] = session
            self._at_hand.move_to_end(key)
            if len(self._at_hand) > _AT_HAND:
                self._at_hand.popitem(last=False)
            return session


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidInputError(f"a session's name is a text that is not empty, got {name!r}")
