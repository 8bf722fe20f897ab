"""Arguments of Python calls as they come: where one ends, and its value as JSON."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from perdure.chat.parsing.json_scanner import BoundedText, Malformed

_LONGEST = 100_000
_RUN = re.compile(r"[^\"'\\\n]+")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = frozenset("\n\\'\"abfnrtvxuUN01234567")
_STRING = re.compile(r"""('''|\"\"\"|'|")(?:\\.|(?!\1).)*\1""", re.DOTALL)
_KEY = re.compile(r"(?P<key>[^\s=\"'()\[\]{}\\]+)\s*=(?!=)")
"""What tools call their arguments is not always a name in Python: `from`, `max-size`."""
_WORDS = {"true": True, "false": False, "null": None}


class ArgumentScanner:
    """The text of one argument, up to a comma or a bracket outside of strings and brackets of its own."""

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
            known = _STRING.sub(lambda found: found[0].replace("\r", "\\r"), known)
        named = _KEY.match(known)
        call = ast.parse(f"_({known[named.end() if named else 0 :]}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
            raise Malformed
        value = json.dumps(_value(call.args[0]), ensure_ascii=False, allow_nan=False)
        return named["key"] if named else None, value
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
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


def _escape(found: re.Match[str]) -> str:
    """JSON's escapes as Python has them; one that neither knows stands for itself."""
    if found[1] == "/":
        return "/"
    return found[0] if found[1] in _ESCAPES else "\\" + found[0]
