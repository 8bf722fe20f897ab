"""Rules of a Lark grammar that holds a reply to tool calls: literal marks, JSON of a schema, bare text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perdure.chat.parsing import ID, INDEX, PLACES

if TYPE_CHECKING:
    from perdure.decode.sampling.grammar import Grammar
    from perdure.decode.sampling.matcher import Openers

_AS_TRAINED = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""The white space in which Python writes JSON, and so the templates that models were trained on."""
_ANY_TEXT = "/(?s:.*)/"


class Rules:
    """Rules of a Lark grammar. `control` maps marks that are control tokens of the model to their ids."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        marks = "|".join(re.escape(mark) for mark in sorted(control, key=len, reverse=True))
        self._marks = re.compile(f"({marks})" if marks else r"(?!)")
        self._rules: dict[str, str] = {}
        """Names, by what they are rules for."""

    def grammar(self, start: str, openers: Openers | None = None) -> Grammar:
        from perdure.decode.sampling.grammar import Grammar

        rules = (name + body for body, name in self._rules.items())
        return Grammar.lark("\n".join([f"start: {start}", *rules]) + "\n", openers)

    def rule(self, body: str, attributes: str = "") -> str:
        return self._rules.setdefault(f"{attributes}: {body}", f"r{len(self._rules)}")

    def terminal(self, body: str) -> str:
        return self._rules.setdefault(f": {body}", f"T{len(self._rules)}")

    def literal(self, text: str) -> str:
        """A text of the format: in quotes, but for its control tokens, which go by their ids."""
        return " ".join(
            f"<[{self._control[part]}]>" if part in self._control else self.words(part)
            for part in self._marks.split(text)
            if part
        )

    def piece(self, text: str, id_pattern: str) -> str:
        """A literal with places for an id or a number."""
        places = {ID: f"/{id_pattern}/", INDEX: "/[0-9]+/"}
        return " ".join(places.get(part) or self.literal(part) for part in PLACES.split(text) if part)

    def words(self, text: str) -> str:
        """A text from outside, such as a name: nothing in it is a control token."""
        return json.dumps(text, ensure_ascii=False) if text else ""

    def json(self, schema: Mapping[str, Any]) -> str:
        from perdure.decode.sampling.grammar import check_numbers

        text = json.dumps({**_without_notes(schema), "x-guidance": _AS_TRAINED})
        check_numbers(schema)
        return self.rule(f"%json {text}")

    def text(self, close: str) -> str:
        """Any text up to `close`, and that."""
        if any(mark in close for mark in self._control):
            return f"{self.rule(_ANY_TEXT)} {self.literal(close)}"
        return self.rule(_ANY_TEXT, f"[suffix={json.dumps(close, ensure_ascii=False)}]")

    def bare_text(self, close: str, shape: Sequence[str] = (), unlike: Sequence[str] = ()) -> str:
        """Any text up to `close`, and that: one that all patterns of `shape` match, and none of `unlike`."""
        mark = close.strip()
        before, _, behind = close.partition(mark)
        words, rest = mark, ""
        if (control := self._marks.search(mark)) is not None:
            words, rest = mark[: control.start()], mark[control.start() :]
        end = pattern_of(before + words)
        parts = [f"/{each}{end}/" for each in shape or ["(?s:.*)"]]
        parts += [f"~/{each}{end}/" for each in unlike]
        # What reads it goes by the first mark.
        parts.append(f"~/(?s:.*){pattern_of(mark)}(?s:.{'*' if rest else '+'})/")
        return f"{self.terminal(' & '.join(parts))} {self.literal(rest + behind)}"


def pattern_of(text: str) -> str:
    """A pattern for a text, as grammars write it."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")


_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
"""Formats of strings that grammars know."""
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_VALUES = frozenset(("enum", "const", "default", "examples"))


def _without_notes(schema: Any) -> Any:
    """A schema without what says nothing about its values, which grammars refuse: formats of an application,
    and keywords that rule nothing out."""
    if isinstance(schema, list):
        return [_without_notes(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            made[key] = {name: _without_notes(each) for name, each in value.items()}
        elif key in _VALUES:
            made[key] = value
        elif not (
            (key == "format" and value not in _FORMATS)
            or (key == "uniqueItems" and value is False)
            or (key == "propertyNames" and value in (True, {}, {"type": "string"}))
        ):
            made[key] = _without_notes(value)
    return made
