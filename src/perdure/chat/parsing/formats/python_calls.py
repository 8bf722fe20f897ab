"""Calls as Python: `[name(key="value"), …]` between marks, or lines of a fenced block."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.chat.message import Tool, ToolCall
from perdure.chat.parsing.call_format import CallFormat
from perdure.chat.parsing.call_parser import LONGEST_HEADER, SPACE, CallParser
from perdure.chat.parsing.call_writer import CallText, CallWriter, Rules, within
from perdure.chat.parsing.formats.json_objects import JsonObjectsParser
from perdure.chat.parsing.json_scanner import Malformed
from perdure.chat.parsing.python_scanner import ArgumentScanner, argument
from perdure.chat.parsing.values import kinds_of, properties_of, resolved

_NAME = re.compile(r"[^\W\d][\w.:/-]*\s*")
_SINGLE = re.compile(r"[^'\\\n]*")
_BOUNDING = frozenset(("enum", "const", "pattern", "format", "minLength", "maxLength"))
"""What a schema says of a string that single quotes do not see to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedCalls(CallFormat):
    """A fenced block of Python calls or JSON, or a bare object."""

    writer: CallWriter
    openers: tuple[str, ...] = ("```tool_code\n",)
    leads: str = "{["
    marks: tuple[str, ...] = ()
    opener_is_text: bool = True

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        return PythonParser(tools, "```") if opener else JsonObjectsParser(frozenset(t.name for t in tools))


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls(CallFormat):
    """A list of Python calls between marks, or, of known tools, without them."""

    writer: CallWriter
    openers: tuple[str, ...]
    close: str
    leads: str = ""
    marks: tuple[str, ...] = ()
    opener_is_text: bool = False

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        return PythonParser(tools, self.close) if opener else PythonParser(tools, "]", known_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonText(CallWriter):
    """A call with keywords, whose values are JSON: Python's own words for them are read, too."""

    def call_text(self, call: ToolCall, number: int) -> str:
        written = (f"{key}={self.value_text(value)}" for key, value in call.parsed.items())
        return f"{call.name}({', '.join(written)})"

    def call_rule(self, rules: Rules, tool: Tool) -> str:
        schema, required = tool.parameters, tool.parameters.get("required") or ()
        members = [
            (rules.rule(f"{rules.words(f'{key}=')} {self.value_rule(rules, each, schema)}"), key in required)
            for key, each in properties_of(schema).items()
        ]
        members_rule = rules.members(members, ", ")
        return f"{rules.words(tool.name + '(')} {members_rule} {rules.words(')')}"

    def value_text(self, value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    def value_rule(self, rules: Rules, schema: Any, root: Mapping[str, Any]) -> str:
        return rules.json(within(schema, root))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReprText(PythonText):
    """A call with keywords, whose values are Python's: single quotes, True and None. What single quotes
    cannot hold, and objects, are JSON."""

    def value_text(self, value: Any) -> str:
        if isinstance(value, str) and _SINGLE.fullmatch(value):
            return f"'{value}'"
        if isinstance(value, (str, dict)):
            return json.dumps(value, ensure_ascii=False)
        return repr(value)

    def value_rule(self, rules: Rules, schema: Any, root: Mapping[str, Any]) -> str:
        kinds, meant = kinds_of(schema, root), resolved(schema, root)
        as_json = rules.json(within(schema, root))
        if kinds == {"boolean"}:
            return '("True" | "False")'
        if kinds != {"string"}:
            return as_json
        values = meant.get("enum") if isinstance(meant.get("enum"), list) else None
        values = [meant["const"]] if values is None and "const" in meant else values
        if values and all(isinstance(each, str) and _SINGLE.fullmatch(each) for each in values):
            return f"({' | '.join(rules.words(self.value_text(each)) for each in values)})"
        if _BOUNDING & meant.keys():
            return as_json
        return f"(/'{_SINGLE.pattern}'/ | {as_json})"


class PythonParser(CallParser):
    """Python calls, or JSON, up to a mark outside of strings.

    An argument is passed on when it is whole, and a call has ended when what stands behind it may follow one.
    """

    def __init__(self, tools: Sequence[Tool], close: str, *, known_only: bool = False) -> None:
        super().__init__()
        self._tools = {tool.name: tool for tool in tools}
        self._close = close
        self._known_only = known_only
        self._next: Callable[[str, int], int] = self._before_call
        self._matched = ""
        """What was read of the closing mark."""
        self._json = JsonObjectsParser(frozenset(self._tools) if known_only else None)
        self._json_start = 0
        self._is_listed = False
        self._in_print = False
        self._in_comment = False
        self._name = ""
        self._positional: list[str] = []
        """The arguments that may yet be given by their place: none behind one that was named."""
        self._seen: set[str] = set()
        self._argument = ArgumentScanner(close)

    def finish(self) -> None:
        if self._next == self._in_json:
            self._json.finish()
        elif self._next == self._after_call and not (self._matched or self._in_print or self._known_only):
            self._call_ended(0)
        super().finish()

    def _read(self, text: str, at: int) -> int:
        if self._in_comment and text[at] != "\n":
            return at + 1
        self._in_comment = False
        return self._next(text, at)

    def _before_call(self, text: str, at: int) -> int:
        char = text[at]
        if self._matched or char == self._close[0] != "]":
            self._closing(char)
        elif char == "#":
            self._in_comment = True
        elif char == "{" and not self.safe:
            self._json_start, self._next = self.position - self._is_listed, self._in_json
            self._json.push("[" if self._is_listed else "")
            return at
        elif char == "[" and not self._is_listed:
            self._is_listed = True
        elif char == "]" and self._is_listed and self.safe:
            self._end_list()
        elif char not in SPACE:
            self._name, self._next = "", self._in_name
            return at
        return at + 1

    def _in_name(self, text: str, at: int) -> int:
        char = text[at]
        if char != "(":
            self._name = (self._name + char).lstrip()
            if len(self._name) > LONGEST_HEADER or not _NAME.fullmatch(self._name):
                raise Malformed
            return at + 1
        name = self._name.rstrip()
        tool = self._tools.get(name)
        if tool is None and (self._known_only or not all(map(str.isidentifier, name.split(".")))):
            raise Malformed
        if tool is None and name == "print" and not self._in_print:
            self._in_print, self._name = True, ""
            return at + 1
        self._positional = list(properties_of(tool.parameters)) if tool is not None else []
        self._seen, self._argument = set(), ArgumentScanner(self._close)
        self.events += [("name", name), ("arguments", "{")]
        self._next = self._in_argument
        return at + 1

    def _in_argument(self, text: str, at: int) -> int:
        if text[at] == "#" and not self._argument.in_string:
            self._in_comment = True
            return at + 1
        end = self._argument.push(text, at)
        if self._argument.ended_by:
            ended_by, written = self._argument.ended_by, self._argument.text
            self._argument = ArgumentScanner(self._close)
            if written:
                self._give(written)
            elif ended_by == ",":
                raise Malformed
            if ended_by == ")":
                self.events.append(("arguments", "}"))
                self._next = self._after_call
        return end

    def _give(self, written: str) -> None:
        key, value = argument(written)
        if key is not None:
            self._positional = []
        elif self._positional:
            key = self._positional.pop(0)
        if key is None or key in self._seen:
            raise Malformed
        separator = ", " if self._seen else ""
        self.events.append(("arguments", f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}"))
        self._seen.add(key)

    def _after_call(self, text: str, at: int) -> int:
        char = text[at]
        if self._in_print:
            if char not in SPACE and char != ")":
                raise Malformed
            self._in_print = char != ")"
        elif self._matched or char == self._close[0] != "]":
            self._closing(char)
        elif char == "#":
            self._in_comment = True
        elif char == "]" and self._is_listed:
            self._call_ended(1)
            self._end_list()
        elif char == "," or (char in ";\n" and not self._is_listed):
            self._call_ended(0)
            self._next = self._before_call
        elif char not in SPACE:
            raise Malformed
        return at + 1

    def _end_list(self) -> None:
        self.safe, self.done = self.position + 1, self._close == "]"
        self._is_listed, self._next = False, self._before_call

    def _in_json(self, text: str, at: int) -> int:
        self._json.push(text[at])
        self.events += self._json.events
        self._json.events.clear()
        if self._json.safe:
            self.safe = self._json_start + self._json.safe
        if not self._json.done:
            return at + 1
        self.done, self._next = self._close == "]", self._before_end
        return at + (self._json.safe == self._json.position)

    def _before_end(self, text: str, at: int) -> int:
        if self._matched or text[at] not in SPACE:
            self._closing(text[at])
        return at + 1

    def _closing(self, char: str) -> None:
        self._matched += char
        if not self._close.startswith(self._matched):
            raise Malformed
        if self._matched == self._close:
            if self._next == self._after_call:
                self._call_ended(1)
            if not self.safe:
                raise Malformed
            self.safe, self.done = self.position + 1, True


GEMMA = FencedCalls(
    writer=CallText(head='{"name": "', middle='", "parameters": ', tail="}", between="\n"),
)
"""Gemma has no format of its own; these two are what its makers suggest."""

LFM2 = PythonCalls(
    writer=PythonText(start="<|tool_call_start|>[", between=", ", end="]<|tool_call_end|>"),
    openers=("<|tool_call_start|>",),
    close="<|tool_call_end|>",
    marks=("<|tool_call_end|>",),
)
LFM2_REPR = PythonCalls(
    writer=ReprText(start="<|tool_call_start|>[", between=", ", end="]<|tool_call_end|>"),
    openers=("<|tool_call_start|>",),
    close="<|tool_call_end|>",
    marks=("<|tool_call_end|>",),
)
"""As LFM2.5 writes values."""
LLAMA4 = PythonCalls(
    writer=PythonText(start="[", between=", ", end="]"),
    openers=("<|python_start|>",),
    close="<|python_end|>",
    leads="[",
    marks=("<|python_end|>",),
)
