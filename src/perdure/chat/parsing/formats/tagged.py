"""Calls as tags: one for the call, one for each argument, whose value is bare text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.chat.message import Tool
from perdure.chat.parsing.call_format import CallFormat
from perdure.chat.parsing.call_parser import LONGEST_HEADER, SPACE, CallParser
from perdure.chat.parsing.call_writer import CallWriter, TaggedText
from perdure.chat.parsing.formats.json_objects import JsonObjectsParser
from perdure.chat.parsing.formats.named import ChosenParser
from perdure.chat.parsing.json_scanner import Malformed
from perdure.chat.parsing.values import kinds_of, properties_of, typed

_CDATA = "<![CDATA["


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A tag with something in it: `start`, then what `pattern` matches, then `end`."""

    start: str
    end: str
    pattern: re.Pattern[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls(CallFormat):
    """Calls within tags. Values are typed by the tool's schema, or by what a tag says of them.

    An opener that is in `sections` is followed by calls; behind any other the call's tag is already open.
    """

    openers: tuple[str, ...]
    call: Tag
    call_close: str
    parameter: Tag
    parameter_close: str
    sections: tuple[str, ...] = ()
    section_closes: tuple[str, ...] = ()
    trims: bool = False
    """Whether a line break before a value and one behind it belong to the tags."""
    cdata: bool = False
    or_json: bool = False
    """Whether a section may hold a JSON object instead."""
    known_only: tuple[str, ...] = ()
    """Openers that plain text may have: behind them only known tools count."""
    leads: str = ""
    marks: tuple[str, ...] = ()
    writer: CallWriter

    def shows(self, opener: str) -> bool:
        return opener in self.known_only

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        tagged = TaggedParser(self, opener, tools)
        if self.or_json and opener in self.sections:
            return ChosenParser(lambda first: JsonObjectsParser() if first in "[{" else tagged)
        return tagged


class TaggedParser(CallParser):
    """Reads tags one after the other. An argument is passed on when its tag is closed."""

    def __init__(self, form: TaggedCalls, opener: str, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._form = form
        self._tools = {tool.name: tool for tool in tools}
        self._known_only = opener in form.known_only
        self._in_section = opener in form.sections
        self._next: Callable[[str, int], int]
        self._text = ""
        """What was read of the tag, or the literal, that is not yet complete."""
        self._value: list[str] = []
        self._tail = ""
        self._close = ""
        self._is_open = False
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

    def _literal(self, text: str, at: int, *wanted: str) -> str:
        """Which of the literals the text goes on with, once that is certain."""
        if not self._text and text[at] in SPACE:
            return ""
        self._text += text[at]
        if self._text in wanted:
            found, self._text = self._text, ""
            return found
        if not any(each.startswith(self._text) for each in wanted):
            raise Malformed
        return ""

    def _header(self, text: str, at: int, tag: Tag) -> re.Match[str] | None:
        self._text += text[at]
        if len(self._text) > LONGEST_HEADER:
            raise Malformed
        if not self._text.endswith(tag.end):
            return None
        found = tag.pattern.fullmatch(self._text.removesuffix(tag.end))
        if found is None:
            raise Malformed
        self._text = ""
        return found

    def _before_call(self, text: str, at: int) -> int:
        closes = self._form.section_closes if self.safe else ()
        found = self._literal(text, at, self._form.call.start, *closes)
        if found in closes:
            self.safe, self.done = self.position + 1, True
        elif found:
            self._next = self._in_name
        return at + 1

    def _in_name(self, text: str, at: int) -> int:
        found = self._header(text, at, self._form.call)
        if found is None:
            return at + 1
        name = found["name"].strip()
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
        found = self._literal(text, at, self._form.parameter.start, self._form.call_close)
        if found == self._form.call_close:
            self.events.append(("arguments", "}"))
            self._call_ended(1)
            self._next = self._before_call
            self.done = not (self._in_section and self._form.section_closes)
        elif found:
            self._next = self._in_key
        return at + 1

    def _in_key(self, text: str, at: int) -> int:
        found = self._header(text, at, self._form.parameter)
        if found is not None:
            groups = found.groupdict()
            self._key, self._kind = groups["key"], groups.get("kind") or ""
            self._value, self._tail, self._close = [], "", self._form.parameter_close
            self._is_open = False
            self._next = self._in_value
        return at + 1

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
        found = window.find(close)
        if found >= 0:
            self._value.append(window[:found])
            end = at - len(self._tail) + found + len(close)
        elif (found := text.find(close, at)) >= 0:
            self._value.append(self._tail + text[at:found])
            end = found + len(close)
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
        if self._kind and self._kind != "auto":
            return typed(raw, frozenset())
        return typed(raw, kinds_of(properties_of(self._schema).get(self._key), self._schema))


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _tag(start: str, end: str, pattern: str) -> Tag:
    return Tag(start=start, end=end, pattern=re.compile(pattern, re.DOTALL))


_QWEN_CALL = _tag("<function=", ">", r"(?P<name>[^\s<>=]+)")
_QWEN_PARAMETER = _tag("<parameter=", ">", r"(?P<key>[^<>\n]+)")
_NAMED_CALL = _tag('<invoke name="', '">', r"(?P<name>[^\"<>\n]+)")

QWEN_CODER = TaggedCalls(
    writer=TaggedText(
        head="<tool_call>\n<function=",
        name_end=">\n",
        key_head="<parameter=",
        key_end=">\n",
        value_end="\n</parameter>\n",
        tail="</function>\n</tool_call>",
        between="\n",
    ),
    openers=("<tool_call>", "<function="),
    sections=("<tool_call>",),
    section_closes=("</tool_call>",),
    call=_QWEN_CALL,
    call_close="</function>",
    parameter=_QWEN_PARAMETER,
    parameter_close="</parameter>",
    trims=True,
    or_json=True,
    known_only=("<function=",),
    marks=("</tool_call>",),
)
"""Qwen3-Coder, Qwen3.5, Nemotron 3, StepFun: a line for each tag and each value."""

SEED = TaggedCalls(
    writer=TaggedText(
        head="<seed:tool_call>\n<function=",
        name_end=">\n",
        key_head="<parameter=",
        key_end=">",
        value_end="</parameter>\n",
        tail="</function>\n</seed:tool_call>",
        between="\n",
    ),
    openers=("<seed:tool_call>",),
    sections=("<seed:tool_call>",),
    section_closes=("</seed:tool_call>",),
    call=_QWEN_CALL,
    call_close="</function>",
    parameter=_QWEN_PARAMETER,
    parameter_close="</parameter>",
    marks=("</seed:tool_call>",),
)

GLM = TaggedCalls(
    writer=TaggedText(
        head="<tool_call>",
        name_end="\n",
        key_head="<arg_key>",
        key_end="</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
        tail="</tool_call>",
        between="\n",
    ),
    openers=("<tool_call>",),
    sections=("<tool_call>",),
    call=_tag("", "<", r"\s*(?P<name>[\w.:/-]+)\s*"),
    call_close="</tool_call>",
    parameter=_tag("<arg_key>", "<arg_value>", r"(?P<key>.*)</arg_key>\s*"),
    parameter_close="</arg_value>",
    or_json=True,
    marks=("</tool_call>",),
)
"""GLM, Ling, Spark: a name, then pairs of keys and values."""

MINIMAX = TaggedCalls(
    writer=TaggedText(
        start="<minimax:tool_call>\n",
        head='<invoke name="',
        name_end='">\n',
        key_head='<parameter name="',
        key_end='">',
        value_end="</parameter>\n",
        tail="</invoke>\n",
        end="</minimax:tool_call>",
    ),
    openers=("<minimax:tool_call>",),
    sections=("<minimax:tool_call>",),
    section_closes=("</minimax:tool_call>",),
    call=_NAMED_CALL,
    call_close="</invoke>",
    parameter=_tag('<parameter name="', '">', r"(?P<key>[^\"<>\n]+)"),
    parameter_close="</parameter>",
    marks=("</minimax:tool_call>", "[e~["),
)

DSML = TaggedCalls(
    writer=TaggedText(
        start="<｜DSML｜function_calls>\n",
        head='<｜DSML｜invoke name="',
        name_end='">\n',
        key_head='<｜DSML｜parameter name="',
        key_end='" string="false">',
        key_ends=(("string", '" string="true">'),),
        value_end="</｜DSML｜parameter>\n",
        tail="</｜DSML｜invoke>\n",
        end="</｜DSML｜function_calls>",
    ),
    openers=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
    sections=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
    section_closes=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    call=_tag('<｜DSML｜invoke name="', '">', r"(?P<name>[^\"<>\n]+)"),
    call_close="</｜DSML｜invoke>",
    parameter=_tag(
        '<｜DSML｜parameter name="', ">", r"(?P<key>[^\"\n]+)\"(?:\s+string=\"(?P<kind>true|false)\")?"
    ),
    parameter_close="</｜DSML｜parameter>",
    marks=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", "<｜end▁of▁sentence｜>"),
)
"""DeepSeek V3.2 and V4, whose tags say whether a value is a string."""

MINICPM = TaggedCalls(
    writer=TaggedText(
        head='<function name="',
        name_end='">',
        key_head='<param name="',
        key_end='">',
        value_end="</param>",
        tail="</function>",
        between="\n",
    ),
    openers=('<function name="',),
    call=_tag('<function name="', '">', r"(?P<name>[^\"<>\n]+)"),
    call_close="</function>",
    parameter=_tag('<param name="', '">', r"(?P<key>[^\"<>\n]+)"),
    parameter_close="</param>",
    cdata=True,
    known_only=('<function name="',),
)

KIMI_K3 = TaggedCalls(
    writer=TaggedText(
        start="<|open|>tools<|sep|>",
        head='<|open|>call tool="',
        name_end='" index="1"<|sep|>',
        key_head='<|open|>argument key="',
        key_end='" type="number"<|sep|>',
        key_ends=tuple(
            (kind, f'" type="{kind}"<|sep|>') for kind in ("string", "boolean", "object", "array", "null")
        ),
        value_end="<|close|>argument<|sep|>",
        tail="<|close|>call<|sep|>",
        end="<|close|>tools<|sep|>",
    ),
    openers=("<|open|>call ",),
    call=_tag("<|open|>call ", "<|sep|>", r"tool=\"(?P<name>[^\"]+)\".*"),
    call_close="<|close|>call<|sep|>",
    parameter=_tag(
        "<|open|>argument ", "<|sep|>", r"key=\"(?P<key>[^\"]*)\"(?:\s+type=\"(?P<kind>\w+)\")?.*"
    ),
    parameter_close="<|close|>argument<|sep|>",
    marks=(
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
        "<|end_of_msg|>",
    ),
)

ATEM = TaggedCalls(
    writer=TaggedText(
        start="<atem:function_calls>\n",
        head='<atem:invoke name="',
        name_end='">\n',
        key_head='<atem:parameter name="',
        key_end='">',
        value_end="</atem:parameter>\n",
        tail="</atem:invoke>\n",
        end="</atem:function_calls>",
    ),
    openers=("<atem:function_calls>",),
    sections=("<atem:function_calls>",),
    section_closes=("</atem:function_calls>",),
    call=_tag('<atem:invoke name="', '">', r"(?P<name>[^\"<>\n]+)"),
    call_close="</atem:invoke>",
    parameter=_tag('<atem:parameter name="', '">', r"(?P<key>[^\"<>\n]+)"),
    parameter_close="</atem:parameter>",
)

HUNYUAN = TaggedCalls(
    writer=TaggedText(
        start="<tool_calls:opensource>\n",
        head="<tool_call:opensource>",
        name_end="<tool_sep:opensource>\n",
        key_head="<arg_key:opensource>",
        key_end="</arg_key:opensource>\n<arg_value:opensource>",
        value_end="</arg_value:opensource>\n",
        tail="</tool_call:opensource>\n",
        end="</tool_calls:opensource>",
    ),
    openers=("<tool_call:opensource>",),
    sections=("<tool_call:opensource>",),
    call=_tag("", "<tool_sep:opensource>", r"\s*(?P<name>[\w.:/-]+)\s*"),
    call_close="</tool_call:opensource>",
    parameter=_tag("<arg_key:opensource>", "<arg_value:opensource>", r"(?P<key>.*)</arg_key:opensource>\s*"),
    parameter_close="</arg_value:opensource>",
    marks=("<tool_calls:opensource>", "</tool_calls:opensource>"),
)
"""Hunyuan 3: as GLM, with a mark behind the name and one in each tag."""
