"""Claude's export: `conversations.json` in its zip, a list of conversations.

    {"uuid": "…", "name": "Skies", "created_at": "2025-03-01T10:00:00.000000Z", "chat_messages": [
        {"uuid": "a1", "sender": "human", "text": "Why is the sky blue?", "parent_message_uuid": "0000…",
         "content": [{"type": "text", "text": "Why is the sky blue?"}],
         "attachments": [{"file_name": "notes.txt", "extracted_content": "…"}],
         "files": [{"file_name": "a.png"}]},
        {"uuid": "b1", "sender": "assistant", "content": [{"type": "thinking", "thinking": "…"}, …], …}]}

Older ones have no parents: there each message follows the one before it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from perdure.ext.chat_imports.chat import Chat, ExportedMessage, attached, entries, mapping, plain

SOURCE = "Claude"
_ROLES = {"human": "user", "user": "user", "assistant": "assistant"}


def read(value: dict[str, Any]) -> Chat | None:
    if not isinstance(value.get("chat_messages"), list):
        return None
    parents: dict[str, str | None] = {}
    messages: dict[str, ExportedMessage] = {}
    before: str | None = None
    for at, each in enumerate(value["chat_messages"]):
        fields = mapping(each)
        own = plain(fields.get("uuid")) or str(at)
        parent = fields.get("parent_message_uuid")
        # The parent of the first ones is in no export.
        parents[own] = parent if isinstance(parent, str) and parent in parents else None
        if not isinstance(parent, str):
            parents[own] = before
        before = own
        if (message := _message(own, fields)) is not None:
            messages[own] = message
    current = value.get("current_leaf_message_uuid")
    return Chat(
        id=plain(value.get("uuid")),
        title=plain(value.get("name")),
        source=SOURCE,
        created=_time(value.get("created_at")),
        parents=parents,
        messages=messages,
        current=current if isinstance(current, str) else before,
    )


def _message(own: str, fields: Any) -> ExportedMessage | None:
    role = _ROLES.get(str(fields.get("sender")))
    if role is None:
        return None
    blocks = [mapping(each) for each in entries(fields.get("content"))]
    text = "\n\n".join(
        filter(None, (plain(each.get("text")) for each in blocks if each.get("type") == "text"))
    )
    thoughts = (plain(each.get("thinking")) for each in blocks if each.get("type") == "thinking")
    files = [
        *(
            attached(each.get("file_name"), each.get("extracted_content"))
            for each in _maps(fields, "attachments")
        ),
        *(attached(each.get("file_name"), "") for each in _maps(fields, "files")),
    ]
    text = "\n\n".join(filter(None, [*files, text or plain(fields.get("text"))]))
    reasoning = "\n\n".join(filter(None, thoughts)) if role == "assistant" else ""
    if not text and not reasoning:
        return None
    created = _time(fields.get("created_at"))
    return ExportedMessage(
        id=own,
        role="user" if role == "user" else "assistant",
        text=text,
        reasoning=reasoning,
        created=created,
    )


def _maps(fields: Any, name: str) -> list[Any]:
    return [mapping(each) for each in entries(fields.get(name))]


def _time(value: object) -> float:
    try:
        return max(0.0, datetime.fromisoformat(str(value)).timestamp())
    except (ValueError, OverflowError, OSError):
        return 0.0
