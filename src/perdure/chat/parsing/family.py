"""Model families: how each marks its reasoning, its turns and its tool calls.

    <think>The user asks for the weather.</think>It is sunny.<|im_end|>

A `Family` is a value: markers of reasoning, a tool-call format, and the signs by which a template shows that
its model belongs to the family. `chat/formats` has one file a family; signs of these are in its registry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal

from perdure.chat.message import Tool
from perdure.chat.parsing.call_writer import CallFormat, CallParser, CallText, CallWriter, marks_in
from perdure.errors import InvalidInputError

if TYPE_CHECKING:
    from perdure.decode.sampling.grammar import Grammar


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """What opens and closes a stretch of reasoning. White space that touches a marker belongs to it."""

    open: str
    close: str
    opens_in_words: bool = False
    """Whether the opener is words of the reasoning, which a prompt begins for the model."""


THINK = Markers(open="<think>", close="</think>")
CHATML_MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
ROLE_MARKS = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")

Meaning = Literal["call", "call mark", "reasoning", "answer", "nothing"]


class MarkerScanner:
    """Finds the first marker of a family in a text that comes in pieces."""

    def __init__(self, meanings: dict[str, Meaning]) -> None:
        self.meanings = meanings
        self._any = re.compile("|".join(map(re.escape, sorted(meanings, key=len, reverse=True))) or r"(?!)")
        self._starts = frozenset(mark[:size] for mark in meanings for size in range(1, len(mark)))
        self.firsts = frozenset(mark[:1] for mark in meanings)
        self._longest = max(map(len, meanings), default=1) - 1

    def first(self, text: str, *, ended: bool = False) -> tuple[int, str]:
        """Where the first marker begins and the marker; where it may yet turn out to begin, and nothing.

        A marker that another one begins with counts once it is certain which of them it is: when the text
        has `ended`, or goes on otherwise.
        """
        match = self._any.search(text)
        end = len(text)
        last = end if match is None else match.start() + 1
        for at in range(end if ended else max(0, end - self._longest), last):
            if text[at] in self.firsts and text[at:] in self._starts:
                return at, ""
        return (end, "") if match is None else (match.start(), match[0])


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of models writes. No marker of it is the beginning of another.

    A template is of the family if it holds all of `signs` and none of `unless`; where no template tells, an
    architecture that starts with one of `architectures` does.
    """

    name: str
    reasoning: Markers | None = None
    calls: CallFormat | None = None
    signs: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    _: KW_ONLY
    unless: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    """Marks around turns, which nobody should see."""
    answers: tuple[str, ...] = ()
    """Marks that begin the answer."""
    quotes_calls: bool = False
    """Whether a call within reasoning is only quoted; for other models it ends the reasoning."""
    prompt_opener: str = ""
    """What a prompt may end with that is the beginning of a call, or of a message's header."""
    restart: str = ""
    """What stands between reasoning and the rest, for models that write these as messages of their own."""
    answer_open: str = ""
    """What an answer begins with."""
    calls_stand_apart: bool = field(init=False, repr=False, compare=False)
    """Whether what opens a call opens nothing else, such as reasoning or a message to the user."""
    scanner: MarkerScanner = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        openers = self.calls.openers if self.calls is not None else ()
        thinks_apart = self.reasoning is None or not self.reasoning.open.startswith(openers or "\0")
        object.__setattr__(self, "calls_stand_apart", thinks_apart and not self.prompt_opener)
        object.__setattr__(self, "scanner", _scanner(self))
        marks = sorted(self.scanner.meanings)
        for mark, following in zip(marks, [*marks[1:], ""], strict=False):
            if not mark or mark[0].isspace():
                raise InvalidInputError(f"a marker of {self.name} is empty or starts with space: {mark!r}")
            if following.startswith(mark) and self.scanner.meanings[mark] not in ("nothing", "call mark"):
                raise InvalidInputError(
                    f"of the markers of {self.name}, {mark!r} is the beginning of {following!r}"
                )

    @property
    def marks(self) -> frozenset[str]:
        """All texts that mean something of their own in a reply."""
        return frozenset(self.scanner.meanings)

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning, so that the reply begins there."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.open.rstrip())

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, control: Mapping[str, int] | None = None
    ) -> Grammar:
        """What holds a reply to a call of `tools` in this family's format, or to several.

        `control` maps those of `marks` that are control tokens of the model to their ids.
        """
        calls = self.calls if self.calls is not None else JSON
        return calls.grammar(tools, parallel=parallel, control=control)

    @property
    def writer(self) -> CallWriter:
        return (self.calls if self.calls is not None else JSON).writer


def _scanner(family: Family) -> MarkerScanner:
    meanings: dict[str, Meaning] = dict.fromkeys(family.ends, "nothing")
    meanings |= dict.fromkeys(family.answers, "answer")
    if family.calls is not None:
        meanings |= dict.fromkeys(family.calls.marks, "call mark")
        meanings |= dict.fromkeys(family.calls.openers, "call")
    openers = family.calls.openers if family.calls is not None else ()
    if family.reasoning is not None:
        meanings[family.reasoning.close] = "answer"
        # Where calls and reasoning begin alike, the parser behind the opener decides which it is.
        if not family.reasoning.open.startswith(openers or "\0"):
            meanings[family.reasoning.open] = "reasoning"
    return MarkerScanner(meanings)
