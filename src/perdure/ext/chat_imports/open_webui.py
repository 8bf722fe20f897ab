"""Open WebUI's export: `chat-export-….json`, a list of chats, or one.

{"id": "…", "title": "Skies", "created_at": 1736209400, "chat": {"params": {"system": "Be brief."},
    "history": {"currentId": "b1", "messages": {
        "a1": {"id": "a1", "parentId": null, "role": "user", "content": "Why is the sky blue?"},
        "b1": {"id": "b1", "parentId": "a1", "role": "assistant", "content":
               '<details type="reasoning"><summary>Thought</summary>> Hm.</details>Light.'}}}}}
"""

from __future__ import annotations

import html
import re
from typing import Any

from perdure.ext.chat_imports.chat import Chat, ExportedMessage, attached, entries, mapping, number, plain

SOURCE = "Open WebUI"
_DETAILS = re.compile(r'<details\s+type="(\w+)"[^>]*>(.*?)</details>', re.DOTALL)
_SUMMARY = re.compile(r"<summary>.*?</summary>", re.DOTALL)
_QUOTE = re.compile(r"^> ?", re.MULTILINE)


def read(value: dict[str, Any]) -> Chat | None:
    chat = value.get("chat") if isinstance(value.get("chat"), dict) else value
    assert isinstance(chat, dict)
    history = mapping(chat.get("history"))
    nodes: Any = history.get("messages")
    if isinstance(nodes, dict):
        current = history.get("currentId")
    elif isinstance(chat.get("messages"), list):
        # The oldest form: a list, each behind the one before it.
        listed = [mapping(each) for each in chat["messages"]]
        nodes = {str(at): {**each, "parentId": str(at - 1) if at else None} for at, each in enumerate(listed)}
        current = str(len(listed) - 1)
    else:
        return None
    parents: dict[str, str | None] = {}
    messages: dict[str, ExportedMessage] = {}
    system = plain(mapping(chat.get("params")).get("system")) or plain(chat.get("system"))
    for own, node in nodes.items():
        fields = mapping(node)
        parent = fields.get("parentId")
        parents[own] = parent if isinstance(parent, str) else None
        if fields.get("role") == "system":
            system = system or plain(fields.get("content"))
        elif (message := _message(own, fields)) is not None:
            messages[own] = message
    return Chat(
        id=plain(value.get("id")),
        title=plain(value.get("title") or chat.get("title")),
        source=SOURCE,
        created=number(value.get("created_at")),
        parents=parents,
        messages=messages,
        current=current if isinstance(current, str) else None,
        system=system,
    )


def _message(own: str, fields: Any) -> ExportedMessage | None:
    role = fields.get("role")
    if role not in ("user", "assistant"):
        return None
    reasoning: list[str] = []

    def apart(found: re.Match[str]) -> str:
        # What tools and interpreters did is not what the model said.
        if found[1] == "reasoning":
            reasoning.append(_QUOTE.sub("", html.unescape(_SUMMARY.sub("", found[2])).strip()))
        return ""

    text = plain(fields.get("content"))
    if role == "assistant":
        text = _DETAILS.sub(apart, text).strip()
    files = [_file(mapping(each)) for each in entries(fields.get("files"))]
    text = "\n\n".join(filter(None, [*files, text]))
    if not text and not reasoning:
        return None
    return ExportedMessage(
        id=own,
        role="user" if role == "user" else "assistant",
        text=text,
        reasoning="\n\n".join(reasoning),
        created=number(fields.get("timestamp")),
    )


def _file(fields: Any) -> str:
    if fields.get("type") == "image":
        return "[image]"
    data = mapping(mapping(fields.get("file")).get("data"))
    return attached(fields.get("name"), data.get("content"))
