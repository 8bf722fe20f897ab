"""Tool-call parsers: what reads a stretch of a reply that may hold tool calls."""

from __future__ import annotations

from typing import Literal

from perdure.chat.parsing.json_scanner import JsonScanner, Malformed

Event = tuple[Literal["id", "name", "arguments", "end", "channel"], str]
"""A call's id, where the model gave it one, its name, more of its arguments, its end; or what the text that
follows is: text, reasoning, or hidden."""

SPACE = frozenset(" \t\n\r")
LONGEST_HEADER = 256


class CallParser:
    """Reads a stretch in pieces. Everything behind `safe` is not its own, once it is done or malformed.

    `events` grows as calls are recognised; whoever drives the parser takes them out of it.
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

    def _read_arguments(self, scanner: JsonScanner, text: str, at: int) -> int:
        """Read more of a call's arguments in JSON; where they end, the call does."""
        end = scanner.push(text, at)
        self.events.append(("arguments", text[at:end]))
        if scanner.done:
            self._call_ended(end - at)
        return end

    def _call_ended(self, ahead: int) -> None:
        """A call is whole, `ahead` characters behind the position."""
        self.events.append(("end", ""))
        self.safe = self.position + ahead
