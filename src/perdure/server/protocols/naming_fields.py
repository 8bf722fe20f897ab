"""Naming fields: the fields of a request in which clients name its conversation, in every protocol.

{"nvext": {"session_control": {"session_id": "s1", "action": "open", "timeout": 600}}}     Dynamo
{"session_params": {"id": "s2"}}                                                           SGLang
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from perdure.server.core.schemas import RequestSchema

_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")


class SessionControl(RequestSchema):
    """Dynamo's hints about the state of a conversation."""

    has_more = True

    session_id: str | None = None
    action: Literal["open", "close"] | None = None
    timeout: float | None = Field(None, ge=0)
    """Seconds that its state is kept for after this request."""
    parent_session_id: str | None = None


class AgentContext(RequestSchema):
    """Dynamo's name of an agent's conversation."""

    has_more = True

    session_id: str | None = None
    parent_session_id: str | None = None
    session_final: bool | None = None
    """Whether this is its last request."""


class DynamoExtension(RequestSchema):
    has_more = True

    session_control: SessionControl | None = None
    agent_context: AgentContext | None = None


class SessionParams(RequestSchema):
    """SGLang's: the session that a request belongs to."""

    has_more = True

    id: str | None = None
    parent_id: str | None = None
    keep: bool | float | None = None
    """Whether, or for how many seconds, its state is kept; false closes it behind this request."""


class NamingFields(RequestSchema):
    """The fields in which clients name the conversation of a request, in every protocol."""

    nvext: DynamoExtension | None = None
    session_params: SessionParams | None = None
    store: bool | None = None
    """False: nothing of the request and its reply is written down, whatever names a conversation for it."""

    @property
    def stores(self) -> bool:
        return self.store is not False


def is_id(name: object) -> bool:
    """Whether it can name a conversation."""
    return isinstance(name, str) and _ID.fullmatch(name) is not None
