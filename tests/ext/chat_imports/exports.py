"""Files as ChatGPT, Claude and Open WebUI write them, in small."""

from __future__ import annotations

from typing import Any


def chatgpt_node(own: str, parent: str | None, role: str, text: str, **message: Any) -> dict[str, Any]:
    return {
        "id": own,
        "parent": parent,
        "children": [],
        "message": {
            "id": own,
            "author": {"role": role, "name": None, "metadata": {}},
            "create_time": 1736209412.345,
            "content": {"content_type": "text", "parts": [text]},
            "status": "finished_successfully",
            "weight": 1.0,
            "metadata": {},
            "recipient": "all",
            **message,
        },
    }


CHATGPT: dict[str, Any] = {
    "title": "Why the sky is blue",
    "create_time": 1736209400.5,
    "update_time": 1736209800.5,
    "moderation_results": [],
    "current_node": "b2",
    "conversation_id": "8f3a2b1c-0000",
    "id": "8f3a2b1c-0000",
    "default_model_slug": "gpt-4o",
    "mapping": {
        each["id"]: each
        for each in (
            {"id": "root", "parent": None, "children": ["sys"], "message": None},
            chatgpt_node("sys", "root", "system", "", weight=0.0),
            chatgpt_node("a1", "sys", "user", "Why is the sky blue?"),
            chatgpt_node(
                "t1",
                "a1",
                "assistant",
                "",
                content={
                    "content_type": "thoughts",
                    "thoughts": [{"summary": "Light", "content": "Think of scattering."}],
                },
            ),
            chatgpt_node("call", "t1", "assistant", "search('sky')", recipient="web"),
            chatgpt_node("tool", "call", "tool", "results"),
            chatgpt_node("b1", "tool", "assistant", "Short waves scatter more.\ue200cite\ue202turn0\ue201"),
            chatgpt_node("c1", "b1", "user", "And at sunset?"),
            chatgpt_node("d1", "c1", "assistant", "The path is longer, so red is left."),
            chatgpt_node("c2", "b1", "user", "And on Mars?"),
            chatgpt_node("b2", "c2", "assistant", "Dust makes it butterscotch."),
            chatgpt_node(
                "x1",
                "d1",
                "user",
                "",
                content={
                    "content_type": "multimodal_text",
                    "parts": [
                        {"content_type": "image_asset_pointer", "asset_pointer": "file://1"},
                        "And this?",
                    ],
                },
            ),
        )
    },
}

CLAUDE: dict[str, Any] = {
    "uuid": "c0ffee00-0000",
    "name": "Notes on gardens",
    "created_at": "2025-03-01T10:00:00.000000Z",
    "updated_at": "2025-03-01T10:05:00.000000Z",
    "account": {"uuid": "who"},
    "chat_messages": [
        {
            "uuid": "m1",
            "text": "What do the notes say?",
            "content": [{"type": "text", "text": "What do the notes say?", "citations": []}],
            "sender": "human",
            "created_at": "2025-03-01T10:00:00.000000Z",
            "attachments": [
                {
                    "file_name": "notes.txt",
                    "file_size": 12,
                    "file_type": "txt",
                    "extracted_content": "Ferns like ```shade```.",
                }
            ],
            "files": [{"file_name": "photo.png"}],
            "parent_message_uuid": "00000000-0000-4000-8000-000000000000",
        },
        {
            "uuid": "m2",
            "text": "They praise ferns.",
            "content": [
                {"type": "thinking", "thinking": "The notes are short."},
                {"type": "tool_use", "name": "search", "input": {}},
                {"type": "text", "text": "They praise ferns."},
            ],
            "sender": "assistant",
            "created_at": "2025-03-01T10:00:05.000000Z",
            "attachments": [],
            "files": [],
            "parent_message_uuid": "m1",
        },
        {
            "uuid": "m3",
            "text": "They are about shade.",
            "content": [{"type": "text", "text": "They are about shade."}],
            "sender": "assistant",
            "created_at": "2025-03-01T10:01:00.000000Z",
            "attachments": [],
            "files": [],
            "parent_message_uuid": "m1",
        },
    ],
}

OPEN_WEBUI: dict[str, Any] = {
    "id": "ow-1",
    "user_id": "u",
    "title": "Ships",
    "created_at": 1736209400,
    "updated_at": 1736209500,
    "archived": False,
    "pinned": False,
    "meta": {},
    "chat": {
        "title": "Ships",
        "models": ["llama3"],
        "params": {"system": "Be brief."},
        "timestamp": 1736209400000,
        "history": {
            "currentId": "b",
            "messages": {
                "a": {
                    "id": "a",
                    "parentId": None,
                    "childrenIds": ["b", "c"],
                    "role": "user",
                    "content": "Why do ships float?",
                    "timestamp": 1736209400,
                    "files": [{"type": "image", "url": "data:image/png;base64,AAAA"}],
                },
                "b": {
                    "id": "b",
                    "parentId": "a",
                    "childrenIds": [],
                    "role": "assistant",
                    "model": "llama3",
                    "timestamp": 1736209401,
                    "content": '<details type="reasoning" done="true" duration="3">\n<summary>Thought for 3 '
                    "seconds</summary>\n&gt; Archimedes &amp; water.\n</details>\nThey displace water.",
                },
                "c": {
                    "id": "c",
                    "parentId": "a",
                    "childrenIds": [],
                    "role": "assistant",
                    "timestamp": 1736209402,
                    "content": "Buoyancy.",
                },
            },
        },
        "messages": [],
        "tags": [],
    },
}
