"""Stretches of a reply that may hold tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from perdure.chat.json_text import JsonText, Malformed

Event = tuple[Literal["name", "arguments", "end", "turn"], str]
"""A call's name, more of its arguments, its end; or what the text that follows is: text or reasoning."""

SPACE = frozenset(" \t\n\r")
LONGEST_HEADER = 256


class Region:
    """Reads a stretch in pieces. Everything behind `safe` is not its own, once it is done or malformed.

    `events` grows as calls are recognised; whoever drives the region takes them out of it.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.position = 0
        self.safe = 0
        self.done = False

    def push(self, text: str) -> None:
        at, start = 0, self.position
        while at < len(text) and not self.done:
            at = self._read(text, at)
            self.position = start + at

    def finish(self) -> None:
        """Nothing more will come."""
        if not self.safe:
            raise Malformed

    def _read(self, text: str, at: int) -> int:
        """Read something of `text` from `at` on; where that ended."""
        raise NotImplementedError

    def _call_ended(self, ahead: int) -> None:
        """A call is whole, `ahead` characters behind the position."""
        self.events.append(("end", ""))
        self.safe = self.position + ahead


class Header(Region):
    """A name in a few words, then the arguments as a JSON object.

    `header` matches all that stands before the arguments, with the group `name`; `tail` is what may stand
    behind them.
    """

    def __init__(self, header: re.Pattern[str], tail: str = "") -> None:
        super().__init__()
        self._pattern = header
        self._tail = tail
        self._header = ""
        self._arguments: JsonText | None = None
        self._matched = 0

    def _read(self, text: str, at: int) -> int:
        if self.safe:
            return self._read_tail(text, at)
        if self._arguments is None:
            return self._read_header(text, at)
        end = self._arguments.push(text, at)
        self.events.append(("arguments", text[at:end]))
        if self._arguments.done:
            self._call_ended(end - at)
            self.done = not self._tail
        return end

    def _read_header(self, text: str, at: int) -> int:
        if text[at] != "{":
            self._header += text[at]
            if len(self._header) > LONGEST_HEADER:
                raise Malformed
            return at + 1
        found = self._pattern.fullmatch(self._header)
        if found is None:
            raise Malformed
        self.events.append(("name", found["name"]))
        self._arguments = JsonText()
        return at

    def _read_tail(self, text: str, at: int) -> int:
        if text[at] != self._tail[self._matched]:
            self.done = True
            return at
        self._matched += 1
        if self._matched == len(self._tail):
            self.safe = self.position + 1
            self.done = True
        return at + 1


class ByFirst(Region):
    """The region that the first character which is no white space decides on."""

    def __init__(self, choose: Callable[[str], Region]) -> None:
        super().__init__()
        self._choose = choose
        self._chosen: Region | None = None
        self._before = 0

    def finish(self) -> None:
        if self._chosen is None:
            raise Malformed
        self._chosen.finish()
        self._follow()

    def _read(self, text: str, at: int) -> int:
        if self._chosen is None:
            if text[at] in SPACE:
                return at + 1
            self._chosen, self._before = self._choose(text[at]), self.position
            self._chosen.events = self.events
        start = self._chosen.position
        try:
            self._chosen.push(text[at:])
        finally:
            self._follow()
        return at + self._chosen.position - start

    def _follow(self) -> None:
        assert self._chosen is not None
        self.safe = self._before + self._chosen.safe if self._chosen.safe else 0
        self.done = self._chosen.done
