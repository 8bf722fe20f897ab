"""Reply request: what a client asks for, whatever protocol it speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.chat.message import Message
from perdure.runtime import Runtime
from perdure.sessions.fold import TurnStream


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

    def submit(self, runtime: Runtime, namespace: str, agent: str = "") -> TurnStream:
        """Queue it for a program. It takes time to render and to tokenise, so this is called in a thread."""
        if self.session is None:
            return runtime.submit_chat(self.messages, namespace=namespace, **self.options)
        messages, system = list(self.messages), None
        # A system message that comes first is that of a new session.
        if messages[0].role in ("system", "developer") and len(messages) > 1:
            system = messages.pop(0).content or ""
        session = runtime.sessions.open(self.session, namespace=namespace, system=system, agent=agent)
        return session.submit(messages, **self.options)
