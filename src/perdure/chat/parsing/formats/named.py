"""Calls as a name and a JSON object behind it, between marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perdure.chat.message import Tool
from perdure.chat.parsing.call_format import CallFormat
from perdure.chat.parsing.call_parser import LONGEST_HEADER, SPACE, CallParser
from perdure.chat.parsing.call_writer import ID, CallText, CallWriter
from perdure.chat.parsing.formats.json_objects import JsonObjectsParser
from perdure.chat.parsing.json_scanner import JsonScanner, Malformed


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls(CallFormat):
    """A name, then the arguments, behind a marker; or a list of objects, as older models write it."""

    writer: CallWriter
    header: re.Pattern[str]
    openers: tuple[str, ...]
    leads: str = ""
    marks: tuple[str, ...] = ()
    opener_is_text: bool = False
    after: str = ""
    """What may stand behind the arguments."""

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        def choose(first: str) -> CallParser:
            if first in "[{":
                return JsonObjectsParser(id_last=True)
            return NamedCallParser(self.header, self.after)

        return ChosenParser(choose)


class NamedCallParser(CallParser):
    """A name in a few words, then the arguments as a JSON object.

    `header` matches all that stands before the arguments, with the group `name`; `tail` is what may stand
    behind them.
    """

    def __init__(self, header: re.Pattern[str], tail: str = "") -> None:
        super().__init__()
        self._pattern = header
        self._tail = tail
        self._header = ""
        self._arguments: JsonScanner | None = None
        self._matched = 0

    def _read(self, text: str, at: int) -> int:
        if self.safe:
            return self._read_tail(text, at)
        if self._arguments is None:
            return self._read_header(text, at)
        end = self._read_arguments(self._arguments, text, at)
        self.done = self._arguments.done and not self._tail
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
        if (written := found.groupdict().get("id")) is not None:
            self.events.append(("id", written))
        self.events.append(("name", found["name"]))
        self._arguments = JsonScanner()
        return at

    def _read_tail(self, text: str, at: int) -> int:
        if not self._matched and text[at] in SPACE:
            return at + 1
        if text[at] != self._tail[self._matched]:
            self.done = True
            return at
        self._matched += 1
        if self._matched == len(self._tail):
            self.safe = self.position + 1
            self.done = True
        return at + 1


class ChosenParser(CallParser):
    """The parser that the first character which is no white space decides on."""

    def __init__(self, choose: Callable[[str], CallParser]) -> None:
        super().__init__()
        self._choose = choose
        self._chosen: CallParser | None = None
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


MISTRAL = NamedCalls(
    openers=("[TOOL_CALLS]",),
    header=re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>[\w-]+))?(?:\[ARGS\])?\s*"),
    writer=CallText(
        start="[TOOL_CALLS][", head='{"name": "', middle='", "arguments": ', tail="}", between=", ", end="]"
    ),
)
"""Mistral: a list of objects; newer models write a name and its arguments."""

MISTRAL_NAMED = NamedCalls(
    openers=MISTRAL.openers,
    marks=("[ARGS]", "[CALL_ID]"),
    header=MISTRAL.header,
    writer=CallText(head="[TOOL_CALLS]", middle="[ARGS]"),
)

DEEPSEEK = NamedCalls(
    openers=("<｜tool▁call▁begin｜>",),
    marks=(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    header=re.compile(
        r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*"
    ),
    after="```",
    writer=CallText(
        start="<｜tool▁calls▁begin｜>",
        head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        tail="\n```<｜tool▁call▁end｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
)
"""DeepSeek: a name and its arguments between marks, in a fence (R1, V3) or without (V3.1)."""

KIMI = NamedCalls(
    openers=("<|tool_call_begin|>",),
    marks=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    ),
    header=re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*"
    ),
    writer=CallText(
        start="<|tool_calls_section_begin|>",
        head="<|tool_call_begin|>functions.",
        middle=":0<|tool_call_argument_begin|>",
        tail="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
    ),
)
"""Kimi K2: sections of calls with ids, which hold the names."""

FUNCTIONARY_TAGGED = NamedCalls(
    openers=("<function=",),
    marks=("</function>",),
    header=re.compile(r"(?P<name>[\w.-]+)>\s*"),
    after="</function>",
    writer=CallText(head="<function=", middle=">", tail="</function>"),
    opener_is_text=True,
)
"""Functionary 3.1: the name in a tag, the arguments as JSON."""

SOLAR = NamedCalls(
    openers=("<|tool_call:begin|>",),
    marks=("<|tool_calls|>", "<|tool_call:end|>", "<|tool_call:name|>", "<|tool_call:args|>"),
    header=re.compile(
        r"(?P<id>[\w-]*)<\|tool_call:name\|>(?P<name>[\w.-]+)<\|tool_call:args\|>\s*",
    ),
    writer=CallText(
        start="<|tool_calls|>",
        head=f"<|tool_call:begin|>{ID}<|tool_call:name|>",
        middle="<|tool_call:args|>",
        tail="<|tool_call:end|>",
        id_pattern="[a-z0-9]{10}",
    ),
)
"""Solar: calls with ids, which the template asks for as ten small letters or digits."""
