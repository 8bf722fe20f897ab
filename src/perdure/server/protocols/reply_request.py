"""Reply request: what a client asks for, whatever protocol it speaks, and its session."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from perdure.chat.message import Message
from perdure.chat.side_requests import side_request
from perdure.decode.request import KeptPrefix
from perdure.errors import PerdureError, SessionError, SessionExistsError, StoreError
from perdure.runtime import Runtime
from perdure.server.core.api_error import invalid
from perdure.server.core.app_state import AppState, Caller
from perdure.server.core.schemas import Name, ReplyExtension, RequestSchema
from perdure.server.protocols.conversation_names import NAMING_FIELDS, NAMING_HEADERS, conversation_of
from perdure.sessions.agent_conversation import AgentConversation, find_line, without_session_options
from perdure.sessions.fold import TurnStream
from perdure.sessions.pending_turn import TurnExtra
from perdure.sessions.session import Session

log = logging.getLogger("perdure.server")

_OTHER_MARKS = 15
"""Cache marks of a request beside that of its conversation."""
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
    """With `stream`, in chat completions: whether the reply goes on without its reader, who can come back."""

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
    options["timeout"] = app_state.seconds(extension.timeout if extension is not None else None)
    if extension is not None:
        extended = extension.options
        if variables := {**options.get("variables", {}), **extended.pop("variables", {})}:
            options["variables"] = variables
        options |= extended


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlace:
    """The session that a request goes on with, or the one that it branches off from."""

    name: str | None
    fork_from: str | None = None
    turn: int | None = None

    def open(self, runtime: Runtime, caller: Caller, system: str | None) -> tuple[Session, bool]:
        """The session, or the branch; and whether it was made."""
        sessions, namespace = runtime.sessions, caller.namespace
        if self.fork_from is None:
            assert self.name is not None
            if not sessions.store.has(namespace, self.name):
                # Somebody else may be faster.
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
    """A branch of a session, under a name of its own: `NAME~2`, `NAME~3` and so on, unless it is given."""
    if name is not None:
        return source.fork(name, turn=turn)
    stem, tilde, number = source.name.rpartition("~")
    stem = stem if tilde and number.isascii() and number.isdigit() else source.name
    for at in range(2, _BRANCHES + 2):
        # Whoever branches off at the same time may have taken it.
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

    def submit(self, app_state: AppState, caller: Caller, body: RequestSchema | None = None) -> TurnStream:
        """Queue it; with `body`, in the conversation that its fields and headers name. It takes time to
        render and to tokenise, so this is called in a thread."""
        runtime = app_state.runtime
        if self.place is None:
            if body is not None and (conversation := named_conversation(caller, body)) is not None:
                stream = submit_to_conversation(
                    app_state, caller, conversation, self.messages, self.options, self.extra
                )
                if stream is not None:
                    return stream
            return self.submit_alone(runtime, caller.namespace)
        messages, system = list(self.messages), None
        # A system message that comes first is that of a new session.
        if messages[0].role in ("system", "developer") and len(messages) > 1:
            system = messages.pop(0).content or ""
        session, made = self.place.open(runtime, caller, system)
        extra = replace(self.extra or TurnExtra(), idempotency_key=caller.idempotency_key)
        stream = _submit(session, messages, self.options, made=made, extra=extra)
        caller.in_session(session.name)
        return stream

    def submit_alone(self, runtime: Runtime, namespace: str) -> TurnStream:
        """Queue it without a session."""
        call_ids = self.extra.call_ids if self.extra is not None else ""
        return runtime.chat_format.submit(
            self.messages, namespace=namespace, call_ids=call_ids, **self.options
        )


def _submit(
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


def named_conversation(caller: Caller, body: RequestSchema) -> AgentConversation | None:
    """The conversation that headers or fields name; None where there is none, or none is kept."""
    if caller.headers is None:
        return None
    if NAMING_HEADERS.isdisjoint(caller.headers) and NAMING_FIELDS.isdisjoint(body.model_fields_set):
        # Most requests name none.
        return None
    return conversation_of(caller.headers, caller.agent, body)


def submit_to_conversation(
    app_state: AppState,
    caller: Caller,
    conversation: AgentConversation,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    extra: TurnExtra | None = None,
) -> TurnStream | None:
    """Queue the next turn of a client's conversation in its session. None where it goes without one: nothing
    is stored here, the session is busy with another request, or it cannot hold what was sent."""
    runtime = app_state.runtime
    sessions = runtime.sessions
    settings = without_session_options(options)
    if sessions.store.transfers() is None:
        return None
    if conversation.closes:
        caller.visit.at_end(lambda: app_state.call(let_go, runtime, conversation, caller.namespace))
    # A title is asked for under the conversation's own name, but is no turn of it.
    if settings is None or settings.get("side", side_request(messages) is not None):
        return None
    if conversation.keep_seconds is not None:
        prefix = KeptPrefix(after=0, seconds=conversation.keep_seconds)
        settings["cache_marks"] = [*settings.get("cache_marks", ())[:_OTHER_MARKS], prefix]
    if options.get("stable_prefix"):
        messages = runtime.chat_format.stabilise(messages, caller.namespace)
    try:
        line = find_line(sessions, conversation, messages, caller.namespace)
        if line is None:
            return None
        session = line.session
        stream = _submit(session, line.said, settings, made=line.made, extra=extra)
    except (SessionError, StoreError) as error:
        # What cannot be kept is answered all the same.
        log.info("conversation %s goes without its session: %s", conversation.name, error)
        return None
    caller.in_session(session.name)
    return stream


def let_go(runtime: Runtime, conversation: AgentConversation, namespace: str) -> None:
    """Have the state of a conversation that is over leave the slots. Its turns, and what is on the disk,
    stay."""
    for session in conversation.lines(runtime.sessions, namespace):
        # One that is busy again, or was deleted meanwhile, is left alone.
        with suppress(SessionError):
            session.sleep()
