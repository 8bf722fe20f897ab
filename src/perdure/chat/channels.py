"""Harmony: messages in channels, each with a header."""

from __future__ import annotations

import re

from perdure.chat.json_text import JsonText, Malformed
from perdure.chat.region import LONGEST_HEADER, Region


class Channels(Region):
    """A header up to `<|message|>` that says what follows, reasoning, text, or a call.

    `lead` is for a header that begins without its marker, since the prompt has already said it.
    """

    _MESSAGE = "<|message|>"
    _ENDS = ("<|end|>", "<|return|>", "<|call|>")
    _RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
    _CHANNEL = re.compile(r"(?:.*<\|channel\|>)?\s*(\w+)", re.DOTALL)

    def __init__(self, opener: str) -> None:
        super().__init__()
        self._lead = not opener
        self._started = opener == "<|start|>"
        self._header = ""
        self._arguments: JsonText | None = None

    def finish(self) -> None:
        if self._arguments is not None or not self.safe:
            raise Malformed

    def _read(self, text: str, at: int) -> int:
        if self._arguments is not None:
            end = self._arguments.push(text, at)
            self.events.append(("arguments", text[at:end]))
            if self._arguments.done:
                self._call_ended(end - at)
                self.done = True
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
        if recipient is not None:
            self.events.append(("name", recipient[1]))
            self._arguments = JsonText()
            return
        channel = None
        if not self._started or "<|channel|>" in header:
            channel = self._CHANNEL.match(header)
        reasoning = channel is not None and channel[1] == "analysis"
        self.events.append(("turn", "reasoning" if reasoning else "text"))
        self.done = True
