"""Calls as Python: `[name(key="value"), …]` between marks, or lines of a fenced block."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from perdure import Tool, ToolCall
from perdure.ext.families.argument_types import (
    kinds_of,
    members_rule,
    no_json,
    properties_of,
    resolved,
    within,
)
from perdure.ext.families.bounded_text import BoundedText
from perdure.spi.chat import (
    LONGEST_HEADER,
    SPACE,
    CallFormat,
    CallParser,
    CallWriter,
    JsonObjectsParser,
    Malformed,
    Rules,
    marks_in,
)

_NAME = re.compile(r"[^\W\d][\w.:/-]*\s*")
_SINGLE = re.compile(r"[^'\\\n]*")
_BOUNDING = frozenset(
    ("enum", "const", "pattern", "format", "minLength", "maxLength", "anyOf", "oneOf", "allOf")
)
"""What a schema says of a string that single quotes do not see to."""
_LONGEST = 100_000
_RUN = re.compile(r"[^\"'\\\n]+")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = frozenset("\n\\'\"abfnrtvxuUN01234567")
_STRING = re.compile(r"""('''|\"\"\"|'|")(?:\\.|(?!\1).)*\1""", re.DOTALL)
_ARGUMENT_KEY = re.compile(r"(?P<key>[^\s=\"'()\[\]{}\\]+)\s*=(?!=)")
"""What tools call their arguments is not always a name in Python: `from`, `max-size`."""
_WORDS = {"true": True, "false": False, "null": None}


class PythonCalls(CallFormat):
    """A list of Python calls between marks, or, of known tools, without them. The marks are the writer's,
    or `opener` and `close`."""

    def __init__(self, writer: PythonText, *, opener: str = "", close: str = "", leads: str = "") -> None:
        self._close = close or marks_in(writer.end)[0]
        openers = (opener,) if opener else marks_in(writer.start)
        super().__init__(writer, openers=openers, marks=(self._close,), leads=leads)

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        return PythonParser(tools, self._close) if opener else PythonParser(tools, "]", known_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonText(CallWriter):
    """A call with keywords, whose values are JSON: Python's own words for them are read, too."""

    holds_all: ClassVar[bool] = True

    def call_text(self, call: ToolCall, number: int) -> str:
        written = (f"{key}={self.value_text(value)}" for key, value in call.parsed.items())
        return f"{call.name}({', '.join(written)})"

    def call_rule(self, rules: Rules, tool: Tool, begun: str = "") -> str:
        schema, required = tool.parameters, tool.parameters.get("required") or ()
        members = [
            (rules.rule(f"{rules.words(f'{key}=')} {self.value_rule(rules, each, schema)}"), key in required)
            for key, each in properties_of(schema).items()
        ]
        arguments = members_rule(rules, members, ", ")
        return f"{rules.words(tool.name + '(')} {arguments} {rules.words(')')}"

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
        if kinds == {"boolean"} and not _BOUNDING & meant.keys():
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


# One argument.


class ArgumentScanner:
    """The text of one argument, up to a comma or a bracket outside of its strings and brackets."""

    def __init__(self, close: str) -> None:
        self.ended_by = ""
        self._close = close
        self._text = BoundedText(_LONGEST)
        self._tail = ""
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._quotes = 0
        """How many quotes stand here in a row: three open a string of several lines, and close it."""

    @property
    def in_string(self) -> bool:
        return bool(self._quote)

    @property
    def text(self) -> str:
        return str(self._text).strip()

    def push(self, text: str, at: int) -> int:
        run = _RUN.match(text, at) if self._quote and not self._escaped else None
        if run is not None:
            self._quotes = 0
            self._text.add(run[0])
            return run.end()
        char = text[at]
        if self._quote:
            self._in_string(char)
        elif char in "\"'":
            # Two quotes were an empty string, unless a third follows.
            self._quote = char * 3 if self._quotes == 2 and self._text.last == char else char
            self._quotes = 0 if len(self._quote) == 3 else 1
            self._tail = ""
        elif char in ",)" and not self._depth:
            self.ended_by = char
            return at + 1
        else:
            self._quotes = 0
            self._depth += (char in "([{") - (char in ")]}")
            self._tail = (self._tail + char)[-len(self._close) :]
            if self._depth < 0 or self._tail == self._close != "]":
                raise Malformed
        self._text.add(char)
        return at + 1

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped, self._quotes = False, 0
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote, self._quotes = "", self._quotes + 1
        elif char == self._quote[0]:
            self._quotes += 1
            if self._quotes == 3:
                self._quote, self._quotes = "", 0
        elif char == "\n" and len(self._quote) == 1:
            raise Malformed
        else:
            self._quotes = 0


def argument(written: str) -> tuple[str | None, str]:
    """An argument's name, if it has one, and its value as JSON."""
    try:
        # An unknown escape would make Python warn about code that is not ours.
        known = _ESCAPE.sub(_escape, written).replace("\0", "\\x00")
        if "\r" in known:
            # Python would take it for the end of a line.
            known = _STRING.sub(lambda match: match[0].replace("\r", "\\r"), known)
        named = _ARGUMENT_KEY.match(known)
        call = ast.parse(f"_({known[named.end() if named else 0 :]}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
            raise Malformed
        return named["key"] if named else None, _as_json(known[named.end() if named else 0 :], call.args[0])
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


def _as_json(written: str, node: ast.expr) -> str:
    value = _value(node)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        # A number that no float holds is JSON all the same.
        json.loads(written, parse_constant=no_json)
        return written.strip()


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


def _escape(match: re.Match[str]) -> str:
    """JSON's escapes as Python has them; one that neither knows stands for itself."""
    if match[1] == "/":
        return "/"
    return match[0] if match[1] in _ESCAPES else "\\" + match[0]
