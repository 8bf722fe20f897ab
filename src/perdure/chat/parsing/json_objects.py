"""Calls as JSON objects with a name and arguments: `{"name": …, "arguments": {…}}`."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.chat.message import Tool
from perdure.chat.parsing.call_writer import CallFormat, CallParser, CallText, marks_in


class JsonCalls(CallFormat):
    """Objects such as `{"name": …, "arguments": {…}}`, behind a marker or, for known tools, without one.

    The opener is what the writer puts before the first object, the close what it puts behind the last.
    """

    def __init__(
        self,
        writer: CallText,
        *,
        openers: Sequence[str] = (),
        leads: str = "",
        opener_is_text: bool = False,
        known_only: bool = False,
    ) -> None:
        """`openers` are others that models write. With `opener_is_text`, plain text may hold the opener;
        with `known_only`, only known tools count behind it, too."""
        opener = (writer.start + writer.head).partition("{")[0].rstrip("[ \n")
        close = (writer.tail + writer.end).strip("]} \n")
        openers = openers or ((opener,) if opener else ())
        marks = marks_in(close)
        text_openers = openers if opener_is_text else ()
        super().__init__(writer, openers=openers, marks=marks, leads=leads, text_openers=text_openers)
        self._known_only = known_only
        self._closing = "" if marks else close

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        from perdure.chat.parsing.json_calls import JsonObjectsParser

        known = frozenset(tool.name for tool in tools) if not opener or self._known_only else None
        return JsonObjectsParser(known, closing=self._closing)


def json_object(
    *, start: str = "", head: str = "", tail: str = "", between: str = "", end: str = ""
) -> CallText:
    """Writes `{"name": …, "arguments": {…}}`, with texts around each object and around them all."""
    return CallText(
        start=start,
        head=head + '{"name": "',
        middle='", "arguments": ',
        tail="}" + tail,
        between=between,
        end=end,
    )


JSON = JsonCalls(json_object(between="\n"), leads="{[")
"""For models of no known format: a bare object of a known tool."""
