"""Messages with a recipient: to the user, to the model itself, or to a tool."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from perdure.chat.message import Tool, ToolCall
from perdure.chat.parsing.call_format import CallFormat
from perdure.chat.parsing.call_parser import LONGEST_HEADER, CallParser
from perdure.chat.parsing.call_writer import CallText, CallWriter, Rules
from perdure.chat.parsing.formats.tagged import ATEM, TaggedParser
from perdure.chat.parsing.json_scanner import JsonScanner, Malformed


@dataclass(frozen=True, slots=True, kw_only=True)
class _MuseText(CallWriter):
    """A message to each tool, with its call."""

    def call_text(self, call: ToolCall, number: int) -> str:
        return f" to={call.name}<|message|>{ATEM.writer.write([call])}"

    def call_rule(self, rules: Rules, tool: Tool) -> str:
        start, end = rules.literal(ATEM.writer.start), rules.literal(ATEM.writer.end)
        head = f"{rules.words(' to=')} {rules.words(tool.name)} {rules.literal('<|message|>')}"
        return f"{head} {start} {ATEM.writer.call_rule(rules, tool)} {end}"


_MUSE_TEXT = _MuseText(between="<|eom|><|start|>assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class MuseCalls(CallFormat):
    """Muse: ` to=NAME<|message|>`, and for a tool its call in tags."""

    openers: tuple[str, ...] = ("<|start|>",)
    leads: str = ""
    marks: tuple[str, ...] = ("<|message|>",)
    writer: CallWriter = _MUSE_TEXT
    opener_is_text: bool = False

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        return _MuseParser(tools)


class _MuseParser(CallParser):
    """A header with the recipient, and what is said to a tool."""

    _HEADER = re.compile(r"(?:assistant)?\s*to=(?P<name>[\w.*-]+)")
    _MESSAGE = "<|message|>"

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tools = tools
        self._header = ""
        self._body: TaggedParser | None = None
        self._before = ""
        self._offset = 0

    def finish(self) -> None:
        if self._body is not None:
            self._body.finish()
        super().finish()

    def _read(self, text: str, at: int) -> int:
        if self._body is not None:
            return self._read_body(text, at)
        self._header += text[at]
        words = self._header.strip()
        if not "assistant".startswith(words) and not "to=".startswith(
            words.removeprefix("assistant").lstrip()[:3]
        ):
            raise Malformed
        if len(self._header) > LONGEST_HEADER:
            raise Malformed
        if self._header.endswith(self._MESSAGE):
            self._act(self._header.removesuffix(self._MESSAGE))
        return at + 1

    def _act(self, header: str) -> None:
        found = self._HEADER.fullmatch(header)
        if found is None:
            raise Malformed
        if found["name"] in ("user", "self"):
            self.events.append(("channel", "text" if found["name"] == "user" else "reasoning"))
            self.safe, self.done = self.position + 1, True
        else:
            self._body = TaggedParser(ATEM, ATEM.openers[0], self._tools)
            self._body.events = self.events

    def _read_body(self, text: str, at: int) -> int:
        assert self._body is not None
        opener = ATEM.openers[0]
        if self._before != opener:
            if text[at].isspace() and not self._before:
                return at + 1
            self._before += text[at]
            if not opener.startswith(self._before):
                raise Malformed
            self._offset = self.position + 1
            return at + 1
        start = self._body.position
        try:
            self._body.push(text[at:])
        finally:
            self.safe = self._offset + self._body.safe if self._body.safe else 0
            self.done = self._body.done
        return at + self._body.position - start


_FUNCTIONARY_TEXT = CallText(head="", middle="\n", between="\n>>>")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionaryCalls(CallFormat):
    """Functionary 3.2: `>>>NAME`, a line break, and the arguments; `all` is the user. The prompt ends with
    the first `>>>`."""

    openers: tuple[str, ...] = (">>>",)
    leads: str = ""
    marks: tuple[str, ...] = ()
    writer: CallWriter = _FUNCTIONARY_TEXT
    opener_is_text: bool = True

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        return _FunctionaryParser(tools)


class _FunctionaryParser(CallParser):
    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._names = frozenset(tool.name for tool in tools)
        self._header = ""
        self._arguments: JsonScanner | None = None

    def finish(self) -> None:
        if self._arguments is not None and not self.safe:
            raise Malformed
        super().finish()

    def _read(self, text: str, at: int) -> int:
        if self._arguments is not None:
            end = self._read_arguments(self._arguments, text, at)
            self.done = self._arguments.done
            return end
        if text[at] != "\n":
            self._header += text[at]
            if not any(name.startswith(self._header) for name in ("all", *self._names)):
                raise Malformed
            return at + 1
        if self._header == "all":
            self.events.append(("channel", "text"))
            self.safe, self.done = self.position + 1, True
        elif self._header in self._names:
            self.events.append(("name", self._header))
            self._arguments = JsonScanner()
        else:
            raise Malformed
        return at + 1


MUSE = MuseCalls()
FUNCTIONARY = FunctionaryCalls()
