"""Calls as a name and a JSON object behind it, between marks: `<function=get_weather>{"city": "Paris"}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from perdure import Tool
from perdure.spi.chat import (
    ID,
    LONGEST_HEADER,
    SPACE,
    CallFormat,
    CallParser,
    CallText,
    JsonObjectsParser,
    JsonScanner,
    Malformed,
    marks_in,
)


class NamedCalls(CallFormat):
    """A name, then the arguments, behind a marker; or a list of objects, as older models write it.

    The opener is the first mark of the writer's `head`. What it writes from there to the arguments is the
    header; what it writes behind them, up to the next mark, is skipped.
    """

    def __init__(
        self,
        writer: CallText,
        *,
        also: Sequence[CallText] = (),
        header: str = "",
        marks: Sequence[str] = (),
        opener_is_text: bool = False,
    ) -> None:
        """`also` are other texts that models of the family write; `header` is the pattern of a header, with
        the group `name` and perhaps `id`, where they write more than texts can say."""
        opener = (*marks_in(writer.head), *marks_in(writer.start), writer.head)[0]
        literals = (writer.start, writer.head, writer.middle, writer.tail, writer.end)
        super().__init__(
            writer,
            openers=(opener,),
            marks=(*marks_in(*literals), *marks),
            text_openers=(opener,) if opener_is_text else (),
        )
        named = [each for each in (writer, *also) if each.head.startswith(opener)]
        headers = [header] if header else [_header(each, opener) for each in named]
        self._headers = [re.compile(each) for each in headers]
        self._after = next((skipped for each in named if (skipped := _before_mark(each.tail))), "")

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        def choose(first: str) -> CallParser:
            if first in "[{":
                return JsonObjectsParser(id_last=True)
            return NamedCallParser(self._headers, self._after)

        return ChosenParser(choose)


def _header(writer: CallText, opener: str) -> str:
    """The pattern of all that a writer puts between the opener and the arguments."""
    before, behind = (
        flexible(text).replace(ID, r"(?P<id>[\w-]*)") for text in (writer.head[len(opener) :], writer.middle)
    )
    return rf"{before}(?P<name>[\w.-]+){behind}"


def _before_mark(tail: str) -> str:
    """What a tail has before its first mark."""
    return tail.partition(next(iter(marks_in(tail)), "\0"))[0].strip()


class NamedCallParser(CallParser):
    """A name in a few words, then the arguments as a JSON object.

    One of `headers` matches all that stands before the arguments, with the group `name`; `tail` is what may
    stand behind them.
    """

    def __init__(self, headers: Sequence[re.Pattern[str]], tail: str = "") -> None:
        super().__init__()
        self._headers = headers
        self._tail = tail
        self._header = ""
        self._arguments: JsonScanner | None = None
        self._matched = 0

    def _read(self, text: str, at: int) -> int:
        if self.safe:
            return self._read_tail(text, at)
        if self._arguments is None:
            return self._read_header(text, at)
        end = self._read_arguments(self._arguments, text, at)
        self.done = self._arguments.done and not self._tail
        return end

    def _read_header(self, text: str, at: int) -> int:
        if text[at] != "{":
            self._header += text[at]
            if len(self._header) > LONGEST_HEADER:
                raise Malformed
            return at + 1
        header = next(filter(None, (each.fullmatch(self._header) for each in self._headers)), None)
        if header is None:
            raise Malformed
        if (written := header.groupdict().get("id")) is not None:
            self.events.append(("id", written))
        self.events.append(("name", header["name"]))
        self._arguments = JsonScanner()
        return at

    def _read_tail(self, text: str, at: int) -> int:
        if not self._matched and text[at] in SPACE:
            return at + 1
        if text[at] != self._tail[self._matched]:
            self.done = True
            return at
        self._matched += 1
        if self._matched == len(self._tail):
            self.safe = self.position + 1
            self.done = True
        return at + 1


class ChosenParser(CallParser):
    """The parser that the first character which is no white space decides on."""

    def __init__(self, choose: Callable[[str], CallParser]) -> None:
        super().__init__()
        self._choose = choose
        self._chosen: CallParser | None = None
        self._before = 0

    def finish(self) -> None:
        if self._chosen is None:
            raise Malformed
        self._chosen.finish()
        self._follow()

    def _read(self, text: str, at: int) -> int:
        if self._chosen is None:
            if text[at] in SPACE:
                return at + 1
            self._chosen, self._before = self._choose(text[at]), self.position
            self._chosen.events = self.events
        start = self._chosen.position
        try:
            self._chosen.push(text[at:])
        finally:
            self._follow()
        return at + self._chosen.position - start

    def _follow(self) -> None:
        assert self._chosen is not None
        self.safe = self._before + self._chosen.safe if self._chosen.safe else 0
        self.done = self._chosen.done


def flexible(literal: str) -> str:
    """A pattern for a literal text whose white space models write in their own way."""
    return r"\s*".join(["", *map(re.escape, literal.split()), ""]) if literal.strip() else r"\s*"
