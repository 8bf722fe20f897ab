"""Reply request: what a client asks for, whatever protocol it speaks, and where its turn goes.

    store: false                          nowhere: nothing is written down
    perdure.session, perdure.fork_from    into that session, or a branch of that one
    a named conversation                  into the session of that conversation
    neither                               nowhere, as there is no session

A conversation that is named and gets no turn is answered too: `x-perdure-no-session` and the log say why.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic import Field

from perdure.chat.message import Message
from perdure.errors import PerdureError, SessionError, SessionExistsError
from perdure.extension import brought
from perdure.runtime import Runtime
from perdure.server.core.api_error import invalid
from perdure.server.core.app_state import AppState
from perdure.server.core.schemas import Name, ReplyExtension, RequestSchema
from perdure.server.core.visit import NO_SESSION, Caller
from perdure.sessions.fold import TurnStream
from perdure.sessions.pending_turn import TurnExtra
from perdure.sessions.session import Session

log = logging.getLogger("perdure.server")

_BRANCHES = 1000
"""Branches that one session can have under names of the server's making."""


class SessionExtension(ReplyExtension):
    """What no other protocol has words for, sessions included."""

    session: Name | None = None
    """The session to go on with: `messages` are then only what is new. Made if it does not exist."""
    fork_from: Name | None = None
    """The session to branch off from: `messages` are then only what is new. The branch is called `session`,
    or else as the answer says."""
    fork_turn: int | None = Field(None, ge=0, lt=2**31)
    """After which turn the branch starts; where that session stands, if left out."""
    keep_partial: bool | None = None
    """In a session: whether a turn that is stopped is kept as far as it is written."""
    resumable: bool | None = None
    """With `stream`, in chat completions: whether the reply continues after its client leaves."""

    @property
    def place(self) -> SessionPlace | None:
        """Where in which session the request goes on, if it says so."""
        if self.fork_turn is not None and self.fork_from is None:
            raise invalid("perdure.fork_turn", "give perdure.fork_from too")
        if self.keep_partial and self.session is None and self.fork_from is None:
            raise invalid("perdure.keep_partial", "only in a session, give perdure.session too")
        if self.session is None and self.fork_from is None:
            return None
        return SessionPlace(name=self.session, fork_from=self.fork_from, turn=self.fork_turn)

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, **({"keep_partial": True} if self.keep_partial else {})}


def extend(options: dict[str, Any], extension: SessionExtension | None, app_state: AppState) -> None:
    """Add what stands under `perdure` to the options of a reply."""
    options["timeout"] = app_state.server.seconds(extension.timeout if extension is not None else None)
    if extension is not None:
        extended = extension.options
        if variables := {**options.get("variables", {}), **extended.pop("variables", {})}:
            options["variables"] = variables
        options |= extended


class NoSession(Exception):
    """Why a conversation that is named gets no turn. The request is answered without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlace:
    """The session that a request continues, or the one that it branches off from."""

    name: str | None
    fork_from: str | None = None
    turn: int | None = None

    def open(self, runtime: Runtime, caller: Caller, system: str | None) -> tuple[Session, bool]:
        """The session, or the branch; and whether it was made."""
        sessions, namespace = runtime.sessions, caller.namespace
        if self.fork_from is None:
            assert self.name is not None
            if not sessions.store.has(namespace, self.name):
                # Another request may be faster.
                with suppress(SessionExistsError):
                    made = sessions.create(self.name, system=system, namespace=namespace, agent=caller.agent)
                    return made, True
            return sessions.open(self.name, namespace=namespace, system=system, create=False), False
        source = sessions.get(self.fork_from, namespace)
        if system is not None and source.system != system:
            raise SessionError(
                f"session {self.fork_from!r} has another system message: leave it out to branch off from "
                "that session"
            )
        return branch(source, self.name, self.turn), True


def branch(source: Session, name: str | None, turn: int | None) -> Session:
    """A branch of a session, under a new name: `NAME~2`, `NAME~3` and so on, unless one is given."""
    if name is not None:
        return source.fork(name, turn=turn)
    stem, tilde, number = source.name.rpartition("~")
    stem = stem if tilde and number.isascii() and number.isdigit() else source.name
    for at in range(2, _BRANCHES + 2):
        # Another request that branches off at the same time may have taken the name.
        with suppress(SessionExistsError):
            return source.fork(f"{stem}~{at}", turn=turn)
    raise SessionError(
        f"session {stem!r} has {_BRANCHES} branches: name the next one (perdure.session), or delete some"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRequest:
    """Messages, and what is asked of the reply to them."""

    messages: Sequence[Message]
    options: Mapping[str, Any]
    """In the words of `Runtime.submit_chat`: tools, their choice, schemas, sampling, stops, limits."""
    place: SessionPlace | None = None
    """The session that the messages go on with; none is made for a conversation that comes whole."""
    timeout: float | None = None
    """Seconds that the client gives it."""
    extra: TurnExtra | None = None
    """What its turn has besides, in a session. Its `call_ids` hold without a session too."""
    stores: bool = True
    """Whether it may become a turn of a session. That it may not goes before every name."""

    def submit(self, app_state: AppState, caller: Caller, body: RequestSchema | None = None) -> TurnStream:
        """Queue it; with `body`, in the conversation that its fields and headers name. It takes time to
        render and to tokenise, so this is called in a thread."""
        runtime = app_state.runtime
        if not self.stores:
            return self._submit_unkept(runtime, caller.namespace)
        if self.place is not None:
            return self._submit_in_session(self.place, runtime, caller)
        if body is not None:
            try:
                for conversations in named_conversations():
                    if (stream := conversations.submit(app_state, caller, body, self)) is not None:
                        return stream
            except NoSession as why:
                log.info("a named conversation goes without its session: %s", why)
                caller.notes[NO_SESSION] = str(why)
        return self.submit_alone(runtime, caller.namespace)

    def new_messages(self) -> tuple[list[Message], str | None]:
        """What it says in a session, and the system prompt of one that is made: the message that comes
        first."""
        messages = list(self.messages)
        if messages[0].role in ("system", "developer") and len(messages) > 1:
            return messages[1:], messages[0].content or ""
        return messages, None

    def _submit_in_session(self, place: SessionPlace, runtime: Runtime, caller: Caller) -> TurnStream:
        messages, system = self.new_messages()
        session, made = place.open(runtime, caller, system)
        extra = replace(self.extra or TurnExtra(), idempotency_key=caller.idempotency_key)
        stream = submit_turn(session, messages, self.options, made=made, extra=extra)
        caller.in_session(session.name)
        return stream

    def _submit_unkept(self, runtime: Runtime, namespace: str) -> TurnStream:
        """Queue it so that nothing is written down: behind the session that it would branch off from."""
        place = self.place
        if place is None:
            return self.submit_alone(runtime, namespace)
        if place.fork_from is None or place.name is not None:
            raise invalid(
                "store", "false keeps nothing, and perdure.session has the turn kept: leave one of them out"
            )
        options = {name: value for name, value in self.options.items() if name != "keep_partial"}
        source = runtime.sessions.get(place.fork_from, namespace)
        return source.submit_unkept(self.messages, turn=place.turn, **options)

    def submit_alone(self, runtime: Runtime, namespace: str) -> TurnStream:
        """Queue it without a session."""
        call_ids = self.extra.call_ids if self.extra is not None else ""
        return runtime.chat_format.submit(
            self.messages, namespace=namespace, call_ids=call_ids, **self.options
        )


def submit_turn(
    session: Session,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    *,
    made: bool,
    extra: TurnExtra | None = None,
) -> TurnStream:
    """Queue a turn. One that is refused leaves no session behind that was made for it, unless somebody else
    has gone on with it."""
    turns = session.turns if made else None
    try:
        return session.submit(messages, extra=extra, **options)
    except BaseException:
        if turns is not None:
            with suppress(PerdureError):
                session.delete(turns=turns)
        raise


def options_in_session(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options of a turn; None where a session cannot follow them."""
    if (
        options.get("n", 1) != 1
        or options.get("continue_final_message")
        or options.get("overflow", "error") != "error"
    ):
        return None
    return {name: value for name, value in options.items() if name not in ("n", "stable_prefix")}


class NamedConversations(Protocol):
    """What finds the sessions of clients that name their conversations, for an extension."""

    def submit(
        self, app_state: AppState, caller: Caller, body: RequestSchema, request: ReplyRequest
    ) -> TurnStream | None:
        """Queue the next turn of the conversation that a request names; None where it names none. `NoSession`
        where the conversation gets no turn."""
        ...

    def said_in(
        self, session: Session, request: ReplyRequest, app_state: AppState
    ) -> tuple[list[Message], TurnExtra] | None:
        """What a request says behind the turns of a session, and what its turn has besides; None where its
        history is another one."""
        ...

    def release(self, runtime: Runtime, name: str, namespace: str) -> None:
        """Have the state of a conversation that is over leave the slots. Its turns stay."""
        ...


@functools.cache
def named_conversations() -> tuple[NamedConversations, ...]:
    """Of all extensions."""
    return tuple(brought("conversations"))
