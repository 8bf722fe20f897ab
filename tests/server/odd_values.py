"""Bodies of every protocol in which one value is odd: of another type, not finite, empty, or half a pair."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

HUGE = 10**400
"""A number in the middle of a body that stands for one that JSON writes as 1e999."""
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    HUGE,
    float("inf"),
    float("nan"),
    "",
    "x",
    "\ud800",
    [],
    ["x"],
    [[]],
    [None],
    {},
    {"type": []},
    {"type": {}, "text": []},
    [{"type": []}],
    [{"type": "text", "text": {}}],
)
_FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "Hi", "prompt_cache_breakpoint": {}}]},
            {"role": "assistant", "content": "So", "reasoning_content": "r", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "1"},
            {"role": "user", "content": "Hi"},
        ],
        "max_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 1,
        "n": 1,
        "stop": ["zz"],
        "logit_bias": {"5": 1.0},
        "logprobs": True,
        "top_logprobs": 1,
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "text", "json_schema": {"name": "n", "schema": {}}},
        "stream_options": None,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "reasoning_effort": "low",
        "user": "u",
    },
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1, "stop": "z", "logit_bias": {"5": 1}, "logprobs": 1},
    "/v1/messages": {
        "max_tokens": 1,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "redacted_thinking", "data": "d"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "is_error": False,
                        "content": [{"type": "text", "text": "1"}],
                    },
                    {"type": "document", "title": "t", "source": {"type": "text", "data": "d"}},
                    {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text"}]},
                ],
            },
        ],
        "tools": [{"name": "f", "type": "custom", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "stop_sequences": ["z"],
        "temperature": 1.0,
        "metadata": {"user_id": "u"},
    },
    "/v1/messages/count_tokens": {
        "messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": []}]}
        ]
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], "content": []},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_text", "text": "1"}],
            },
            {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "1"},
            {"type": "compaction", "encrypted_content": "x"},
            {"role": "user", "content": "Hi"},
        ],
        "instructions": "i",
        "max_output_tokens": 1,
        "temperature": 1.0,
        "tools": [
            {"type": "function", **_FUNCTION},
            {"type": "custom", "name": "g", "format": {"type": "grammar", "definition": "d"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h"}]},
        ],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}],
        },
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "truncation": "auto",
        "prompt_cache_key": "k",
        "prompt_cache_options": {"ttl": "30m"},
        "seed": 1,
        "store": True,
    },
    "/v1/responses/compact": {"input": [{"role": "user", "content": "Hi"}]},
    "/v1/responses/input_tokens": {"input": "Hi", "instructions": [{"role": "system", "content": "s"}]},
    "/v1/conversations": {
        "metadata": {"a": "b"},
        "items": [{"type": "message", "role": "user", "content": "Hi"}],
    },
    "/api/chat": {
        "model": "toy",
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "tool_name": "f", "content": "1"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "format": {"type": "object"},
        "think": "low",
        "keep_alive": "5m",
        "stream": False,
        "options": {
            "num_predict": 1,
            "seed": 1,
            "top_k": 5,
            "top_p": 0.9,
            "temperature": 0.5,
            "repeat_last_n": 4,
            "mirostat": 0,
            "stop": ["z"],
            "num_ctx": 512,
        },
    },
    "/api/generate": {"model": "toy", "prompt": "Hi", "stream": False, "options": {"num_predict": 1}},
    "/api/embed": {"model": "toy", "input": ["Hi"], "options": {"num_ctx": 5}},
    "/api/embeddings": {"model": "toy", "prompt": "Hi"},
    "/v1/embeddings": {"input": ["Hi"], "encoding_format": "float", "user": "u"},
    "/v1/rerank": {"query": "Hi", "documents": ["a", {"text": "b"}], "top_n": 1},
    "/v1/sessions": {"name": "odd", "system": "s", "settings": {"temperature": 1.0, "stop": ["z"]}},
    "/v1/cache/warm": {"prompt": "Hi"},
    "/tokenize": {"content": "Hi"},
}


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there is something in a body."""
    if at:
        yield at
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, each in entries:
        yield from paths(each, (*at, key))


def changed(body: dict[str, Any], at: tuple[Any, ...], odd: Any) -> dict[str, Any]:
    """A body with something odd in one place."""
    found = copy.deepcopy(body)
    place: Any = found
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = odd
    return found


def odd_bodies(protocol: str) -> Iterator[tuple[tuple[Any, ...], Any, bytes]]:
    """Every body of a protocol with one odd value, with its place and that value."""
    for at in paths(BODIES[protocol]):
        for odd in ODD:
            yield at, odd, written(changed(BODIES[protocol], at, odd))


def written(body: dict[str, Any]) -> bytes:
    return json.dumps(body).replace(str(HUGE), "1e999").encode()
