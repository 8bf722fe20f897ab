"""Muse: messages with a recipient, the user, the model itself, or a tool; a tool gets its call in tags.

<|start|>assistant to=self<|message|>I need the weather.<|eom|>
<|start|>assistant to=get_weather<|message|><atem:function_calls>
<atem:invoke name="get_weather">
<atem:parameter name="city">Paris</atem:parameter>
</atem:invoke>
</atem:function_calls>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from perdure import Tool, ToolCall
from perdure.ext.families.tagged import TaggedCalls, TaggedParser, TaggedText
from perdure.spi.chat import (
    LONGEST_HEADER,
    CallFormat,
    CallParser,
    CallWriter,
    Family,
    Malformed,
    Markers,
    Rules,
)

ATEM = TaggedCalls(
    TaggedText(
        start="<atem:function_calls>\n",
        head='<atem:invoke name="',
        name_end='">\n',
        key_head='<atem:parameter name="',
        key_end='">',
        value_end="</atem:parameter>\n",
        tail="</atem:invoke>\n",
        end="</atem:function_calls>",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MuseText(CallWriter):
    """A message to each tool, with its call."""

    def call_text(self, call: ToolCall, number: int) -> str:
        return f" to={call.name}<|message|>{ATEM.writer.write([call])}"

    def call_rule(self, rules: Rules, tool: Tool, begun: str = "") -> str:
        start, end = rules.literal(ATEM.writer.start), rules.literal(ATEM.writer.end)
        head = f"{rules.words(' to=')} {rules.words(tool.name)} {rules.literal('<|message|>')}"
        return f"{head} {start} {ATEM.writer.call_rule(rules, tool)} {end}"


class MuseCalls(CallFormat):
    """` to=NAME<|message|>`, and for a tool its call in tags."""

    def __init__(self, writer: CallWriter) -> None:
        super().__init__(writer, openers=("<|start|>",), marks=("<|message|>",))

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
        match = self._HEADER.fullmatch(header)
        if match is None:
            raise Malformed
        if match["name"] in ("user", "self"):
            self.events.append(("channel", "text" if match["name"] == "user" else "reasoning"))
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


MUSE = Family(
    "muse",
    Markers(open="<|start|>assistant to=self<|message|>", close="<|eom|>"),
    MuseCalls(_MuseText(between="<|eom|><|start|>assistant")),
    ends=("<|eot|>", "<|eom|>"),
    prompt_opener="<|start|>assistant",
    restart="<|start|>assistant",
    answer_open=" to=user<|message|>",
)
