"""Conversations of every shape that templates tell apart, and two tools."""

from __future__ import annotations

from typing import Any

from perdure.chat.message import Message, Tool, parse_messages

WEATHER = Tool.parse(
    {
        "name": "get_weather",
        "description": "The weather of a place <now> & later.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Which: é, 한국"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    }
)
SEARCH = Tool.parse(
    {
        "name": "search",
        "description": "Looks things up.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
            "required": ["query", "n"],
            "additionalProperties": False,
        },
    }
)
TOOLS = (WEATHER, SEARCH)


def call(name: str, arguments: str, call_id: str = "abc123def") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(content: str = "What is the weather in Paris?") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "You are terse."}
PARIS = call("get_weather", '{"city": "Paris", "days": [1, 2]}')
RESULT = {"role": "tool", "content": '{"temp": 21}', "tool_call_id": "abc123def", "name": "get_weather"}

CONVERSATIONS: dict[str, tuple[Message, ...]] = {
    name: parse_messages(messages)
    for name, messages in {
        "one": [user("Hi")],
        "system": [SYSTEM, user("Hi")],
        "turns": [SYSTEM, user("Hi"), assistant("Hello!"), user("And?")],
        "answered": [user("Hi"), assistant("Hello!")],
        "trailing": [user("  Hi \n\n"), assistant("\nHello!\n"), user("\n\nAnd?\n")],
        "unicode": [
            {"role": "system", "content": "é 한국"},
            user("🙂 e\u0301 \u200b"),
            assistant("↩ “”"),
            user("ß"),
        ],
        "html": [user("<b>&amp;\"'</b> {{ x }} {% y %}"), assistant("</s>"), user("<|im_end|>")],
        "empty": [SYSTEM, user(""), assistant(""), user("")],
        "two systems": [SYSTEM, user("Hi"), assistant("Hello!"), SYSTEM, user("And?")],
        "developer": [{"role": "developer", "content": "Be brief."}, user("Hi")],
        "two users": [user("Hi"), user("Hi again")],
        "reasoning": [user("Hi"), assistant("Hello!", reasoning="They greet.\nSo do I."), user("And?")],
        "reasoned": [user("Hi"), assistant("Hello!", reasoning="They greet.")],
        "think in text": [user("Hi"), assistant("<think>\nHm.\n</think>\n\nHello!"), user("And?")],
        "call": [user(), assistant(tool_calls=[PARIS])],
        "call and text": [SYSTEM, user(), assistant("Let me look.", tool_calls=[PARIS])],
        "result": [SYSTEM, user(), assistant(tool_calls=[PARIS]), RESULT],
        "told": [user(), assistant(tool_calls=[PARIS]), RESULT, assistant("21 degrees."), user("Thanks")],
        "reasoned call": [user(), assistant(reasoning="Look it up.", tool_calls=[PARIS]), RESULT],
        "parallel": [
            user(),
            assistant(tool_calls=[PARIS, call("search", '{"query": "é\\n", "n": 2}', "xyz789uvw")]),
            RESULT,
            {"role": "tool", "content": "nothing", "tool_call_id": "xyz789uvw", "name": "search"},
        ],
    }.items()
}
