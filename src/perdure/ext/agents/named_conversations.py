"""Named conversations: a client that names its conversation and sends it whole has it kept as a session."""

from __future__ import annotations

from contextlib import suppress

from perdure import KeptPrefix, Message, Runtime, Session, SessionError, StoreError
from perdure.ext.agents.agent_conversation import AgentConversation, find_line, same_line
from perdure.ext.agents.conversation_names import NAMING_FIELDS, NAMING_HEADERS, conversation_of
from perdure.spi.server import (
    AppState,
    Caller,
    NoSession,
    ReplyRequest,
    RequestSchema,
    options_in_session,
    submit_turn,
    to_api_error,
)
from perdure.spi.sessions import TurnExtra, TurnStream

_OTHER_MARKS = 15
"""Cache marks of a request beside that of its conversation."""


class AgentConversations:
    """The sessions of clients that name their conversations."""

    def submit(
        self, app_state: AppState, caller: Caller, body: RequestSchema, request: ReplyRequest
    ) -> TurnStream | None:
        """Queue the next turn of a client's conversation in its session. None where it names none;
        `NoSession` where it gets no turn."""
        conversation = _named(caller, body)
        if conversation is None:
            return None
        runtime = app_state.runtime
        if runtime.sessions.store.transfers() is None:
            raise NoSession("sessions are in memory alone")
        if conversation.closes:
            name = conversation.name
            caller.visit.at_end(lambda: app_state.call(self.release, runtime, name, caller.namespace))
        settings = options_in_session(request.options)
        if settings is None:
            raise NoSession("a turn has one reply, begins anew, and leaves nothing out")
        # A title is asked for under the conversation's own name, but is no turn of it.
        if settings.get("side", runtime.chat_format.is_side_request(request.messages)):
            raise NoSession("a side request is no turn of it")
        if conversation.keep_seconds is not None:
            prefix = KeptPrefix(after=0, seconds=conversation.keep_seconds)
            settings["cache_marks"] = [*settings.get("cache_marks", ())[:_OTHER_MARKS], prefix]
        try:
            line = find_line(
                runtime.sessions,
                conversation,
                request.messages,
                caller.namespace,
                runtime.chat_format.reads_alike(settings),
                stable=bool(request.options.get("stable_prefix")),
            )
            if line is None:
                raise NoSession("its history ends with a reply, has no message, or has too many branches")
            session, extra = line.session, line.extra(request.extra)
            stream = submit_turn(session, line.said, settings, made=line.made, extra=extra)
        except (SessionError, StoreError) as error:
            raise NoSession(to_api_error(error).args[0]) from error
        caller.in_session(session.name)
        return stream

    def said_in(
        self, session: Session, request: ReplyRequest, app_state: AppState
    ) -> tuple[list[Message], TurnExtra] | None:
        """What a request says behind the turns of a session."""
        options = request.options
        reads_alike = app_state.runtime.chat_format.reads_alike(options_in_session(options) or {})
        stable = bool(options.get("stable_prefix"))
        line = same_line(session, request.messages, reads_alike, stable=stable)
        return (line.said, line.extra(request.extra)) if line is not None else None

    def release(self, runtime: Runtime, name: str, namespace: str) -> None:
        """Have the state of a conversation that is over leave the slots. Its turns, and what is on the disk,
        stay."""
        for session in AgentConversation(name=name).lines(runtime.sessions, namespace):
            # One that is busy again, or was deleted meanwhile, is left alone.
            with suppress(SessionError):
                session.sleep()


def _named(caller: Caller, body: RequestSchema) -> AgentConversation | None:
    """The conversation that headers or fields name; None where there is none, or none is kept."""
    if caller.headers is None:
        return None
    if NAMING_HEADERS.isdisjoint(caller.headers) and NAMING_FIELDS.isdisjoint(body.model_fields_set):
        # Most requests name none.
        return None
    return conversation_of(caller.headers, caller.agent, body)


CONVERSATIONS = AgentConversations()
