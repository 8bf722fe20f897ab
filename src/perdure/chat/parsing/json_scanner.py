"""JSON as it comes: where a value ends, and whether it still is one.

Kept by hand: a reply arrives a few characters at a time, and `json` reads only whole texts, so that finding
the end of a value with it costs the square of its length; parsers of streams do not say where a value ended.
"""

from __future__ import annotations

import re

from perdure.chat.parsing import Malformed

_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_ATOM = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_ATOM_CHARS = frozenset("+-.0123456789Eaeflnrstu")
_LONGEST_ATOM = 400
_DEEPEST = 200
_SPACE = frozenset(" \t\n\r")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')


class JsonScanner:
    """One JSON value, read in pieces. The first character that cannot belong to it raises Malformed.

    The work for a character does not depend on the value so far.
    """

    def __init__(self) -> None:
        self.done = False
        self._stack: list[str] = []
        self._state = "value"
        self._atom = ""
        self._hex = 0
        self._is_key = False

    def push(self, text: str, at: int = 0) -> int:
        """Read `text` from `at`; where the value ended in it, or its length if more must come."""
        size = len(text)
        while at < size and not self.done:
            if self._state == "string" and (run := _RUN.match(text, at)):
                at = run.end()
                continue
            char = text[at]
            if self._state == "atom" and char not in _ATOM_CHARS:
                self._end_atom()
                continue
            self._take(char)
            at += 1
        return at

    def end(self) -> None:
        """Nothing more will come: a number at the top is complete only now."""
        if self._state == "atom" and not self._stack:
            self._end_atom()
        if not self.done:
            raise Malformed

    def _take(self, char: str) -> None:
        state = self._state
        if state == "string":
            self._in_string(char)
        elif state == "escape":
            if char == "u":
                self._state, self._hex = "hex", 4
            elif char in _ESCAPES:
                self._state = "string"
            else:
                raise Malformed
        elif state == "hex":
            if char not in _HEX:
                raise Malformed
            self._hex -= 1
            if not self._hex:
                self._state = "string"
        elif state == "atom":
            self._atom += char
            if len(self._atom) > _LONGEST_ATOM:
                raise Malformed
        elif char not in _SPACE:
            self._structure(state, char)

    def _in_string(self, char: str) -> None:
        if char == "\\":
            self._state = "escape"
        elif char != '"':
            raise Malformed
        elif self._is_key:
            self._state, self._is_key = "colon", False
        else:
            self._value_ended()

    def _structure(self, state: str, char: str) -> None:
        if state == "next":
            self._after_value(char)
        elif state == "colon":
            if char != ":":
                raise Malformed
            self._state = "value"
        elif state in ("key", "first key"):
            if char == '"':
                self._state, self._is_key = "string", True
            elif char == "}" and state == "first key":
                self._close()
            else:
                raise Malformed
        elif char == "]" and state == "first value":
            self._close()
        else:
            self._start_value(char)

    def _start_value(self, char: str) -> None:
        if char in "{[":
            if len(self._stack) == _DEEPEST:
                raise Malformed
            self._stack.append(char)
            self._state = "first key" if char == "{" else "first value"
        elif char == '"':
            self._state = "string"
        elif char in "-0123456789tfn":
            self._state, self._atom = "atom", char
        else:
            raise Malformed

    def _after_value(self, char: str) -> None:
        inside = self._stack[-1]
        if char == ",":
            self._state = "key" if inside == "{" else "value"
        elif char == ("}" if inside == "{" else "]"):
            self._close()
        else:
            raise Malformed

    def _close(self) -> None:
        self._stack.pop()
        self._value_ended()

    def _end_atom(self) -> None:
        if not _ATOM.fullmatch(self._atom):
            raise Malformed
        self._value_ended()

    def _value_ended(self) -> None:
        self._state = "next"
        self.done = not self._stack
