"""Harmony, gpt-oss's format: messages in channels, each with a header.

    <|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant
    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

(without the line break).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from perdure import Tool
from perdure.spi.chat import (
    LONGEST_HEADER,
    CallFormat,
    CallParser,
    CallText,
    Family,
    JsonScanner,
    Malformed,
    Markers,
)


class HarmonyCalls(CallFormat):
    """Harmony's messages to a function. Its channels also tell reasoning and answer apart."""

    def __init__(self, writer: CallText) -> None:
        openers, marks = ("<|channel|>", "<|start|>"), ("<|message|>", "<|constrain|>")
        super().__init__(writer, openers=openers, marks=marks, leads="t")

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        return HarmonyParser(opener, tools)


class HarmonyParser(CallParser):
    """A header up to `<|message|>` that says what follows, reasoning, text, or a call.

    `lead` is for a header that begins without its marker, since the prompt has already said it.
    """

    _MESSAGE = "<|message|>"
    _ENDS = ("<|end|>", "<|return|>", "<|call|>")
    _RECIPIENT = re.compile(r"\bto=(?!assistant\b)(functions\.)?([\w.-]+)")
    _CHANNEL = re.compile(r"(?:.*<\|channel\|>)?\s*(\w+)", re.DOTALL)

    def __init__(self, opener: str, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._names = frozenset(tool.name for tool in tools)
        self._lead = not opener
        self._started = opener == "<|start|>"
        self._header = ""
        self._arguments: JsonScanner | None = None

    def finish(self) -> None:
        if self._arguments is not None or not self.safe:
            raise Malformed

    def _read(self, text: str, at: int) -> int:
        if self._arguments is not None:
            end = self._read_arguments(self._arguments, text, at)
            self.done = self._arguments.done
            return end
        self._header += text[at]
        if self._lead and not "to=".startswith(self._header[:3]):
            raise Malformed
        if self._header.endswith(self._MESSAGE):
            self.safe = self.position + 1
            self._read_header(self._header.removesuffix(self._MESSAGE))
        elif len(self._header) > LONGEST_HEADER or self._header.endswith(self._ENDS):
            raise Malformed
        return at + 1

    def _read_header(self, header: str) -> None:
        recipient = self._RECIPIENT.search(header)
        if recipient is not None and (recipient[1] or recipient[2] in self._names):
            self.events.append(("name", recipient[2]))
            self._arguments = JsonScanner()
            return
        if recipient is not None:
            # To a tool of the makers' own, which is not there: no words for the user.
            self.events.append(("channel", "hidden"))
            self.done = True
            return
        channel = None
        if not self._started or "<|channel|>" in header:
            channel = self._CHANNEL.match(header)
        reasoning = channel is not None and channel[1] == "analysis"
        self.events.append(("channel", "reasoning" if reasoning else "text"))
        self.done = True


HARMONY = Family(
    "harmony",
    Markers(open="<|channel|>analysis<|message|>", close="<|end|>"),
    # A call ends the turn, so its end is not part of what is asked for.
    HarmonyCalls(
        CallText(
            head="<|channel|>commentary to=functions.",
            middle=" <|constrain|>json<|message|>",
            between="<|call|><|start|>assistant",
        )
    ),
    ends=("<|end|>", "<|return|>", "<|call|>"),
    restart="<|start|>assistant",
    answer_open="<|channel|>final<|message|>",
)
