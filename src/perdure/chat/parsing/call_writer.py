"""Call writers: the text of tool calls, and the grammar that holds a reply to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from perdure.chat.message import Tool, ToolCall
from perdure.chat.parsing import ID, PLACES, Malformed
from perdure.errors import GrammarError

if TYPE_CHECKING:
    from perdure.chat.parsing.json_scanner import JsonScanner
    from perdure.chat.parsing.rules import Rules
    from perdure.decode.sampling.grammar import Grammar


_COMBINING = frozenset(("additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf", "$ref"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallWriter:
    """The text of calls: `start`, then each call with `between` in the middle, then `end`."""

    start: str = ""
    head: str = ""
    """What a call begins with, up to its name."""
    between: str = ""
    end: str = ""
    first_index: int = 0
    holds_all: ClassVar[bool] = False
    """Whether its grammar holds arguments to all that a schema says."""
    id_pattern: str = "[a-zA-Z0-9]{9}"
    """What a model's own ids are like, for formats that have them; as Mistral wants them, unless given."""

    def write(self, calls: Iterable[ToolCall]) -> str:
        written = (self.call_text(call, number) for number, call in enumerate(calls, self.first_index))
        return self.start + self.between.join(written) + self.end

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, control: Mapping[str, int]) -> Grammar:
        from perdure.chat.parsing.rules import Rules

        rules = Rules(control)
        return rules.grammar(
            f"{rules.literal(self.start)} {self.calls_rule(rules, tools, parallel=parallel)}"
        )

    def calls_rule(self, rules: Rules, tools: Sequence[Tool], *, parallel: bool, begun: str = "") -> str:
        """Calls up to their end, of which the first stands there up to `begun`."""
        call = self._any_call(rules, tools)
        first = self._any_call(rules, tools, begun) if begun else call
        more = f"({rules.literal(self.between)} {call})*" if parallel else ""
        return f"{first} {more} {rules.literal(self.end)}"

    def behind(self, rules: Rules, tools: Sequence[Tool], opener: str, *, parallel: bool) -> str:
        """What follows an opener that was written, up to the end of the calls."""
        before = self.start + self.head
        at = before.find(opener)
        cut = at + len(opener) if at >= 0 else 0
        start, begun = self.start[cut:], self.head[: max(0, cut - len(self.start))]
        return f"{rules.literal(start)} {self.calls_rule(rules, tools, parallel=parallel, begun=begun)}"

    def _any_call(self, rules: Rules, tools: Sequence[Tool], begun: str = "") -> str:
        return rules.rule(" | ".join(rules.rule(self.call_rule(rules, tool, begun)) for tool in tools))

    def call_text(self, call: ToolCall, number: int) -> str:
        raise NotImplementedError

    def call_rule(self, rules: Rules, tool: Tool, begun: str = "") -> str:
        """A call, without the beginning of its `head` that was written."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText(CallWriter):
    """A call as a name, and its arguments as a JSON object."""

    holds_all: ClassVar[bool] = True
    head: str
    middle: str
    tail: str = ""

    def call_text(self, call: ToolCall, number: int) -> str:
        head, middle, tail = (filled(each, call, number) for each in (self.head, self.middle, self.tail))
        return head + call.name + middle + call.arguments + tail

    def call_rule(self, rules: Rules, tool: Tool, begun: str = "") -> str:
        pieces = (self.head.removeprefix(begun), self.middle, self.tail)
        head, middle, tail = (rules.piece(each, self.id_pattern) for each in pieces)
        return f"{head} {rules.words(tool.name)} {middle} {rules.json(strict(tool.parameters))} {tail}"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template writes calls."""

    writer: CallWriter
    is_learned: bool = False
    """Whether it was cut out of the template's own text; else it is the family's."""
    exact: bool = False
    """Whether one call is written as the template would write it back."""
    parallel: bool = False
    """Whether two calls are."""
    shown: bool = False
    """Whether the template shows calls at all; else they are written into the text, as the family does."""


def strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's parameters as what a reply is held to: nothing that the schema does not name."""
    made = {"type": "object", **schema}
    if not _COMBINING & made.keys():
        made["additionalProperties"] = False
        made.setdefault("properties", {})
    return made


def filled(piece: str, call: ToolCall, number: int) -> str:
    """A piece of a call with its id and its number in their places."""
    return PLACES.sub(lambda place: call.id if place[0] == ID else str(number), piece)


Event = tuple[Literal["id", "name", "arguments", "end", "channel"], str]
"""A call's id, where the model gave it one, its name, more of its arguments, its end; or what the text that
follows is: text, reasoning, or hidden."""

SPACE = frozenset(" \t\n\r")
LONGEST_HEADER = 256
_MARK = re.compile(r"<[|｜][^<>|｜]+[|｜]>|</?[\w:]+>|\[[A-Z_]+\]")
"""A tag or control token in a writer's literal text."""


class CallParser:
    """Reads a stretch in pieces. Everything behind `safe` is not its own, once it is done or malformed.

    `events` grows as calls are recognised; the reply parser takes them out of it.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.position = 0
        self.safe = 0
        self.done = False

    def push(self, text: str) -> None:
        at, start = 0, self.position
        while at < len(text) and not self.done:
            at = self._read(text, at)
            self.position = start + at

    def finish(self) -> None:
        """Nothing more will come."""
        if not self.safe:
            raise Malformed

    def _read(self, text: str, at: int) -> int:
        """Read something of `text` from `at` on; where that ended."""
        raise NotImplementedError

    def _read_arguments(self, scanner: JsonScanner, text: str, at: int) -> int:
        """Read more of a call's arguments in JSON; where they end, the call does."""
        end = scanner.push(text, at)
        self.events.append(("arguments", text[at:end]))
        if scanner.done:
            self._call_ended(end - at)
        return end

    def _call_ended(self, ahead: int) -> None:
        """A call is whole, `ahead` characters behind the position."""
        self.events.append(("end", ""))
        self.safe = self.position + ahead


class CallFormat:
    """A tool-call format.

    `openers` are the markers that a stretch with calls begins with, `leads` the characters with which one
    may begin unmarked, at the start of a reply. `marks` are further texts with a meaning of their own, that
    no reader should see.
    """

    def __init__(
        self,
        writer: CallWriter,
        *,
        openers: Sequence[str] = (),
        marks: Sequence[str] = (),
        leads: str = "",
        text_openers: Sequence[str] = (),
    ) -> None:
        """`text_openers` are openers that plain text may hold: one is shown where no call follows it."""
        self.writer = writer
        self.openers = tuple(dict.fromkeys(openers))
        self.marks = tuple(mark for mark in dict.fromkeys(marks) if mark not in self.openers)
        self.leads = leads
        self.text_openers = frozenset(text_openers)

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
        return self.writer.grammar(tools, parallel=parallel, control=control or {})


def marks_in(*texts: str) -> tuple[str, ...]:
    """The tags and control tokens in a writer's literal texts, in order."""
    return tuple(mark for text in texts for mark in _MARK.findall(text))
