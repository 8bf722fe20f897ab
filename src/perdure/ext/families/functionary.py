"""Functionary 3.2: a recipient, a line break, and the arguments. `all` is the user.

    >>>get_weather
    {"city": "Paris"}

Functionary 3.1 writes the name in a tag:

    <function=get_weather>{"city": "Paris"}</function>

Firefunction v2 writes a list of JSON objects behind a word:

    functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure import Tool
from perdure.ext.families.granite import json_list
from perdure.ext.families.named import NamedCalls
from perdure.spi.chat import (
    HEADER_MARKS,
    CallFormat,
    CallParser,
    CallText,
    Family,
    JsonCalls,
    JsonScanner,
    Malformed,
)

_PROMPT = ">>>"


class FunctionaryCalls(CallFormat):
    """`>>>NAME`, a line break, and the arguments. The prompt ends with the first `>>>`."""

    def __init__(self, writer: CallText) -> None:
        super().__init__(writer, openers=(_PROMPT,), text_openers=(_PROMPT,))

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


FUNCTIONARY = Family(
    "functionary",
    None,
    FunctionaryCalls(CallText(head="", middle="\n", between=f"\n{_PROMPT}")),
    ends=HEADER_MARKS,
    prompt_opener=_PROMPT,
    answer_open="all\n",
)
FUNCTIONARY_TAGGED = Family(
    "functionary-tagged",
    None,
    NamedCalls(CallText(head="<function=", middle=">", tail="</function>"), opener_is_text=True),
    ends=HEADER_MARKS,
)
FIREFUNCTION = Family(
    "firefunction",
    None,
    JsonCalls(json_list("functools"), known_only=True, opener_is_text=True),
    ends=HEADER_MARKS,
)
