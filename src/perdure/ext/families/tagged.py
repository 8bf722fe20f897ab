"""Calls as tags: one for the call, one for each argument, whose value is bare text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from perdure import Tool, ToolCall
from perdure.ext.families.argument_types import (
    kinds_of,
    leaves,
    members_rule,
    properties_of,
    typed,
    value_rule,
)
from perdure.ext.families.named import ChosenParser, flexible
from perdure.spi.chat import (
    LONGEST_HEADER,
    SPACE,
    CallFormat,
    CallParser,
    CallWriter,
    JsonObjectsParser,
    JsonScanner,
    Malformed,
    Rules,
    filled,
)

_CDATA = "<![CDATA["


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedText(CallWriter):
    """A call as a name, and a tag for each argument, with bare strings."""

    holds_all: ClassVar[bool] = True
    head: str
    name_end: str
    key_head: str
    key_end: str
    value_end: str
    tail: str
    key_ends: tuple[tuple[str, str], ...] = ()
    """What ends a key whose value is of a kind, where that differs."""
    name_end_bare: str | None = None
    """What ends a name without arguments, where that differs."""

    def call_text(self, call: ToolCall, number: int) -> str:
        arguments = call.parsed
        name_end = filled(self._name_end(bool(arguments)), call, number)
        written = "".join(
            f"{self.key_head}{key}{self._key_end(value)}{_bare(value)}{self.value_end}"
            for key, value in arguments.items()
        )
        return self.head + call.name + name_end + written + self.tail

    def call_rule(self, rules: Rules, tool: Tool, begun: str = "") -> str:
        schema, required = tool.parameters, tool.parameters.get("required") or ()
        members = [
            (self._member(rules, key, each, schema), key in required)
            for key, each in properties_of(schema).items()
        ]
        start = f"{rules.literal(self.head.removeprefix(begun))} {rules.words(tool.name)}"
        some = f"{rules.piece(self._name_end(True), self.id_pattern)} {members_rule(rules, members)}"
        none = rules.piece(self._name_end(False), self.id_pattern)
        if not members:
            some = none
        elif not any(required for _, required in members) and self.name_end_bare is not None:
            some = f"({some} | {none})"
        return f"{start} {some} {rules.literal(self.tail)}"

    def _name_end(self, has_arguments: bool) -> str:
        return self.name_end if has_arguments or self.name_end_bare is None else self.name_end_bare

    def _member(self, rules: Rules, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        head = f"{rules.literal(self.key_head)} {rules.words(key)}"
        if not self.key_ends:
            value = value_rule(rules, schema, root, self.value_end)
            return rules.rule(f"{head} {rules.literal(self.key_end)} {value}")
        # The end of a key says what its value is.
        ways = []
        for leaf in leaves(schema, root):
            kinds = kinds_of(leaf, root)
            kind = "string" if "string" in kinds or not kinds else min(kinds)
            ways.append(
                f"{rules.literal(self._end_of(kind))} {value_rule(rules, leaf, root, self.value_end)}"
            )
        return rules.rule(f"{head} ({' | '.join(ways)})")

    def _key_end(self, value: Any) -> str:
        return self._end_of(_kind(value))

    def _end_of(self, kind: str) -> str:
        return dict(self.key_ends).get(kind, self.key_end)


def _kind(value: Any) -> str:
    kinds: tuple[tuple[type, str], ...] = (
        (str, "string"),
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (dict, "object"),
        (list, "array"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A tag with something in it: `start`, then what `pattern` matches, then `end`."""

    start: str
    end: str
    pattern: re.Pattern[str]


class TaggedCalls(CallFormat):
    """Calls within tags. Values are typed by the tool's schema, or by what a tag says of them.

    The writer's `start` and `head` decide which of three ways a call opens: a section of calls with a tag for
    each (`<tool_call>` and `<function=`, on two lines or as `start` and `head`), a section that is the call
    (`<tool_call>` alone), or a call's tag without a section (`<function name="`).
    """

    def __init__(
        self,
        writer: TaggedText,
        *,
        openers: Sequence[str] = (),
        marks: Sequence[str] = (),
        also_sections: Sequence[str] = (),
        call: Tag | None = None,
        parameter: Tag | None = None,
        or_json: bool = False,
        or_bare: bool = False,
        cdata: bool = False,
    ) -> None:
        """`also_sections` are other names of the section's tag. `call` and `parameter` read tags that say
        more than a name or a key, `openers` those of such calls. With `or_json` a section may hold a JSON
        object; with `or_bare` a call of a known tool may stand without a section. With `cdata` a value may
        be quoted as XML does."""
        section, call_start = _opening(writer)
        closes = writer.tail.split()
        section_closes: tuple[str, ...] = ()
        self.call_close = closes[0]
        if call_start and section:
            close = closes[1] if len(closes) > 1 else writer.end.strip()
            names = (section.strip("<>"), *also_sections)
            section_closes = tuple(close.replace(names[0], name) for name in names)
        bare = (call_start,) if or_bare or not section else ()
        self.sections = (section, *(f"<{name}>" for name in also_sections)) if section else ()
        self.section_closes = section_closes
        self.call = call or _call_tag(call_start, writer)
        self.parameter = parameter or _parameter_tag(writer)
        self.parameter_close = writer.value_end.strip()
        self.trims = writer.key_end.endswith("\n") and writer.value_end.startswith("\n")
        """Whether a line break before a value and one behind it belong to the tags."""
        self.cdata = cdata
        self.or_json = or_json
        if not section:
            closing: tuple[str, ...] = ()
        elif call_start:
            closing = section_closes
        else:
            closing = (self.call_close, writer.start.strip(), writer.end.strip())
        super().__init__(
            writer,
            openers=openers or (*self.sections, *bare),
            marks=(*filter(None, closing), *marks),
            text_openers=() if openers else bare,
        )

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        tagged = TaggedParser(self, opener, tools)
        if self.or_json and opener in self.sections:
            return ChosenParser(lambda first: JsonObjectsParser() if first in "[{" else tagged)
        return tagged


def _opening(writer: TaggedText) -> tuple[str, str]:
    """The tag of a section, and how the tag of a call in it begins; either may be empty."""
    *section, call_start = writer.head.split("\n")
    if call_start.endswith(">"):
        return call_start, ""
    return (section[0] if section else writer.start.strip()), call_start


def _call_tag(start: str, writer: TaggedText) -> Tag:
    end = writer.name_end.strip()
    if start:
        return tag(start, end, r"\s*(?P<name>[^\"<>=\n]+)")
    # A name that no mark follows ends where the next tag begins.
    return tag("", end or "<", r"\s*(?P<name>[\w.:/-]+)\s*")


def _parameter_tag(writer: TaggedText) -> Tag:
    *between, end = writer.key_end.split()
    return tag(writer.key_head.strip(), end, r"(?P<key>[^\"<>\n]+)" + flexible(" ".join(between)))


def tag(start: str, end: str, pattern: str) -> Tag:
    """A tag from `start` to `end`, with a pattern for what stands between: the group `name` or `key`."""
    return Tag(start=start, end=end, pattern=re.compile(pattern, re.DOTALL))


class TaggedParser(CallParser):
    """Reads tags one after the other. An argument is passed on when its tag is closed."""

    def __init__(self, form: TaggedCalls, opener: str, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._form = form
        self._tools = {tool.name: tool for tool in tools}
        self._known_only = opener in form.text_openers
        self._in_section = opener in form.sections
        self._next: Callable[[str, int], int]
        self._text = ""
        """What was read of the tag, or the literal, that is not yet complete."""
        self._value: list[str] = []
        self._tail = ""
        self._close = ""
        self._is_open = False
        self._json: JsonScanner | None = None
        self._key, self._kind = "", ""
        self._schema: Mapping[str, Any] = {}
        self._arguments = 0
        self._next = self._before_call if self._in_section and form.call.start else self._in_name

    def finish(self) -> None:
        if self._next not in (self._before_call, self._in_name) or self._text:
            raise Malformed
        super().finish()

    def _read(self, text: str, at: int) -> int:
        return self._next(text, at)

    def _literal(self, text: str, at: int, *literals: str) -> str:
        """Which of the literals the text continues with, once that is certain."""
        if not self._text and text[at] in SPACE:
            return ""
        self._text += text[at]
        if self._text in literals:
            literal, self._text = self._text, ""
            return literal
        if not any(each.startswith(self._text) for each in literals):
            raise Malformed
        return ""

    def _header(self, text: str, at: int, tag: Tag) -> re.Match[str] | None:
        self._text += text[at]
        if len(self._text) > LONGEST_HEADER:
            raise Malformed
        if not self._text.endswith(tag.end):
            return None
        match = tag.pattern.fullmatch(self._text.removesuffix(tag.end))
        if match is None:
            raise Malformed
        self._text = ""
        return match

    def _before_call(self, text: str, at: int) -> int:
        closes = self._form.section_closes if self.safe else ()
        literal = self._literal(text, at, self._form.call.start, *closes)
        if literal in closes:
            self.safe, self.done = self.position + 1, True
        elif literal:
            self._next = self._in_name
        return at + 1

    def _in_name(self, text: str, at: int) -> int:
        header = self._header(text, at, self._form.call)
        if header is None:
            return at + 1
        name = header["name"].strip()
        tool = self._tools.get(name)
        if tool is None and self._known_only:
            raise Malformed
        self._schema = tool.parameters if tool is not None else {}
        self.events += [("name", name), ("arguments", "{")]
        self._arguments = 0
        self._next = self._in_call
        # A name may end where the next tag begins.
        return at if self._form.call.end == "<" else at + 1

    def _in_call(self, text: str, at: int) -> int:
        literal = self._literal(text, at, self._form.parameter.start, self._form.call_close)
        if literal == self._form.call_close:
            self.events.append(("arguments", "}"))
            self._call_ended(1)
            self._next = self._before_call
            self.done = not (self._in_section and self._form.section_closes)
        elif literal:
            self._next = self._in_key
        return at + 1

    def _in_key(self, text: str, at: int) -> int:
        header = self._header(text, at, self._form.parameter)
        if header is not None:
            groups = header.groupdict()
            self._key, self._kind = groups["key"], groups.get("kind") or ""
            self._value, self._tail, self._close = [], "", self._form.parameter_close
            self._is_open, self._json = False, None
            self._next = self._before_value
        return at + 1

    def _before_value(self, text: str, at: int) -> int:
        if text[at] in SPACE and not self._form.cdata:
            self._value.append(text[at])
            return at + 1
        self._next = self._in_value
        kind = {"{": "object", "[": "array"}.get(text[at])
        if kind in self._kinds:
            self._json, self._next = JsonScanner(), self._in_json
        return at

    def _in_json(self, text: str, at: int) -> int:
        """A value that is JSON: in its strings an end tag is a text like any other."""
        assert self._json is not None
        try:
            end = self._json.push(text, at)
        except Malformed:
            self._next = self._in_value
            return at
        self._value.append(text[at:end])
        if self._json.done:
            self._next = self._in_value
        return end

    def _in_value(self, text: str, at: int) -> int:
        """The value up to its end tag. A few characters are kept back: they may begin that tag."""
        if self._form.cdata and not self._is_open:
            self._tail += text[at]
            if _CDATA.startswith(self._tail) and self._tail != _CDATA:
                return at + 1
            self._is_open = True
            if self._tail == _CDATA:
                self._tail, self._close = "", "]]>" + self._close
            return at + 1
        close, keep = self._close, len(self._close) - 1
        window = self._tail + text[at : at + keep]
        close_at = window.find(close)
        if close_at >= 0:
            self._value.append(window[:close_at])
            end = at - len(self._tail) + close_at + len(close)
        elif (close_at := text.find(close, at)) >= 0:
            self._value.append(self._tail + text[at:close_at])
            end = close_at + len(close)
        else:
            seen = self._tail + text[at:]
            self._value.append(seen[:-keep])
            self._tail = seen[-keep:]
            return len(text)
        self._end_value("".join(self._value))
        self._next = self._in_call
        return end

    def _end_value(self, raw: str) -> None:
        if self._form.trims:
            raw = raw.removeprefix("\n").removesuffix("\n")
        self.events.append(("arguments", f"{', ' if self._arguments else ''}{_json(self._key)}: "))
        self.events.append(("arguments", self._typed(raw)))
        self._arguments += 1

    def _typed(self, raw: str) -> str:
        if self._kind in ("true", "string"):
            return _json(raw)
        return typed(raw, frozenset() if self._kind and self._kind != "auto" else self._kinds)

    @property
    def _kinds(self) -> frozenset[str]:
        return kinds_of(properties_of(self._schema).get(self._key), self._schema)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
