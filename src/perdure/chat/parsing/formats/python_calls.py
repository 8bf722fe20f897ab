"""Calls as Python: `[name(key="value"), …]` between marks, or lines of a fenced block."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.chat.message import Tool, ToolCall
from perdure.chat.parsing.call_format import CallFormat
from perdure.chat.parsing.call_parser import CallParser
from perdure.chat.parsing.call_writer import CallText, CallWriter, Rules, within
from perdure.chat.parsing.formats.json_objects import JsonObjectsParser
from perdure.chat.parsing.json_scanner import Malformed
from perdure.chat.parsing.values import kinds_of, properties_of, resolved

_LONGEST = 100_000
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None}
_SINGLE = re.compile(r"[^'\\\n]*")
_BOUNDING = frozenset(("enum", "const", "pattern", "format", "minLength", "maxLength"))
"""What a schema says of a string that single quotes do not see to."""
_ESCAPES = frozenset("\n\\'\"abfnrtvxuUN01234567")


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
    """Python calls, or JSON, up to a mark outside of strings; read when that has come."""

    def __init__(self, tools: Sequence[Tool], close: str, *, known_only: bool = False) -> None:
        super().__init__()
        self._tools = {tool.name: tool for tool in tools}
        self._close = close
        self._known_only = known_only
        self._body: list[str] = []
        self._end = ""
        self._quote = ""
        self._escaped = False
        self._depth = 0

    def _read(self, text: str, at: int) -> int:
        char = text[at]
        self._body.append(char)
        if len(self._body) > _LONGEST:
            raise Malformed
        if self._quote:
            self._in_string(char)
        elif char in "\"'":
            self._quote, self._end = char, ""
        else:
            self._depth += (char in "([{") - (char in ")]}")
            self._end = (self._end + char)[-len(self._close) :]
            if self._end == self._close and (self._close != "]" or self._depth == 0):
                body = "".join(self._body)
                self._calls(body if self._close == "]" else body.removesuffix(self._close))
                self.safe = self.position + 1
                self.done = True
        return at + 1

    def _in_string(self, char: str) -> None:
        # A line ends a string in Python, and so a stray apostrophe.
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char in (self._quote, "\n"):
            self._quote = ""

    def _calls(self, body: str) -> None:
        body = body.strip()
        if body.startswith(("{", "[{")):
            within = JsonObjectsParser()
            within.push(body)
            within.finish()
            if body[within.safe :].strip():
                raise Malformed
            self.events += within.events
            return
        calls = [(_name(call.func), call) for call in _python_calls(body)]
        if not calls or (self._known_only and not all(name in self._tools for name, _ in calls)):
            raise Malformed
        written = [(name, self._arguments(name, call)) for name, call in calls]
        for name, arguments in written:
            self.events += [("name", name), ("arguments", arguments), ("end", "")]

    def _arguments(self, name: str, call: ast.Call) -> str:
        tool = self._tools.get(name)
        names = list(properties_of(tool.parameters)) if tool is not None else []
        if len(call.args) > len(names):
            raise Malformed
        try:
            found = {key: _value(value) for key, value in zip(names, call.args, strict=False)}
            found |= {str(each.arg): _value(each.value) for each in call.keywords if each.arg}
            if len(found) != len(call.args) + len(call.keywords):
                raise Malformed
            return json.dumps(found, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, RecursionError, MemoryError):
            raise Malformed from None


def _value(node: ast.expr) -> Any:
    """A literal, with JSON's own words among them."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {_value(key): _value(each) for key, each in zip(node.keys, node.values, strict=True) if key}
    value = ast.literal_eval(node)
    if isinstance(value, str) and not value.isascii():
        # JSON writes some characters as two halves.
        value = value.encode("utf-16", "surrogatepass").decode("utf-16")
    return value


def _name(node: ast.expr) -> str:
    """A name, which may have dots."""
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise Malformed


def _escape(found: re.Match[str]) -> str:
    """JSON's escapes as Python has them; one that neither knows stands for itself."""
    if found[1] == "/":
        return "/"
    return found[0] if found[1] in _ESCAPES else "\\" + found[0]


def _python_calls(body: str) -> list[ast.Call]:
    """The calls that a few lines of Python make; Malformed where they do anything else."""
    try:
        # An unknown escape would make Python warn about code that is not ours.
        known = _ESCAPE.sub(_escape, body).replace("\0", "\\x00")
        statements = ast.parse(known).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None
    calls: list[ast.Call] = []
    for statement in statements:
        value = statement.value if isinstance(statement, ast.Expr) else None
        for each in value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]:
            call = each
            if _calls(call, "print") and isinstance(call, ast.Call) and len(call.args) == 1:
                call = call.args[0]
            if not isinstance(call, ast.Call):
                raise Malformed
            calls.append(call)
    return calls


def _calls(value: ast.expr | None, name: str) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == name


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
