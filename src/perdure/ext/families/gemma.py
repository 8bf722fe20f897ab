"""Gemma 1 to 3, which have no format of their own. Two that their makers suggest are read: Python in a fence

    ```tool_code
    get_weather(city="Paris")
    ```

and a bare JSON object of a known tool, which is what a forced call is written as:

    {"name": "get_weather", "parameters": {"city": "Paris"}}
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure import Tool
from perdure.ext.families.python_calls import PythonParser
from perdure.spi.chat import CallFormat, CallParser, CallText, Family, JsonObjectsParser

_FENCE = "```tool_code\n"


class FencedCalls(CallFormat):
    """A fenced block of Python calls or JSON, or a bare object."""

    def __init__(self, writer: CallText) -> None:
        super().__init__(writer, openers=(_FENCE,), leads="{[", text_openers=(_FENCE,))

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        return PythonParser(tools, "```") if opener else JsonObjectsParser(frozenset(t.name for t in tools))


GEMMA = Family(
    "gemma",
    None,
    FencedCalls(CallText(head='{"name": "', middle='", "parameters": ', tail="}", between="\n")),
    ends=("<start_of_turn>", "<end_of_turn>"),
)
