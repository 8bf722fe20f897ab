"""MiniMax M2: a section of calls, with a tag for each call and each argument.

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    </invoke>
    </minimax:tool_call>

M3 has a tag for every value, nested as the values are, each behind a mark, here written `¤`:

    ¤<tool_call>
    ¤<invoke name="get_weather">¤<city>Paris¤</city>¤<days>¤<item>1¤</item>¤</days>¤</invoke>
    ¤</tool_call>

M1 writes lines of JSON:

    <tool_calls>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_calls>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure import Grammar, Tool, ToolCall
from perdure.ext.families.argument_types import (
    kinds_of,
    members_rule,
    properties_of,
    resolved,
    typed,
    value_rule,
    within,
)
from perdure.ext.families.tagged import TaggedCalls, TaggedText
from perdure.spi.chat import (
    LONGEST_HEADER,
    THINK,
    CallFormat,
    CallParser,
    CallWriter,
    Family,
    JsonCalls,
    Malformed,
    Markers,
    Rules,
    json_object,
)

_MARK = "]<]minimax[>["
_INVOKE = re.compile(r'<invoke name="(?P<name>[^"<>\n]+)">')
_ANY_TAG = re.compile(r"<[^<>]+>")
_TAG = re.compile(r"<(?P<key>[^<>/\s][^<>\s]*)>")
_END = "</invoke>\n"
_LONGEST = 1_000_000
_DEEPEST = 50
_DEEPEST_RULE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _MiniMaxText(CallWriter):
    """Calls as nested tags."""

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, control: Mapping[str, int]) -> Grammar:
        rules = Rules(control)
        mark = rules.literal(_MARK)
        call = rules.rule(" | ".join(rules.rule(self.call_rule(rules, tool)) for tool in tools))
        more = f"({call})*" if parallel else ""
        start, end = rules.words("<tool_call>\n"), rules.words("</tool_call>")
        return rules.grammar(f"{mark} {start} {call} {more} {mark} {end}")

    def call_text(self, call: ToolCall, number: int) -> str:
        inner = "".join(_written(key, value) for key, value in call.parsed.items())
        return f'{_MARK}<invoke name="{call.name}">{inner}{_MARK}</invoke>\n'

    def call_rule(self, rules: Rules, tool: Tool, begun: str = "") -> str:
        # The mark is a separate lexeme everywhere: the lexer takes the longest that fits.
        mark = rules.literal(_MARK)
        start, end = f"{mark} {rules.words('<invoke name=' + chr(34))}", f"{mark} {rules.words(_END)}"
        inner = _object_rule(rules, tool.parameters, tool.parameters, 0)
        name = f"{rules.words(tool.name)} {rules.words(chr(34) + '>')}"
        return f"{start} {name} {inner} {end}"


def _written(key: str, value: Any) -> str:
    if isinstance(value, dict):
        inner = "".join(_written(each, value[each]) for each in value)
    elif isinstance(value, list):
        inner = "".join(_written("item", each) for each in value)
    else:
        inner = value if isinstance(value, str) else json.dumps(value)
    return f"{_MARK}<{key}>{inner}{_MARK}</{key}>"


def _object_rule(rules: Rules, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    required = schema.get("required") or ()
    members = [
        (_member_rule(rules, key, each, root, depth), key in required)
        for key, each in properties_of(schema).items()
    ]
    return members_rule(rules, members)


def _member_rule(rules: Rules, key: str, schema: Any, root: Mapping[str, Any], depth: int) -> str:
    kinds, meant = kinds_of(schema, root), resolved(schema, root)
    head = f"{rules.literal(_MARK)} {rules.words(f'<{key}>')}"
    close = f"{_MARK}</{key}>"
    if "string" in kinds or not kinds or depth > _DEEPEST_RULE:
        return rules.rule(f"{head} {value_rule(rules, {'type': 'string', **meant}, root, close)}")
    if "object" in kinds:
        inner = _object_rule(rules, meant, root, depth + 1)
    elif "array" in kinds:
        inner = f"({_member_rule(rules, 'item', meant.get('items'), root, depth + 1)})*"
    else:
        inner = rules.json(within(schema, root))
    return rules.rule(f"{head} {inner} {rules.literal(_MARK)} {rules.words(f'</{key}>')}")


class MiniMaxM3Calls(CallFormat):
    """A section of calls behind the mark."""

    def __init__(self, writer: CallWriter) -> None:
        opener, close = writer.start.strip(), writer.end.strip()
        super().__init__(writer, openers=(opener,), marks=(close, _MARK))

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        return _SectionParser(tools)


class _SectionParser(CallParser):
    """Calls up to the end of their section. An argument is passed on when its tag is closed."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tools = {tool.name: tool for tool in tools}
        self._next: Callable[[str, str], None] = self._before_call
        self._body: list[str] = []
        """What was read since the last tag that counted."""
        self._size = 0
        self._tail = ""
        self._values = _Values({})
        self._arguments = 0
        self._key = ""
        self._open_tags = 0

    def finish(self) -> None:
        if self._next != self._before_call or "".join(self._body).strip():
            raise Malformed
        super().finish()

    def _read(self, text: str, at: int) -> int:
        end = text.find(">", at) + 1 or len(text)
        self._body.append(text[at:end])
        self._size += end - at
        if self._size > (_LONGEST if self._next == self._in_value else 2 * LONGEST_HEADER):
            raise Malformed
        self._tail = (self._tail + text[at:end])[-len(_MARK) - LONGEST_HEADER :]
        tag = self._tail[self._tail.rfind(_MARK) + len(_MARK) :] if _MARK in self._tail else ""
        if _ANY_TAG.fullmatch(tag):
            self.position += end - at - 1
            self._next("".join(self._body)[: -len(_MARK) - len(tag)], tag)
        return end

    def _read_on(self, after: Callable[[str, str], None]) -> None:
        self._body, self._size, self._tail, self._next = [], 0, "", after

    def _before_call(self, before: str, tag: str) -> None:
        invoke = _INVOKE.fullmatch(tag)
        if before.strip() or (invoke is None and (tag != "</tool_call>" or not self.safe)):
            raise Malformed
        if invoke is None:
            self.safe, self.done = self.position + 1, True
            return
        tool = self._tools.get(invoke["name"])
        self._values = _Values(tool.parameters if tool is not None else {})
        self.events += [("name", invoke["name"]), ("arguments", "{")]
        self._arguments = 0
        self._read_on(self._in_call)

    def _in_call(self, before: str, tag: str) -> None:
        match = _TAG.fullmatch(tag)
        if before.strip() or (match is None and tag != "</invoke>"):
            raise Malformed
        if match is not None:
            self._key, self._open_tags = match["key"], 1
            self._read_on(self._in_value)
            return
        self.events.append(("arguments", "}"))
        self._call_ended(1)
        self._read_on(self._before_call)

    def _in_value(self, before: str, tag: str) -> None:
        if tag == "</invoke>":
            raise Malformed
        self._open_tags += (tag == f"<{self._key}>") - (tag == f"</{self._key}>")
        if not self._open_tags:
            separator = ", " if self._arguments else ""
            self.events.append(("arguments", separator + self._values.member(self._key, before)))
            self._arguments += 1
            self._read_on(self._in_call)


class _Values:
    """The values of a call's arguments as JSON, typed by the tool's schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def member(self, key: str, text: str) -> str:
        value = self._value(text, properties_of(self._root).get(key), 0)
        return f"{json.dumps(key, ensure_ascii=False)}: {value}"

    def _object(self, text: str, schema: Mapping[str, Any], depth: int) -> str:
        known = properties_of(schema)
        parts = [
            f"{json.dumps(key, ensure_ascii=False)}: {self._value(inner, known.get(key), depth)}"
            for key, inner in _tags(text, depth)
        ]
        return "{" + ", ".join(parts) + "}"

    def _value(self, text: str, schema: Any, depth: int) -> str:
        kinds = kinds_of(schema, self._root)
        # A string may contain tags; where the schema allows a string, the text is one.
        if not text and "string" not in kinds and kinds & {"array", "object"}:
            return "[]" if "array" in kinds else "{}"
        if not text.startswith(_MARK) or "string" in kinds:
            return typed(text, kinds)
        schema = schema if isinstance(schema, Mapping) else {}
        tags = _tags(text, depth)
        if all(key == "item" for key, _ in tags) and ("array" in kinds or not kinds):
            items = schema.get("items") or _branch(schema, "array").get("items")
            return "[" + ", ".join(self._value(inner, items, depth + 1) for _, inner in tags) + "]"
        fitting = schema if "properties" in schema else _branch(schema, "object")
        return self._object(text, fitting, depth + 1)


def _tags(text: str, depth: int) -> list[tuple[str, str]]:
    """The tags that follow each other in a text, with what stands in them."""
    if depth > _DEEPEST:
        raise Malformed
    tags, at = [], 0
    while at < len(text):
        tag = _TAG.match(text, at + len(_MARK)) if text.startswith(_MARK, at) else None
        if tag is None:
            if text[at:].strip():
                raise Malformed
            break
        close = f"{_MARK}</{tag['key']}>"
        end = _closing(text, tag.end(), f"{_MARK}<{tag['key']}>", close)
        tags.append((tag["key"], text[tag.end() : end]))
        at = end + len(close)
    return tags


def _closing(text: str, at: int, start: str, close: str) -> int:
    """Where the tag is closed, past others of its name within it."""
    open_tags = 1
    for each in re.compile(f"{re.escape(start)}|{re.escape(close)}").finditer(text, at):
        open_tags += 1 if each[0] == start else -1
        if not open_tags:
            return each.start()
    raise Malformed


def _branch(schema: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The alternative of a schema that is of a kind."""
    for word in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(word) or ():
            if isinstance(each, Mapping) and each.get("type") == kind:
                return each
    return {}


MINIMAX_M1 = Family(
    "minimax-m1",
    None,
    JsonCalls(json_object(start="<tool_calls>\n", tail="\n", end="</tool_calls>")),
    ends=("<end_of_sentence>", "<beginning_of_sentence>"),
)
MINIMAX = Family(
    "minimax",
    THINK,
    TaggedCalls(
        TaggedText(
            start="<minimax:tool_call>\n",
            head='<invoke name="',
            name_end='">\n',
            key_head='<parameter name="',
            key_end='">',
            value_end="</parameter>\n",
            tail="</invoke>\n",
            end="</minimax:tool_call>",
        )
    ),
    ends=("[e~[",),
)
MINIMAX_M3 = Family(
    "minimax-m3",
    Markers(open="<mm:think>", close="</mm:think>"),
    MiniMaxM3Calls(_MiniMaxText(start=f"{_MARK}<tool_call>\n", end=f"{_MARK}</tool_call>")),
    ends=("[e~[",),
)
