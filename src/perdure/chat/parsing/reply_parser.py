"""Reply parser: a reply's raw text, read as it comes, as text, reasoning and tool calls."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from perdure.chat.message import DRAWN_ID, Message, Tool, ToolCall
from perdure.chat.parsing import Malformed
from perdure.chat.parsing.call_writer import CallParser
from perdure.chat.parsing.family import Family
from perdure.checks import check_one_of
from perdure.config import ReasoningMode

_SPACE = " \t\r\n"
"""What belongs to a marker that it touches."""


@dataclass(slots=True)
class Part:
    """What is new in a reply. A call's id and name come with its first part, its arguments bit by bit.

    `dropped` takes a call back: it turned out to be none, and its text follows as text.
    """

    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    call: int = 0
    id: str = ""
    name: str = ""
    dropped: bool = False


class ReplyParser:
    """Parses one reply in pieces, cut anywhere: the parts add up to the same whatever the cuts.

    Markers never show, wherever they were cut; everything else arrives once, and in order. White space that
    touches a marker belongs to it, but for what keeps two texts apart. The work for a character does not
    depend on the reply so far.
    """

    def __init__(
        self,
        family: Family,
        *,
        reasoning: ReasoningMode = "capture",
        tools: Sequence[Tool] = (),
        thinking: bool = False,
        goes_on: bool = False,
        makes_calls: bool = True,
        call_ids: str = "",
        prompt: str = "",
    ) -> None:
        """`prompt` is what the reply answers, or its end: it may have begun a call. `goes_on` says that the
        prompt ends within what the reply is to say. Without `makes_calls`, what looks like a call is text.
        The ids of calls that the model does not name are made of `call_ids`, so that a reply that is made
        again has the same; empty: they are drawn."""
        check_one_of("reasoning", reasoning, get_args(ReasoningMode))
        self._scanner = family.scanner
        self._format = family.calls
        self._reasoning = reasoning
        self._tools = tuple(tools)
        self.thinking = thinking and family.reasoning is not None
        """Whether what comes now is reasoning."""
        self._parts: list[Part] = []
        self._says: Literal["text", "reasoning"] | None = None
        """What words are that come next, where nothing before them or held back can change that."""
        self._held = ""
        """The start of a marker, perhaps."""
        self._space: list[str] = []
        self._trims = self.thinking and not goes_on
        """Whether white space that comes now touches a marker."""
        self._shown = False
        self._before: list[str] = []
        self._after: list[str] = []
        """White space before a marker and behind it, for when more text comes."""
        self._may_lead = bool(tools) and not (goes_on and not self.thinking)
        self._call_parser: CallParser | None = None
        self._opener = ""
        self._raw: list[str] = []
        self._calls = 0
        self._calling = False
        self._id = ""
        self._call_ids = call_ids
        self._hidden = False
        self._quotes_calls = family.quotes_calls and reasoning == "capture"
        self._makes_calls = makes_calls or not family.calls_stand_apart
        opens_in_words = family.reasoning is not None and family.reasoning.opens_in_words
        if self.thinking and opens_in_words and family.reasoning is not None and not goes_on:
            self._say(family.reasoning.open)
        if family.prompt_opener and prompt.endswith(family.prompt_opener):
            assert family.calls is not None
            self._open(family.calls.openers[0])
            # The prompt has it, so that it is never part of the reply's text.
            self._opener = ""

    def push(self, text: str) -> list[Part]:
        """The parts that `text` makes certain."""
        if self._says and text and not text[-1].isspace() and self._scanner.firsts.isdisjoint(text):
            # Most tokens are words. The long way would give the same.
            return [Part(self._says, text)]
        while text:
            text = self._read_call(text) if self._call_parser is not None else self._read_prose(text)
        self._says = self._next_words()
        return self._take()

    def _next_words(self) -> Literal["text", "reasoning"] | None:
        if self._call_parser is not None or self._held or self._space or self._trims or self._hidden:
            return None
        if self.thinking and self._reasoning != "show":
            return "reasoning" if self._reasoning == "capture" else None
        waits = self._before or self._after or (self._may_lead and not self.thinking)
        return "text" if self._shown and not waits else None

    def finish(self) -> list[Part]:
        """What was held back, once nothing more will come."""
        while self._call_parser is not None:
            text = self._end_call()
            while text:
                text = self._read_call(text) if self._call_parser is not None else self._read_prose(text)
        self._says = None
        tail, self._held = self._held, ""
        while tail:
            end, marker = self._scanner.first(tail, ended=True)
            self._say(tail[:end])
            if marker:
                self._act(marker)
            tail = tail[end + len(marker) :]
        self._emit("".join(self._space))
        self._space = []
        return self._take()

    # Prose.

    def _read_prose(self, text: str) -> str:
        """Read up to the next marker, and what is left behind it."""
        text, self._held = self._held + text, ""
        end, marker = len(text), ""
        if not self._scanner.firsts.isdisjoint(text):
            end, marker = self._scanner.first(text)
        if self._may_lead and not self.thinking and (start := _first_word(text, end)) is not None:
            self._may_lead = False
            if self._format is not None and text[start] in self._format.leads:
                self._say(text[:start])
                self._open("")
                return text[start:]
        self._say(text[:end])
        if not marker:
            self._held = text[end:]
            return ""
        self._act(marker)
        return text[end + len(marker) :]

    def _say(self, text: str) -> None:
        if self._trims:
            stripped = text.lstrip(_SPACE)
            if not self.thinking:
                self._after.append(text[: len(text) - len(stripped)])
            text, self._trims = stripped, not stripped
        words = text.rstrip(_SPACE)
        if words:
            self._emit("".join(self._space) + words)
            self._space = []
        if len(words) < len(text):
            self._space.append(text[len(words) :])

    def _emit(self, text: str) -> None:
        if not text or self._hidden or (self.thinking and self._reasoning == "hide"):
            return
        if self.thinking and self._reasoning == "capture":
            self._parts.append(Part("reasoning", text))
            return
        if self._shown:
            text = ("".join(self._before) or "".join(self._after)) + text
        self._before, self._after, self._shown = [], [], True
        self._parts.append(Part("text", text))

    def _act(self, marker: str) -> None:
        meaning = self._scanner.meanings[marker]
        quotes = not self._makes_calls or (self.thinking and self._quotes_calls)
        if quotes and meaning in ("call", "call mark"):
            self._say(marker)
        elif meaning == "call":
            self._open(marker)
        elif meaning == "reasoning" and not self.thinking:
            self._switch(thinking=True)
        elif meaning == "answer" and self.thinking:
            self._switch(thinking=False)

    def _switch(self, *, thinking: bool) -> None:
        # What is shown in one piece keeps the white space between its parts.
        if self._reasoning != "show" or not self._shown:
            self._set_aside()
        self.thinking = thinking

    def _set_aside(self) -> None:
        """The white space so far touches a marker, and so does what comes next."""
        if not self.thinking:
            self._before += self._space
        self._space, self._trims = [], True

    # Calls.

    def _open(self, opener: str) -> None:
        assert self._format is not None
        self._call_parser = self._format.parser(opener, self._tools)
        self._opener, self._raw = opener, []

    def _read_call(self, text: str) -> str:
        assert self._call_parser is not None
        self._raw.append(text)
        try:
            self._call_parser.push(text)
        except Malformed:
            return self._leave(whole=False)
        return self._leave(whole=True) if self._call_parser.done else self._report()

    def _end_call(self) -> str:
        assert self._call_parser is not None
        try:
            self._call_parser.finish()
        except Malformed:
            return self._leave(whole=False)
        return self._leave(whole=True)

    def _leave(self, *, whole: bool) -> str:
        """Go back to prose; the text that the call parser has left."""
        assert self._call_parser is not None
        assert self._format is not None
        self._report()
        rest = "".join(self._raw)[self._call_parser.safe :]
        fresh = not self._call_parser.safe
        self._call_parser, self._raw, self._may_lead = None, [], False
        if self._calling:
            self._parts.append(Part("call", call=self._calls - 1, dropped=True))
            self._calling = False
        if not whole and fresh and self._opener in self._format.text_openers:
            self._say(self._opener)
        return rest

    def _report(self) -> str:
        assert self._call_parser is not None
        for kind, text in self._call_parser.events:
            call = self._calls - 1
            if kind == "id":
                self._id = "" if DRAWN_ID.fullmatch(text) else text
            elif kind == "name":
                written, self._id = self._id or self._make_id(), ""
                self._parts.append(Part("call", call=call + 1, id=written, name=text))
                self._calls, self._calling = self._calls + 1, True
            elif kind == "arguments":
                self._parts.append(Part("call", text, call=call))
            elif kind == "end":
                self._set_aside()
                self._calling, self.thinking = False, False
            else:
                self._switch(thinking=text == "reasoning")
                self._hidden = text == "hidden"
        self._call_parser.events.clear()
        return ""

    def _make_id(self) -> str:
        if not self._call_ids:
            return f"call_{secrets.token_hex(12)}"
        return f"call_{hashlib.sha256(f'{self._call_ids} {self._calls}'.encode()).hexdigest()[:24]}"

    def _take(self) -> list[Part]:
        """The parts so far, neighbours of one kind as one."""
        parts, self._parts = self._parts, []
        if len(parts) <= 1:
            return parts
        joined: list[Part] = []
        for part in parts:
            last = joined[-1] if joined else None
            if last and (last.kind, last.call) == (part.kind, part.call) and not (part.id or part.dropped):
                joined[-1] = replace(last, text=last.text + part.text)
            else:
                joined.append(part)
        return joined


def parse_reply(
    family: Family,
    text: str,
    *,
    reasoning: ReasoningMode = "capture",
    tools: Sequence[Tool] = (),
    prompt: str = "",
) -> Message:
    """A whole reply as a message. `prompt` is what it answers, or its end."""
    thinking = family.opens_reasoning(prompt)
    parser = ReplyParser(family, reasoning=reasoning, tools=tools, thinking=thinking, prompt=prompt)
    return gather([*parser.push(text), *parser.finish()])


def gather(parts: Sequence[Part]) -> Message:
    """The message that parts add up to."""
    texts: dict[str, list[str]] = {"text": [], "reasoning": []}
    calls: dict[int, list[Part]] = {}
    for part in parts:
        if part.kind != "call":
            texts[part.kind].append(part.text)
        elif part.dropped:
            del calls[part.call]
        else:
            calls.setdefault(part.call, []).append(part)
    content, reasoning = "".join(texts["text"]), "".join(texts["reasoning"])
    return Message(
        role="assistant",
        content=content if content or not calls else None,
        reasoning=reasoning or None,
        tool_calls=tuple(
            ToolCall(id=each[0].id, name=each[0].name, arguments="".join(part.text for part in each))
            for each in calls.values()
        ),
    )


def _first_word(text: str, end: int) -> int | None:
    """Where the first character before `end` stands that is no white space."""
    start = len(text) - len(text.lstrip(_SPACE))
    return start if start < end else None
