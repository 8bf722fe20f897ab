"""Calls as JSON objects with a name and arguments: `{"name": …, "arguments": {…}}`."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from perdure.chat.message import Tool
from perdure.chat.parsing.call_format import CallFormat, CallText
from perdure.chat.parsing.call_parser import SPACE, CallParser, Event
from perdure.chat.parsing.json_scanner import JsonScanner, Malformed

_NAME_KEYS = frozenset(("name", "tool_name"))
_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_ROLES = {
    **dict.fromkeys(_NAME_KEYS, "name"),
    **dict.fromkeys(_ARGUMENT_KEYS, "arguments"),
    **{key: key for key in ("type", "id", "tool_call_id")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls(CallFormat):
    """Objects such as `{"name": …, "arguments": {…}}`, behind a marker or, for known tools, without one."""

    shape: CallText
    openers: tuple[str, ...] = ()
    leads: str = ""
    marks: tuple[str, ...] = ()
    opener_is_text: bool = False

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        return JsonObjectsParser(None if opener else frozenset(tool.name for tool in tools))


class JsonObjectsParser(CallParser):
    """JSON objects with a name and arguments: one, several, or a list of them.

    With `names`, only calls of these count, and nothing but a call may stand in an object: for formats
    that do not mark their calls.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        super().__init__()
        self._names = names
        self._object: _CallObject | None = None
        self._listed = False

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
        if char == "{":
            self._object = _CallObject(self._names)
            return at
        if char == "[" and not self._listed and not self.safe:
            self._listed = True
        elif char == "]" and self._listed and self.safe:
            self.done = True
            self.safe = self.position + 1
        elif char not in SPACE and not (char in ",;" and self.safe):
            if self._listed or not self.safe:
                raise Malformed
            self.done = True
        return at + 1


class _CallObject:
    """One object. Its arguments are passed on as they come, once the name is known."""

    def __init__(self, names: Collection[str] | None) -> None:
        self.done = False
        self._names = names
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
        elif self._expected == "in key" or self._key in _NAME_KEYS or self._key in _ARGUMENT_KEYS:
            self._text.append(text[at:end])
        if self._value.done:
            self._complete(events)
        return end

    def _complete(self, events: list[Event]) -> None:
        if self._expected == "in key":
            self._key = _decoded(self._text)
            role = _ROLES.get(self._key)
            if role in self._seen or (role is None and self._names is not None):
                raise Malformed
            if role is not None:
                self._seen.add(role)
            self._expected = "colon"
            return
        if self._key in _NAME_KEYS:
            self._name = _decoded(self._text)
            if not self._name or (self._names is not None and self._name not in self._names):
                raise Malformed
            if self._held:
                self._add_arguments("".join(self._held), events)
        elif self._key in _ARGUMENT_KEYS and not self._streams:
            # Some models write the arguments' JSON as a string.
            inner, value = _decoded(self._text), JsonScanner()
            if (
                not inner.lstrip().startswith("{")
                or value.push(inner) != len(inner.rstrip())
                or not value.done
            ):
                raise Malformed
            self._add_arguments(inner, events)
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
            self.done = True
        else:
            raise Malformed

    def _add_arguments(self, text: str, events: list[Event]) -> None:
        if self._name is None:
            self._held.append(text)
            return
        if not self._begun:
            events.append(("name", self._name))
            self._begun = True
        events.append(("arguments", text))


def _decoded(text: Sequence[str]) -> str:
    joined = "".join(text)
    value = json.loads(joined)
    assert isinstance(value, str)
    return value


_CHATML_MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

HERMES = JsonCalls(
    openers=("<tool_call>",),
    marks=("</tool_call>", *_CHATML_MARKS),
    shape=CallText(
        head='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        tail="}\n</tool_call>",
        between="\n",
    ),
)
"""Hermes, Qwen, SmolLM3 and many others: an object between tags."""

LLAMA = JsonCalls(
    openers=("<|python_tag|>",),
    leads="{",
    marks=("<|eom_id|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"),
    shape=CallText(head='{"name": "', middle='", "parameters": ', tail="}", between="; "),
)
"""Llama 3: an object, bare or behind a tag."""

GRANITE = JsonCalls(
    openers=("<|tool_call|>",),
    marks=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    shape=CallText(
        start="<|tool_call|>[", head='{"name": "', middle='", "arguments": ', tail="}", between=", ", end="]"
    ),
)

PHI = JsonCalls(
    openers=("<|tool_call|>",),
    marks=("<|/tool_call|>", "<|end|>", "<|endoftext|>"),
    shape=CallText(
        start="<|tool_call|>[",
        head='{"name": "',
        middle='", "arguments": ',
        tail="}",
        between=", ",
        end="]<|/tool_call|>",
    ),
)

COMMAND = JsonCalls(
    openers=("<|START_ACTION|>",),
    marks=(
        "<|END_ACTION|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    shape=CallText(
        start="<|START_ACTION|>[\n    ",
        head='{"tool_call_id": "0", "tool_name": "',
        middle='", "parameters": ',
        tail="}",
        between=",\n    ",
        end="\n]<|END_ACTION|>",
    ),
)

JSON = JsonCalls(
    leads="{[",
    shape=CallText(head='{"name": "', middle='", "arguments": ', tail="}", between="\n"),
)
"""For models of no known format: a bare object of a known tool."""

CHATML_JSON = JsonCalls(leads="{[", marks=_CHATML_MARKS, shape=JSON.shape)
