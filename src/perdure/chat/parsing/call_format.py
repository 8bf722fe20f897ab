"""Tool-call formats: how models write tool calls, and the grammar that holds a reply to them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.chat.message import Tool, ToolCall
from perdure.chat.parsing.call_parser import CallParser
from perdure.decode.grammar import Grammar
from perdure.errors import GrammarError

_AS_TRAINED = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""The white space in which Python writes JSON, and so the templates that models were trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """The text of calls: `start`, then each call with `between` in the middle, then `end`."""

    head: str
    middle: str
    tail: str = ""
    start: str = ""
    between: str = ""
    end: str = ""

    def write(self, calls: Iterable[ToolCall]) -> str:
        written = (self.head + call.name + self.middle + call.arguments + self.tail for call in calls)
        return self.start + self.between.join(written) + self.end

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, control: Mapping[str, int]) -> Grammar:
        def literal(text: str) -> str:
            return _literal(text, control)

        more = f"({literal(self.between)} call)*" if parallel else ""
        rules = [
            f"start: {literal(self.start)} call {more} {literal(self.end)}",
            "call: " + " | ".join(f"call_{index}" for index in range(len(tools))),
        ]
        for index, tool in enumerate(tools):
            # A name is plain text, whatever it looks like.
            name = json.dumps(tool.name, ensure_ascii=False)
            head, tail = f"{literal(self.head)} {name} {literal(self.middle)}", literal(self.tail)
            rules += [
                f"call_{index}: {head} arguments_{index} {tail}",
                f"arguments_{index}: %json {json.dumps(_schema(tool))}",
            ]
        return Grammar.lark("\n".join(rules) + "\n")


class CallFormat:
    """A tool-call format.

    `openers` are the markers that a stretch with calls begins with, `leads` the characters with which one
    may begin unmarked, at the start of a reply. `marks` are further texts with a meaning of their own, that
    no reader should see.
    """

    openers: tuple[str, ...] = ()
    leads: str = ""
    marks: tuple[str, ...] = ()
    shape: CallText
    opener_is_text: bool = False
    """Whether an opener is shown where no call follows: it is no control token then."""

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        """Reads on behind `opener`; an empty one for a lead."""
        raise NotImplementedError

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, control: Mapping[str, int] | None = None
    ) -> Grammar:
        """What holds a reply to one call of `tools`, or several. `control` maps marks that are control
        tokens of the model to their ids: the others are written as plain text."""
        if not tools:
            raise GrammarError("a call can be required only of tools: give at least one")
        return self.shape.grammar(tools, parallel=parallel, control=control or {})


def _schema(tool: Tool) -> dict[str, Any]:
    """A tool's parameters as what a reply is held to: nothing that the schema does not name."""
    schema = {"type": "object", **tool.parameters}
    if not {"additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf", "$ref"} & schema.keys():
        schema["additionalProperties"] = False
        schema.setdefault("properties", {})
    return {**schema, "x-guidance": _AS_TRAINED}


def _literal(text: str, control: Mapping[str, int]) -> str:
    """A text in Lark: in quotes, but for its control tokens, which go by their ids."""
    marks = "|".join(re.escape(mark) for mark in sorted(control, key=len, reverse=True))
    parts = re.split(f"({marks})", text) if marks else [text]
    return " ".join(
        f"<[{control[part]}]>" if index % 2 else json.dumps(part, ensure_ascii=False)
        for index, part in enumerate(parts)
        if part
    )
