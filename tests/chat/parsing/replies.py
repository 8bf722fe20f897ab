"""Raw replies of every family, and what each of them says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from chat.conversations import TOOLS
from perdure.chat.formats.registry import names
from perdure.chat.message import Message, ToolCall

PARIS = ("get_weather", '{"city": "Paris"}')
TRICKY = (
    "search",
    '{"query": "</tool_call> } ] \\" [/THINK] <｜tool▁call▁end｜> ``` 한🙂 \\u00e9", '
    '"n": [1, {"a": {}}, -2.5e3]}',
)
JSON_PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
JSON_TRICKY = f'{{"name": "search", "arguments": {TRICKY[1]}}}'


@dataclass(frozen=True)
class Raw:
    """A reply's raw text and its reading."""

    family: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    thinking: bool = False
    with_tools: bool = field(default=True)

    def __str__(self) -> str:
        return f"{self.family}: {self.text[:40]!r}"


def message(raw: Raw) -> Message:
    """What the reading comes to, without the ids."""
    return Message(
        role="assistant",
        content=raw.content or (None if raw.calls else ""),
        reasoning=raw.reasoning or None,
        tool_calls=tuple(ToolCall(id="", name=name, arguments=text) for name, text in raw.calls),
    )


def hermes(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def deepseek(*calls: tuple[str, str]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
        for name, text in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


_RAW = [
    # Text alone.
    *(
        Raw(name, "Hello,\n\n  wörld 한🙂 e\u0301!\n ", "Hello,\n\n  wörld 한🙂 e\u0301!\n ")
        for name in ("generic", "hermes", "qwen3", "llama3", "mistral", "deepseek", "gemma", "harmony")
    ),
    *(Raw(name, "", "") for name in ("generic", "qwen3", "harmony")),
    Raw("qwen3", "a < b, <tool and <|im_ and </thin", "a < b, <tool and <|im_ and </thin"),
    Raw("mistral", "[TOOL and [/INS", "[TOOL and [/INS"),
    Raw("deepseek", "<｜tool▁call", "<｜tool▁call"),
    Raw("hermes", "one<|im_end|>two", "onetwo"),
    # Reasoning.
    Raw("qwen3", "<think>\nHm, so.\n</think>\n\nHello!", "Hello!", "Hm, so."),
    Raw("qwen3", "Hm, so.\n</think>\n\nHello!", "Hello!", "Hm, so.", thinking=True),
    Raw("qwen3", "\nHm", "", "Hm", thinking=True),
    Raw("qwen3", "<think>never closed </thin", "", "never closed </thin"),
    Raw("qwen3", "<think>a <think> b</think>c", "c", "a  b"),
    Raw("qwen3", "<think></think>a", "a"),
    Raw("qwen3", "before <think> in </think> after", "before after", "in"),
    Raw("qwen3", "before<think> in </think>\nafter", "before\nafter", "in"),
    Raw("qwen3", " <think> in </think> ", "", "in"),
    Raw("qwen3", "stray </think> close", "stray  close"),
    Raw("qwen3", "<think>a</think>b<think>c</think>d", "bd", "ac"),
    Raw("deepseek", "<think>\nHm.\n</think>\n\nHello!", "Hello!", "Hm."),
    Raw("magistral", "[THINK]Hm.[/THINK]Hello!", "Hello!", "Hm."),
    Raw("granite", "<think>Hm.</think>Hello!", "Hello!", "Hm."),
    Raw("command", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>", "Hi", "Hm."),
    Raw(
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
        "Hi",
        "Hm.",
    ),
    Raw("harmony", "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi", "Hi", "Hm.", thinking=True),
    Raw("harmony", "<|channel|>analysis<|message|>Hm", "", "Hm"),
    Raw("harmony", "<|channel|>final <|constrain|>json<|message|>{}", "{}"),
    Raw("harmony", "<|start|>assistant<|message|>Hi<|end|>", "Hi"),
    # Calls.
    Raw("hermes", hermes(JSON_PARIS), calls=(PARIS,)),
    Raw("hermes", f"Let me see.\n{hermes(JSON_PARIS, JSON_TRICKY)}", "Let me see.", calls=(PARIS, TRICKY)),
    Raw("hermes", f"{hermes(JSON_PARIS)}\n\nDone.", "Done.", calls=(PARIS,)),
    Raw("hermes", f"Look.\n{hermes(JSON_PARIS)}\n\nDone.", "Look.\nDone.", calls=(PARIS,)),
    Raw("hermes", f"<tool_call>{JSON_PARIS}</tool_call><tool_call>{JSON_PARIS}", calls=(PARIS, PARIS)),
    Raw("hermes", f"<tool_call>{JSON_PARIS}\n{JSON_TRICKY}</tool_call>", calls=(PARIS, TRICKY)),
    Raw("hermes", '<tool_call>{"arguments": {"a": 1}, "id": [2], "name": "f"}', calls=(("f", '{"a": 1}'),)),
    Raw("hermes", '<tool_call>{"name": "f"}</tool_call>', calls=(("f", "{}"),)),
    Raw("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', calls=(("f", '{"a": 1}'),)),
    Raw("hermes", hermes(JSON_PARIS), calls=(PARIS,), with_tools=False),
    Raw("qwen3", f"<think>\nHm.\n</think>\n\n{hermes(JSON_PARIS)}", "", "Hm.", (PARIS,)),
    Raw("qwen3", f"<think>Hm.\n{hermes(JSON_PARIS)}", "", "Hm.", (PARIS,)),
    Raw("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}', calls=(PARIS,)),
    Raw("llama3", ' {"type": "function", "name": "search", "parameters": {}}', calls=(("search", "{}"),)),
    Raw(
        "llama3",
        f'{{"name": "get_weather", "parameters": {PARIS[1]}}}; {{"name": "search", "parameters": {{}}}}',
        calls=(PARIS, ("search", "{}")),
    ),
    Raw(
        "llama3",
        f'<|python_tag|>{{"name": "f", "parameters": {PARIS[1]}}}<|eom_id|>',
        calls=(("f", PARIS[1]),),
    ),
    Raw("mistral", f"[TOOL_CALLS][{JSON_PARIS}, {JSON_TRICKY}]", calls=(PARIS, TRICKY)),
    Raw("mistral", f"Look: [TOOL_CALLS] [{JSON_PARIS}]</s>", "Look:", calls=(PARIS,)),
    Raw("magistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS[1]}", calls=(PARIS,)),
    Raw(
        "mistral-named",
        f"[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{PARIS[1]}[TOOL_CALLS]search{TRICKY[1]}",
        calls=(PARIS, TRICKY),
    ),
    Raw("deepseek", deepseek(PARIS), calls=(PARIS,)),
    Raw("deepseek", f"<think>Hm.</think>Look.\n{deepseek(PARIS, TRICKY)}", "Look.", "Hm.", (PARIS, TRICKY)),
    Raw(
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS[1]}<｜tool▁call▁end｜>",
        calls=(PARIS,),
    ),
    Raw("granite", f"<|tool_call|>[{JSON_PARIS}, {JSON_TRICKY}]", calls=(PARIS, TRICKY)),
    Raw("phi", f"<|tool_call|>[{JSON_PARIS}]<|/tool_call|>", calls=(PARIS,)),
    Raw(
        "command",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f"{PARIS[1]}}}\n]<|END_ACTION|>",
        calls=(PARIS,),
    ),
    Raw(
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{PARIS[1]}<|call|>",
        "",
        "Hm.",
        (PARIS,),
    ),
    Raw(
        "harmony",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{PARIS[1]}<|call|>",
        calls=(PARIS,),
    ),
    Raw(
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.search"
        f"<|channel|>commentary json<|message|>{TRICKY[1]}<|call|>",
        "I look.",
        calls=(TRICKY,),
    ),
    Raw("gemma", '```tool_code\nget_weather(city="Paris")\n```', calls=(PARIS,)),
    Raw("gemma", "Look:\n```tool_code\nprint(get_weather('Paris'))\n```\n", "Look:", calls=(PARIS,)),
    Raw(
        "gemma",
        "```tool_code\n[search(query='a', n=1), search(query='\\d', n=-2)]\n```",
        calls=(("search", '{"query": "a", "n": 1}'), ("search", json.dumps({"query": "\\d", "n": -2}))),
    ),
    Raw("gemma", f"```tool_code\n{JSON_PARIS}\n```", calls=(PARIS,)),
    Raw("gemma", '{"name": "get_weather", "parameters": {"city": "Paris"}}', calls=(PARIS,)),
    Raw("generic", JSON_PARIS, calls=(PARIS,)),
    Raw("generic", f"[{JSON_PARIS}, {JSON_PARIS}]", calls=(PARIS, PARIS)),
    # What only looks like a call is text again.
    Raw("hermes", "<tool_call>\nno JSON\n</tool_call> after", "\nno JSON\n after"),
    Raw(
        "hermes",
        'a <tool_call> {"name": "f", "arguments": {"a": oops}}',
        'a  {"name": "f", "arguments": {"a": oops}}',
    ),
    Raw("hermes", 'a <tool_call>{"name": "f", "arguments": {"a": 1', 'a {"name": "f", "arguments": {"a": 1'),
    Raw("hermes", 'a <tool_call>{"name": "f", "argum', 'a {"name": "f", "argum'),
    Raw("hermes", "<tool_call>", ""),
    Raw("hermes", '<tool_call>{"name": 7}</tool_call>', '{"name": 7}'),
    Raw("hermes", '<tool_call>{"arguments": {}}</tool_call>', '{"arguments": {}}'),
    *(
        Raw(
            "hermes",
            f'<tool_call>{{"name": "f", "arguments": {{"a": {wrong}}}}}',
            f'{{"name": "f", "arguments": {{"a": {wrong}}}}}',
        )
        for wrong in (
            "tru",
            "01",
            "-",
            "1.",
            "[1,]",
            "[1 2]",
            '"\\x"',
            '"\\u12g4"',
            '"\n"',
            "{1: 2}",
            '{"b" 1}',
            '{"b": 1,}',
            "}",
        )
    ),
    Raw("hermes", '<tool_call>{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": [1]}'),
    Raw("hermes", '<tool_call>{"name": "f", "arguments": "oops"}', '{"name": "f", "arguments": "oops"}'),
    Raw("hermes", '<tool_call>{"name": "f", "name": "g"}', '{"name": "f", "name": "g"}'),
    Raw(
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {{"a": "unclosed}}}}</tool_call>\n{hermes(JSON_PARIS)}',
        '{"name": "f", "arguments": {"a": "unclosed}}',
        calls=(PARIS,),
    ),
    Raw("qwen3", "<think>use <tool_call> here</think>ok", "ok", "use  here"),
    Raw("mistral", f"[TOOL_CALLS][{JSON_PARIS}, oops]", ", oops]", calls=(PARIS,)),
    Raw("mistral", "[TOOL_CALLS]get_weather and nothing", "get_weather and nothing"),
    Raw("mistral", "[TOOL_CALLS]" + "x" * 300 + '{"a": 1}', "x" * 300 + '{"a": 1}'),
    Raw(
        "deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\noops", "functionf\n```json\noops"
    ),
    Raw("llama3", "<|python_tag|>print(1)", "print(1)"),
    Raw("llama3", '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}'),
    Raw("llama3", '{"temperature": 21}', '{"temperature": 21}'),
    Raw(
        "llama3",
        '{"name": "search", "parameters": {}}',
        '{"name": "search", "parameters": {}}',
        with_tools=False,
    ),
    Raw("llama3", 'It is {"name": "search", "parameters": {}}', 'It is {"name": "search", "parameters": {}}'),
    Raw("generic", '[1, 2, {"a": 3}]', '[1, 2, {"a": 3}]'),
    Raw("generic", '{"name": "search", "arguments": {"a": 1}', '{"name": "search", "arguments": {"a": 1}'),
    Raw("gemma", "```tool_code\nimport os\n```\nHm", "```tool_code\nimport os\n```\nHm"),
    Raw("gemma", "```tool_code\nget_weather(", "```tool_code\nget_weather("),
    Raw("gemma", "```python\nprint(1)\n```", "```python\nprint(1)\n```"),
    Raw("harmony", "<|channel|>commentary to=python code<|message|>print(1)<|call|>", ""),
    Raw("harmony", "<|channel|>final", "final"),
    Raw("harmony", "to be or not", "to be or not"),
]
RAW = [raw for raw in _RAW if raw.family in names()]
"""Of the families that are there: those of an extension may be missing."""

TOOLS_GIVEN = TOOLS
