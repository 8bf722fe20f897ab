"""Conversation names: how clients name their conversations, in headers and in fields of a request.

    x-claude-code-session-id: 11-22                  claude-code:11-22
    x-claude-code-agent-id: sub-1                    claude-code:11-22:sub-1, started from claude-code:11-22
    {"prompt_cache_key": "7f3a"}                     cache-key:7f3a
    {"nvext": {"session_control": {"session_id": "s1", "action": "open", "timeout": 600}}}
                                                     dynamo:s1, whose state is kept for ten minutes
    {"session_params": {"id": "s2"}}                 sglang:s2

What names nothing (no id, or one with other characters) is left out: the request is answered without a
session. So is one with `store: false`, whatever it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from perdure.ext.agents.agent_conversation import CACHE_KEY, AgentConversation
from perdure.spi.server import NamingFields, RequestSchema, is_id

_LONGEST = 24 * 3600.0
"""Seconds that a client can have state kept for."""


class _Named(NamedTuple):
    """The headers in which a client names a conversation, an agent within it, and the one that started it."""

    client: str
    session: str
    agent: str = ""
    parent: str = ""


DYNAMO = _Named("dynamo", "x-dynamo-session-id", parent="x-dynamo-parent-session-id")
"""Before all others: clients send it to name a conversation and for nothing else."""
_CLIENTS = (
    _Named(
        "claude-code",
        "x-claude-code-session-id",
        "x-claude-code-agent-id",
        "x-claude-code-parent-agent-id",
    ),
    _Named("opencode", "x-session-affinity", parent="x-parent-session-id"),
    _Named("opencode", "x-session-id", parent="x-parent-session-id"),
    _Named("codex", "thread-id"),
    _Named("codex", "session-id"),
    _Named("open-webui", "x-openwebui-chat-id"),
)


NAMING_HEADERS = frozenset(client.session for client in (DYNAMO, *_CLIENTS))
NAMING_FIELDS = frozenset(("nvext", "session_params", "prompt_cache_key"))
"""A request with none of these names no conversation."""


def conversation_of(
    headers: Mapping[str, str], agent: str, body: RequestSchema | None = None
) -> AgentConversation | None:
    """The conversation that a request belongs to, by its headers and its fields; None where it names none."""
    conversation = _by_headers(headers, agent, (DYNAMO,))
    if conversation is None and isinstance(body, NamingFields):
        conversation = _by_fields(body, agent)
    conversation = conversation or _by_headers(headers, agent, _CLIENTS)
    if conversation is None and is_id(key := getattr(body, "prompt_cache_key", None)):
        conversation = AgentConversation(name=f"{CACHE_KEY}{key}", agent=agent or "client")
    if conversation is not None and headers.get("x-dynamo-session-final", "").lower() in ("true", "1"):
        conversation = conversation.closed()
    return conversation


def _by_headers(
    headers: Mapping[str, str], agent: str, clients: tuple[_Named, ...]
) -> AgentConversation | None:
    for client in clients:
        name = headers.get(client.session, "")
        if not is_id(name):
            continue
        whole = f"{client.client}:{name}"
        within, above = headers.get(client.agent, ""), headers.get(client.parent, "")
        inside = is_id(within)
        if client.agent:
            parent = f"{whole}:{above}" if is_id(above) else whole if inside else ""
        else:
            parent = f"{client.client}:{above}" if is_id(above) else ""
        return AgentConversation(
            name=f"{whole}:{within}" if inside else whole, parent=parent, agent=agent or client.client
        )
    return None


def _by_fields(body: NamingFields, agent: str) -> AgentConversation | None:
    dynamo, sglang = body.nvext, body.session_params
    control = dynamo.session_control if dynamo is not None else None
    context = dynamo.agent_context if dynamo is not None else None
    for hints in (control, context):
        if hints is not None and is_id(hints.session_id):
            parent = next(
                (
                    each.parent_session_id
                    for each in (control, context)
                    if each is not None and is_id(each.parent_session_id)
                ),
                None,
            )
            return AgentConversation(
                name=f"dynamo:{hints.session_id}",
                parent=f"dynamo:{parent}" if parent else "",
                agent=agent or "dynamo",
                keep_seconds=_seconds(control.timeout if control is not None else None),
                closes=(control is not None and control.action == "close")
                or (context is not None and context.session_final is True),
            )
    if sglang is not None and is_id(sglang.id):
        keep: Any = sglang.keep
        return AgentConversation(
            name=f"sglang:{sglang.id}",
            parent=f"sglang:{sglang.parent_id}" if is_id(sglang.parent_id) else "",
            agent=agent or "sglang",
            keep_seconds=_seconds(_LONGEST if keep is True else keep or None),
            closes=keep is False,
        )
    return None


def _seconds(seconds: float | None) -> float | None:
    return min(seconds, _LONGEST) if seconds else None
