"""The parser of calls that are JSON objects: their names, ids and arguments, as they come."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from perdure.chat.parsing import Malformed
from perdure.chat.parsing.call_writer import SPACE, CallParser, Event
from perdure.chat.parsing.json_scanner import JsonScanner

_NAME_KEYS = frozenset(("name", "tool_name"))
_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_ID_KEYS = frozenset(("id", "tool_call_id"))
_READ_KEYS = _NAME_KEYS | _ARGUMENT_KEYS | _ID_KEYS
_ROLES = {
    **dict.fromkeys(_NAME_KEYS, "name"),
    **dict.fromkeys(_ARGUMENT_KEYS, "arguments"),
    **{key: key for key in ("type", "id", "tool_call_id")},
}


class JsonObjectsParser(CallParser):
    """JSON objects with a name and arguments: one, several, or a list of them.

    With `names`, only calls of these count, and nothing but a call may stand in an object: for formats
    that do not mark their calls. `id_last` says that an object's id stands behind its arguments, so that
    these have to wait for it.
    """

    def __init__(
        self, names: Collection[str] | None = None, *, id_last: bool = False, closing: str = ""
    ) -> None:
        super().__init__()
        self._names = names
        self._id_last = id_last
        self._closing = closing
        self._matched = ""
        self._object: _CallObject | None = None
        self._is_listed = False
        self._closed = False

    def finish(self) -> None:
        if self._object is not None:
            raise Malformed
        super().finish()

    def _read(self, text: str, at: int) -> int:
        if self._object is not None:
            end = self._object.push(text, at, self.events)
            if self._object.done:
                self._object = None
                self._call_ended(end - at)
            return end
        char = text[at]
        if self._matched or (self._is_listed and self.safe and self._closed):
            return self._read_closing(char, at)
        if char == "{":
            self._object = _CallObject(self._names, self._id_last)
            return at
        if char == "[" and not self._is_listed and not self.safe:
            self._is_listed = True
        elif char == "]" and self._is_listed and self.safe:
            self.safe = self.position + 1
            self._closed, self.done = True, not self._closing
        elif char not in SPACE and not (char in ",;" and self.safe):
            if self._is_listed or not self.safe:
                raise Malformed
            self.done = True
        return at + 1

    def _read_closing(self, char: str, at: int) -> int:
        if not self._matched and char in SPACE:
            return at + 1
        self._matched += char
        self.done = not self._closing.startswith(self._matched) or self._matched == self._closing
        if self._matched == self._closing:
            self.safe = self.position + 1
        return at + 1


class _CallObject:
    """One object. Its arguments are passed on as they come, once the name is known."""

    def __init__(self, names: Collection[str] | None, id_last: bool) -> None:
        self.done = False
        self._names = names
        self._id = ""
        self._waits = id_last
        self._expected = "open"
        self._value = JsonScanner()
        self._text: list[str] = []
        self._key = ""
        self._name: str | None = None
        self._begun = False
        self._streams = False
        self._held: list[str] = []
        """The arguments so far, where the name is yet to come."""
        self._seen: set[str] = set()

    def push(self, text: str, at: int, events: list[Event]) -> int:
        while at < len(text) and not self.done:
            if self._expected in ("in key", "in value"):
                at = self._within(text, at, events)
                continue
            char = text[at]
            if char in SPACE:
                at += 1
            elif self._expected == "value" or (self._expected in ("key", "first key") and char == '"'):
                self._start(char)
            else:
                self._punctuation(char, events)
                at += 1
        return at

    def _start(self, char: str) -> None:
        if self._expected == "value":
            if self._key in _NAME_KEYS and char != '"':
                raise Malformed
            self._streams = self._key in _ARGUMENT_KEYS and char == "{"
            if self._key in _ARGUMENT_KEYS and not self._streams and char != '"':
                raise Malformed
            self._expected = "in value"
        else:
            self._streams = False
            self._expected = "in key"
        self._value, self._text = JsonScanner(), []

    def _within(self, text: str, at: int, events: list[Event]) -> int:
        end = self._value.push(text, at)
        if self._streams:
            self._add_arguments(text[at:end], events)
        elif self._expected == "in key" or self._key in _READ_KEYS:
            self._text.append(text[at:end])
        if self._value.done:
            self._complete(events)
        return end

    def _complete(self, events: list[Event]) -> None:
        if self._expected == "in key":
            self._key = decoded_string(self._text)
            role = _ROLES.get(self._key)
            if role in self._seen or (role is None and self._names is not None):
                raise Malformed
            if role is not None:
                self._seen.add(role)
            self._expected = "colon"
            return
        if self._key in _NAME_KEYS:
            self._name = decoded_string(self._text)
            if not self._name or (self._names is not None and self._name not in self._names):
                raise Malformed
            if self._held and not self._waits:
                self._add_arguments("".join(self._held), events)
        elif self._key in _ARGUMENT_KEYS and not self._streams:
            # Some models write the arguments' JSON as a string.
            inner, value = decoded_string(self._text), JsonScanner()
            if (
                not inner.lstrip().startswith("{")
                or value.push(inner) != len(inner.rstrip())
                or not value.done
            ):
                raise Malformed
            self._add_arguments(inner, events)
        elif self._key in _ID_KEYS and self._text and self._text[0].startswith('"'):
            self._id = decoded_string(self._text)
        self._expected = "next"

    def _punctuation(self, char: str, events: list[Event]) -> None:
        expected = self._expected
        if expected == "open":
            self._expected = "first key"
        elif expected == "colon" and char == ":":
            self._expected = "value"
        elif expected == "next" and char == ",":
            self._expected = "key"
        elif expected == "next" and char == "}" and self._name is not None:
            if "arguments" not in self._seen:
                if self._names is not None:
                    raise Malformed
                self._add_arguments("{}", events)
            if self._waits:
                self._waits = False
                self._add_arguments("".join(self._held), events)
            self.done = True
        else:
            raise Malformed

    def _add_arguments(self, text: str, events: list[Event]) -> None:
        if self._name is None or self._waits:
            self._held.append(text)
            return
        if not self._begun:
            if self._id:
                events.append(("id", self._id))
            events.append(("name", self._name))
            self._begun = True
        events.append(("arguments", text))


def decoded_string(text: Sequence[str]) -> str:
    """The string that a piece of JSON holds."""
    value = json.loads("".join(text))
    assert isinstance(value, str)
    try:
        value.encode()
    except UnicodeEncodeError:
        # Half a surrogate pair is no text: nobody could store it or send it on.
        raise Malformed from None
    return value
