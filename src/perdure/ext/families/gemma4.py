"""Gemma 4: `call:name{key:value,…}`, where strings stand between marks.

<|channel>thought
I need the weather.<channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from perdure import Tool, ToolCall
from perdure.ext.families.argument_types import (
    kinds_of,
    leaves,
    members_rule,
    properties_of,
    text_rule,
    within,
)
from perdure.ext.families.bounded_text import BoundedText
from perdure.spi.chat import (
    LONGEST_HEADER,
    SPACE,
    CallFormat,
    CallParser,
    CallWriter,
    Family,
    Malformed,
    Markers,
    Rules,
)

_QUOTE = '<|"|>'
_OPEN, _CLOSE = "<|tool_call>", "<tool_call|>"
_LONGEST = 1_000_000
_DEEPEST = 100
_DEEPEST_RULE = 8
_BARE = re.compile(r"[^\s:{}\[\],<]+")
_NAME = re.compile(r"\s*call:\s*(?P<name>[\w.:/-]+)\s*\{")
_KEY = re.compile(r"[^\s:{}\[\],<]+(?=\s*:)")
_ATOM = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?=[\s,}\]])")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gemma4Text(CallWriter):
    """`call:name{key:value,…}`."""

    holds_all: ClassVar[bool] = True

    def call_text(self, call: ToolCall, number: int) -> str:
        return f"{_OPEN}call:{call.name}{_written(call.parsed)}{_CLOSE}"

    def call_rule(self, rules: Rules, tool: Tool, begun: str = "") -> str:
        head = f"{rules.literal(_OPEN.removeprefix(begun))} {rules.words('call:')} {rules.words(tool.name)}"
        return f"{head} {_object_rule(rules, tool.parameters, tool.parameters, 0)} {rules.literal(_CLOSE)}"


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_written_key(key)}:{_written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)


def _written_key(key: str) -> str:
    return key if _BARE.fullmatch(key) else f"{_QUOTE}{key}{_QUOTE}"


def _object_rule(rules: Rules, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    required = schema.get("required") or ()
    members = []
    for key, each in properties_of(schema).items():
        value = _value_rule(rules, each, root, depth + 1)
        members.append((rules.rule(f"{rules.words(_written_key(key) + ':')} {value}"), key in required))
    return f"{rules.words('{')} {members_rule(rules, members, ',')} {rules.words('}')}"


def _value_rule(rules: Rules, schema: Any, root: Mapping[str, Any], depth: int) -> str:
    """What a schema allows. Where that is not said, a string."""
    ways = []
    for leaf in leaves(schema, root):
        kinds = kinds_of(leaf, root)
        if "string" in kinds or not kinds or depth > _DEEPEST_RULE:
            if text := text_rule(rules, leaf, _QUOTE, ()):
                ways.append(f"{rules.literal(_QUOTE)} {text}")
            continue
        if "object" in kinds:
            ways.append(_object_rule(rules, leaf, root, depth))
        if "array" in kinds:
            ways.append(_array_rule(rules, leaf, root, depth))
        if atoms := sorted(kinds - {"object", "array"}):
            ways.append(rules.json(within(leaf if "enum" in leaf else {**leaf, "type": atoms}, root)))
    return rules.rule(" | ".join(ways))


def _array_rule(rules: Rules, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    item = rules.rule(_value_rule(rules, schema.get("items"), root, depth + 1))
    items = "" if most == 0 else item
    if items and most != 1:
        times = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        items = f"{item} ({rules.words(',')} {item}){times}"
    if items and not least:
        items = f"({items})?"
    return f"{rules.words('[')} {items} {rules.words(']')}"


class Gemma4Calls(CallFormat):
    """Calls, and the channel in which the model thinks."""

    def __init__(self, writer: CallWriter) -> None:
        super().__init__(writer, openers=(_OPEN, "<|channel>"), marks=(_CLOSE, _QUOTE))

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        return _CallParser() if opener == _OPEN else _ChannelParser()


class _ChannelParser(CallParser):
    """The channel's name: what follows it is reasoning."""

    _THOUGHT = "thought"

    def _read(self, text: str, at: int) -> int:
        if text[at] != self._THOUGHT[self.position]:
            raise Malformed
        if self.position == len(self._THOUGHT) - 1:
            self.events.append(("channel", "reasoning"))
            self.safe, self.done = self.position + 1, True
        return at + 1


class _CallParser(CallParser):
    """One call. An argument is passed on when it is whole: what stands in strings may look like its end."""

    def __init__(self) -> None:
        super().__init__()
        self._next: Callable[[str], None] = self._in_name
        self._text = BoundedText(_LONGEST)
        self._tail = ""
        self._in_string = False
        self._depth = 0
        self._arguments = 0

    def finish(self) -> None:
        if self._next == self._after_call and not self._tail:
            self._call_ended(0)
        super().finish()

    def _read(self, text: str, at: int) -> int:
        end = text.find(_QUOTE[0], at) if self._in_string and not self._tail else at
        if end != at:
            end = len(text) if end < 0 else end
            self._text.add(text[at:end])
            return end
        self._next(text[at])
        return at + 1

    def _in_name(self, char: str) -> None:
        self._text.add(char)
        if len(self._text) > LONGEST_HEADER:
            raise Malformed
        if char == "{":
            match = _NAME.fullmatch(str(self._text))
            if match is None:
                raise Malformed
            self.events += [("name", match["name"]), ("arguments", "{")]
            self._text.clear()
            self._next = self._in_argument

    def _in_argument(self, char: str) -> None:
        self._tail = _begun(self._tail + char, _QUOTE, _CLOSE)
        if self._tail == _QUOTE:
            self._in_string, self._tail = not self._in_string, ""
        elif self._tail == _CLOSE and not self._in_string:
            raise Malformed
        if self._in_string or self._tail:
            self._text.add(char)
            return
        if char in ",}" and not self._depth:
            self._give(str(self._text), last=char == "}")
            self._text.clear()
            return
        self._depth += (char in "{[") - (char in "}]")
        self._text.add(char)

    def _give(self, written: str, *, last: bool) -> None:
        if written.strip() or not last or self._arguments:
            separator = ", " if self._arguments else ""
            self.events.append(("arguments", separator + _Value(written + "}", 0).member()))
            self._arguments += 1
        if last:
            self.events.append(("arguments", "}"))
            self._next = self._after_call

    def _after_call(self, char: str) -> None:
        if char in SPACE and not self._tail:
            return
        self._tail += char
        if not _CLOSE.startswith(self._tail):
            raise Malformed
        if self._tail == _CLOSE:
            self._call_ended(1)
            self.done = True


def _begun(text: str, *marks: str) -> str:
    """The longest end of a text that one of the marks begins with."""
    return next(
        (text[at:] for at in range(len(text)) if any(mark.startswith(text[at:]) for mark in marks)), ""
    )


class _Value:
    """A value as JSON."""

    def __init__(self, text: str, at: int) -> None:
        self._text = text
        self.at = at

    def member(self) -> str:
        """A key and its value, which are all that there is."""
        self._skip()
        written = self._key() + self.read(1)
        self._skip()
        if self.at != len(self._text) - 1:
            raise Malformed
        return written

    def read(self, depth: int = 0) -> str:
        self._skip()
        if depth > _DEEPEST:
            raise Malformed
        if self._text.startswith(_QUOTE, self.at):
            return self._string()
        char = self._text[self.at : self.at + 1]
        if char == "{":
            return self._members("}", depth)
        if char == "[":
            return self._members("]", depth)
        atom = _ATOM.match(self._text, self.at)
        if atom is None:
            raise Malformed
        self.at = atom.end()
        return atom[0]

    def _members(self, close: str, depth: int) -> str:
        parts: list[str] = []
        self.at += 1
        while True:
            self._skip()
            if self._text.startswith(close, self.at) and not parts:
                break
            parts.append((self._key() if close == "}" else "") + self.read(depth + 1))
            self._skip()
            if not self._text.startswith(",", self.at):
                break
            self.at += 1
        if not self._text.startswith(close, self.at):
            raise Malformed
        self.at += 1
        return ("{" if close == "}" else "[") + ", ".join(parts) + close

    def _key(self) -> str:
        if self._text.startswith(_QUOTE, self.at):
            key = self._string()
        else:
            match = _KEY.match(self._text, self.at)
            if match is None:
                raise Malformed
            self.at = match.end()
            key = json.dumps(match[0], ensure_ascii=False)
        self._skip()
        if not self._text.startswith(":", self.at):
            raise Malformed
        self.at += 1
        return key + ": "

    def _string(self) -> str:
        start = self.at + len(_QUOTE)
        end = self._text.find(_QUOTE, start)
        if end < 0:
            raise Malformed
        self.at = end + len(_QUOTE)
        return json.dumps(self._text[start:end], ensure_ascii=False)

    def _skip(self) -> None:
        while self.at < len(self._text) and self._text[self.at] in SPACE:
            self.at += 1


GEMMA4 = Family(
    "gemma4",
    Markers(open="<|channel>thought\n", close="<channel|>"),
    Gemma4Calls(_Gemma4Text(head=_OPEN)),
    ends=("<|turn>", "<turn|>", "<channel|>", "<|tool_response>"),
)
