"""Calls as JSON objects whose only key is the tool's name: `[{"get_weather": {"city": "Paris"}}]`."""

from __future__ import annotations

from collections.abc import Sequence

from perdure import Tool
from perdure.spi.chat import (
    SPACE,
    CallFormat,
    CallParser,
    CallText,
    JsonScanner,
    Malformed,
    decoded_string,
    marks_in,
)


class KeyedObjectsParser(CallParser):
    """A list of objects whose only key is the tool's name: `[{"name": {…}}, …]`."""

    def __init__(self) -> None:
        super().__init__()
        self._expected = "["
        self._value = JsonScanner()
        self._text: list[str] = []

    def finish(self) -> None:
        if self._expected in ("name", "arguments", ":", "}"):
            raise Malformed
        super().finish()

    def _read(self, text: str, at: int) -> int:
        if self._expected in ("name", "arguments"):
            return self._within(text, at)
        char = text[at]
        if char in SPACE:
            return at + 1
        if self._expected == "start" and char in '"{':
            self._expected = "name" if char == '"' else "arguments"
            self._value, self._text = JsonScanner(), []
            return at
        if self._expected == ", or ]" and char == "]":
            self.done, self.safe = True, self.position + 1
        elif self._expected == ", or ]" and char == ",":
            self._expected = "{"
        elif char == self._expected:
            self._expected = {"[": "{", "{": "key", ":": "value", "}": ", or ]"}[char]
            if char == "}":
                self._call_ended(1)
        else:
            raise Malformed
        if self._expected in ("key", "value"):
            self._start()
        return at + 1

    def _start(self) -> None:
        self._expected = "name" if self._expected == "key" else "arguments"
        self._value, self._text = JsonScanner(), []

    def _within(self, text: str, at: int) -> int:
        if not self._text and text[at] in SPACE:
            return at + 1
        if not self._text and text[at] != ('"' if self._expected == "name" else "{"):
            raise Malformed
        end = self._value.push(text, at)
        self._text.append(text[at:end])
        if self._expected == "arguments":
            self.events.append(("arguments", text[at:end]))
        if self._value.done:
            if self._expected == "name":
                self.events.append(("name", decoded_string(self._text)))
            self._expected = ":" if self._expected == "name" else "}"
        return end


class KeyedCalls(CallFormat):
    """Objects whose only key is the tool's name: `[{"get_weather": {"city": "Paris"}}, …]` between marks."""

    def __init__(self, writer: CallText) -> None:
        super().__init__(writer, openers=marks_in(writer.start), marks=marks_in(writer.end))

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        return KeyedObjectsParser()
