"""Tool-call formats: the interface that every model family's way of writing calls has.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

A format is stated once, by its writer: the literal text around names and arguments. From the writer come the
text of calls, the grammar that holds a reply to them, the markers that open and close them, and the pattern
that a parser reads. A format states more only where models also write something that its writer never does.

`CallFormat.parser` makes a `CallParser` for each stretch behind an opener. Any thread may use a format; a
parser belongs to one reply. A parser that meets something else raises `Malformed`; the text behind `safe` is
then text of the reply again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from perdure.chat.message import Tool
from perdure.chat.parsing.call_writer import CallWriter
from perdure.chat.parsing.json_scanner import JsonScanner, Malformed
from perdure.decode.sampling.grammar import Grammar
from perdure.errors import GrammarError

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


def flexible(literal: str) -> str:
    """A pattern for a literal text whose white space models write in their own way."""
    return r"\s*".join(["", *map(re.escape, literal.split()), ""]) if literal.strip() else r"\s*"
