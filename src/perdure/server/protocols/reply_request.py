"""Reply request: what a client asks for, whatever protocol it speaks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.chat.message import Message
from perdure.errors import SessionError, StoreError
from perdure.runtime import Runtime
from perdure.sessions.agent_conversation import AgentConversation, find_line, without_session_options
from perdure.sessions.fold import TurnStream

log = logging.getLogger("perdure.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRequest:
    """Messages, and what is asked of the reply to them."""

    messages: Sequence[Message]
    options: Mapping[str, Any]
    """In the words of `Runtime.submit_chat`: tools, their choice, schemas, sampling, stops, limits."""
    session: str | None = None
    """The session that the messages go on with; none is made for a conversation that comes whole."""
    timeout: float | None = None
    """Seconds that the client gives it."""

    def submit(
        self,
        runtime: Runtime,
        namespace: str,
        agent: str = "",
        conversation: AgentConversation | None = None,
    ) -> TurnStream:
        """Queue it for a program. It takes time to render and to tokenise, so this is called in a thread."""
        if self.session is None:
            if conversation is not None:
                stream = submit_to_conversation(runtime, conversation, self.messages, namespace, self.options)
                if stream is not None:
                    return stream
            return runtime.submit_chat(self.messages, namespace=namespace, **self.options)
        messages, system = list(self.messages), None
        # A system message that comes first is that of a new session.
        if messages[0].role in ("system", "developer") and len(messages) > 1:
            system = messages.pop(0).content or ""
        session = runtime.sessions.open(self.session, namespace=namespace, system=system, agent=agent)
        return session.submit(messages, **self.options)


def submit_to_conversation(
    runtime: Runtime,
    conversation: AgentConversation,
    messages: Sequence[Message],
    namespace: str,
    options: Mapping[str, Any],
) -> TurnStream | None:
    """Queue the next turn of a client's conversation in its session. None where it goes without one: nothing
    is stored here, the session is busy with another request, or it cannot hold what was sent."""
    sessions = runtime.sessions
    settings = without_session_options(options)
    if settings is None or sessions.store.transfers() is None:
        return None
    if options.get("stable_prefix"):
        messages = runtime.chat_format.settle(messages, namespace)
    try:
        found = find_line(sessions, conversation, messages, namespace)
        if found is None:
            return None
        session, said = found
        return session.submit(said, **settings)
    except (SessionError, StoreError) as error:
        # What cannot be kept is answered all the same.
        log.info("conversation %s goes without its session: %s", conversation.name, error)
        return None
