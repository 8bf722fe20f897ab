"""How models write their tool calls, and whether a call fits its tool."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.chat.call_object import Objects
from perdure.chat.channels import Channels
from perdure.chat.fence import Fence
from perdure.chat.message import Tool, ToolCall
from perdure.chat.region import ByFirst, Header, Region
from perdure.decode.grammar import Grammar
from perdure.errors import GrammarError, InvalidInputError

_AS_TRAINED = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""The white space in which Python writes JSON, and so the templates that models were trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
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
            head, tail = literal(self.head + tool.name + self.middle), literal(self.tail)
            rules += [
                f"call_{index}: {head} arguments_{index} {tail}",
                f"arguments_{index}: %json {json.dumps(_schema(tool))}",
            ]
        return Grammar.lark("\n".join(rules) + "\n")


class CallFormat:
    """A way to write tool calls.

    `openers` are the markers that a stretch with calls begins with, `leads` the characters with which one
    may begin unmarked, at the start of a reply. `marks` are further texts with a meaning of their own, that
    no reader should see.
    """

    openers: tuple[str, ...] = ()
    leads: str = ""
    marks: tuple[str, ...] = ()
    shape: Shape
    opener_is_text: bool = False
    """Whether an opener is shown where no call follows: it is no control token then."""

    def region(self, opener: str, tools: Sequence[Tool]) -> Region:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls(CallFormat):
    """Objects such as `{"name": …, "arguments": {…}}`, behind a marker or, for known tools, without one."""

    shape: Shape
    openers: tuple[str, ...] = ()
    leads: str = ""
    marks: tuple[str, ...] = ()
    opener_is_text: bool = False

    def region(self, opener: str, tools: Sequence[Tool]) -> Region:
        return Objects(None if opener else frozenset(tool.name for tool in tools))


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls(CallFormat):
    """A name, then the arguments, behind a marker; or a list of objects, as older models write it."""

    shape: Shape
    header: re.Pattern[str]
    openers: tuple[str, ...]
    leads: str = ""
    marks: tuple[str, ...] = ()
    opener_is_text: bool = False
    after: str = ""
    """What may stand behind the arguments."""

    def region(self, opener: str, tools: Sequence[Tool]) -> Region:
        return ByFirst(lambda first: Objects() if first in "[{" else Header(self.header, self.after))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelCalls(CallFormat):
    """Harmony's messages to a function. Its channels also tell reasoning and answer apart."""

    shape: Shape
    openers: tuple[str, ...] = ("<|channel|>", "<|start|>")
    leads: str = "t"
    marks: tuple[str, ...] = ("<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
    opener_is_text: bool = False

    def region(self, opener: str, tools: Sequence[Tool]) -> Region:
        return Channels(opener)


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedCalls(CallFormat):
    """A fenced block of Python calls or JSON, or a bare object."""

    shape: Shape
    openers: tuple[str, ...] = ("```tool_code\n",)
    leads: str = "{["
    marks: tuple[str, ...] = ()
    opener_is_text: bool = True

    def region(self, opener: str, tools: Sequence[Tool]) -> Region:
        return Fence(tools) if opener else Objects(frozenset(tool.name for tool in tools))


def check_arguments(call: ToolCall, tools: Iterable[Tool]) -> str | None:
    """What is wrong with a call, by its tool's schema, in a sentence; None if nothing is."""
    known = {tool.name: tool for tool in tools}
    tool = known.get(call.name)
    if tool is None:
        return f"there is no tool {call.name!r}; the tools are: {', '.join(known) or 'none'}"
    try:
        arguments = call.parsed
    except InvalidInputError as error:
        return str(error)
    # Slow to import, and needed only where there are calls.
    from perdure.chat.schema import first_problem

    try:
        problem = first_problem(tool.parameters, arguments)
    except Exception as error:
        # A tool's schema is its author's; what fails in it is not the model's fault.
        return f"the schema of {tool.name} cannot be used: {_brief(str(error))}"
    if problem is None:
        return None
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in problem.absolute_path)
    return f"the arguments of {call.name} do not fit its schema: arguments{place}: {_brief(problem.message)}"


def _brief(words: str, longest: int = 300) -> str:
    return words if len(words) <= longest else words[:longest] + " …"


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
