"""ChatGPT's export: `conversations.json` in its zip, a list of conversations.

    {"title": "Skies", "create_time": 1736209400.1, "current_node": "b2", "mapping": {
        "r":  {"parent": null, "message": null},
        "a1": {"parent": "r",  "message": {"author": {"role": "user"}, "content":
                   {"content_type": "text", "parts": ["Why is the sky blue?"]}}},
        "b1": {"parent": "a1", "message": {"author": {"role": "assistant"}, …}},
        "b2": {"parent": "a1", …}}}                               an edit or another reply is a sibling

Pictures and sounds are files beside it, which are not read: their places are marked in the text.
"""

from __future__ import annotations

from typing import Any

from perdure.ext.chat_imports.chat import Chat, ExportedMessage, entries, mapping, number, plain

SOURCE = "ChatGPT"


def read(value: dict[str, Any]) -> Chat | None:
    if not isinstance(value.get("mapping"), dict):
        return None
    parents: dict[str, str | None] = {}
    messages: dict[str, ExportedMessage] = {}
    for node_id, node in value["mapping"].items():
        parent = mapping(node).get("parent")
        parents[node_id] = parent if isinstance(parent, str) else None
        if (message := _message(node_id, mapping(mapping(node).get("message")))) is not None:
            messages[node_id] = message
    current = value.get("current_node")
    return Chat(
        id=plain(value.get("conversation_id") or value.get("id")),
        title=plain(value.get("title")),
        source=SOURCE,
        created=number(value.get("create_time")),
        parents=parents,
        messages=messages,
        current=current if isinstance(current, str) else None,
    )


def _message(node_id: str, message: Any) -> ExportedMessage | None:
    """What a person sees of it, if anything."""
    role = mapping(message.get("author")).get("role")
    metadata, content = mapping(message.get("metadata")), mapping(message.get("content"))
    if role not in ("user", "assistant") or metadata.get("is_visually_hidden_from_conversation"):
        return None
    if message.get("weight") == 0 or message.get("recipient") not in ("all", None):
        # A call of a tool, or what a tool is told.
        return None
    text, reasoning = "", ""
    kind = content.get("content_type")
    if kind in ("text", "multimodal_text"):
        text = "\n\n".join(filter(None, map(_part, entries(content.get("parts")))))
    elif kind == "code":
        code = plain(content.get("text"))
        text = f"```{plain(content.get('language')).replace('unknown', '')}\n{code}\n```" if code else ""
    elif kind == "thoughts":
        thoughts = (mapping(each) for each in entries(content.get("thoughts")))
        reasoning = "\n\n".join(filter(None, (plain(each.get("content")) for each in thoughts)))
    if not text and not reasoning:
        return None
    return ExportedMessage(
        id=node_id, role=role, text=text, reasoning=reasoning, created=number(message.get("create_time"))
    )


def _part(part: object) -> str:
    if isinstance(part, str):
        return plain(part)
    fields = mapping(part)
    if fields.get("content_type") == "audio_transcription":
        return plain(fields.get("text"))
    return "[image]" if "image" in str(fields.get("content_type")) else ""
