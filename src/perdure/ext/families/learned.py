"""Learning a template's own form of calls: render some, and cut what stands around names and values out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from perdure import Message, PerdureError, Tool, ToolCall
from perdure.ext.families.tagged import TaggedCalls, TaggedText
from perdure.spi.chat import (
    ID,
    INDEX,
    UNGUARDED,
    CallForm,
    CallText,
    CallWriter,
    Family,
    Malformed,
    MessageNormaliser,
    Template,
    parse_reply,
    shared_length,
)

_NAMES = ("zqone", "zqtwo")
_IDS = ("zq1234567", "zq7654321")
_KEYS = ("zqkey", "zqlast")
_TEXT = "zqtext"
_KINDS: dict[str, Any] = {
    "string": "zqval",
    "integer": 48151,
    "number": 48151.5,
    "boolean": True,
    "array": [48151],
    "object": {"zqin": 48151},
    "null": None,
}
_TOOLS = tuple(
    Tool(
        name=name,
        parameters={
            "type": "object",
            "properties": {key: {} for key in _KEYS},
        },
    )
    for name in _NAMES
)


def learn(template: Template, family: Family) -> CallForm:
    """The form of a template's calls, or the family's where it cannot be learned."""
    probe = _Probe(template, family)
    fallback = family.writer
    learned = None
    shown = probe.shows_calls
    try:
        learned = probe.json_text() or probe.tagged_text()
    except (PerdureError, Malformed, ValueError):
        learned = None
    for writer in (learned, fallback):
        if writer is not None and probe.is_exact(writer, 1):
            return CallForm(writer, shown and writer is learned, True, probe.is_exact(writer, 2), shown)
    return CallForm(fallback, False, False, False, shown)


def _calls(arguments: Sequence[dict[str, Any]]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(id=call_id, name=name, arguments=json.dumps(each))
        for call_id, name, each in zip(_IDS, _NAMES, arguments, strict=False)
    )


class _Probe:
    """Renders calls as replies."""

    def __init__(self, template: Template, family: Family) -> None:
        self._template = template
        self._family = family
        self._normaliser = MessageNormaliser(template, family.writer, UNGUARDED)
        shown = self._normaliser.capabilities(with_tools=True)
        self.shows_calls = shown.calls
        self._most = 2 if shown.two_calls or not shown.calls else 1

    def _render(self, *messages: Message, reply_follows: bool = True) -> str:
        normalised = self._normaliser.normalise(messages, _TOOLS)
        return self._template.render(
            normalised.messages,
            tools=normalised.tools,
            add_generation_prompt=reply_follows,
            **normalised.variables,
        )

    def reply(self, calls: Sequence[ToolCall], text: str = "") -> str | None:
        """What a reply with these calls looks like behind its prompt, up to the end of the turn; None where
        a template does not write so many."""
        if len(calls) > self._most:
            return None
        question = Message(role="user", content="zquser")
        answer = Message(role="assistant", content=text or None, tool_calls=tuple(calls))
        # Templates that insist on what follows a call get that.
        results = [Message(role="tool", content="zqresult", tool_call_id=c.id, name=c.name) for c in calls]
        try:
            prompt = self._render(question)
            try:
                whole = self._render(question, answer, reply_follows=False)
            except PerdureError:
                whole = self._render(question, answer, *results, reply_follows=False)
        except PerdureError:
            return None
        start = self._start(prompt, whole)
        written = whole[start:]
        sought = calls[0].name if calls else text
        if sought not in written:
            return None
        markers = self._family.reasoning
        if markers is not None and markers.close in written.partition(sought)[0]:
            written = written.partition(markers.close)[2]
        return self._cut(written.lstrip("\n"), calls)

    def _start(self, prompt: str, whole: str) -> int:
        """Where the reply begins: at the end of the prompt, or before a mark of it that the reply lacks."""
        shared = shared_length(prompt, whole)
        mark = max(whole.rfind(char, 0, shared) for char in "<[")
        if shared < len(prompt) and mark >= 0 and not set(whole[mark:shared]) & set(">]\n"):
            return mark
        return shared

    def _cut(self, written: str, calls: Sequence[ToolCall]) -> str:
        """Without what ends the turn."""
        last = max((written.rfind(call.name) for call in calls), default=0)
        ends = [written.find(end, last) for end in (*self._family.ends, self._template.eos) if end]
        cuts = [end for end in ends if end >= 0]
        return written[: min(cuts)].rstrip("\n") if cuts else written.rstrip("\n")

    def is_exact(self, writer: CallWriter, count: int) -> bool:
        """Whether a writer writes what the template does, and the family reads it back."""
        arguments: list[dict[str, Any]] = [{_KEYS[0]: "zq val"}, {_KEYS[0]: "b", _KEYS[1]: "c"}][:count]
        calls = _calls(arguments)
        rendered = self.reply(calls)
        if rendered is None or writer.write(calls).strip("\n") != rendered:
            return False
        made = parse_reply(self._family, rendered, tools=_TOOLS, prompt=self._family.prompt_opener)
        return [(call.name, call.parsed) for call in made.tool_calls] == [
            (call.name, call.parsed) for call in calls
        ]

    # Learning.

    def json_text(self) -> CallText | None:
        """A name, and the arguments as JSON."""
        calls = _calls([{_KEYS[0]: "zqval"}, {_KEYS[0]: "zqval"}])
        one, two = self.reply(calls[:1]), self.reply(calls)
        for call_id in _IDS:
            one, two = one and one.replace(call_id, ID), two and two.replace(call_id, ID)
        json_of = calls[0].arguments
        if one is None or one.count(json_of) != 1 or one.count(_NAMES[0]) != 1:
            return None
        before, _, rest = one.partition(_NAMES[0])
        if json_of not in rest:
            return None
        middle, _, behind = rest.partition(json_of)
        ids = self._family.writer.id_pattern
        made = CallText(head=before, middle=middle, tail=behind, id_pattern=ids)
        if two is not None and two.count(json_of) == 2 and two.count(_NAMES[1]) == 1:
            between, _, rest = two.partition(json_of)[2].partition(_NAMES[1])
            plain, middle = middle, _indexed(middle, rest.partition(json_of)[0])
            made = replace(made, first_index=_first_index(plain, middle))
            made = replace(made, middle=middle, **_parted(before, between, behind))
        return made

    def tagged_text(self) -> TaggedText | None:
        """A name, and a tag for each argument."""
        if not isinstance(self._family.calls, TaggedCalls):
            return None
        value = _KINDS["string"]
        first, second = _KEYS
        one = self._required(_calls([{first: value, second: value}]))
        before, _, rest = one.partition(_NAMES[0])
        opened, _, rest = rest.partition(first)
        key_end, _, rest = rest.partition(value)
        middle, _, rest = rest.partition(second)
        behind = rest.partition(value)[2]
        key_head = _common_end(opened, middle)
        value_end = middle.removesuffix(key_head)
        made = TaggedText(
            head=before,
            name_end=opened.removesuffix(key_head),
            key_head=key_head,
            key_end=key_end,
            value_end=value_end,
            tail=behind.removeprefix(value_end),
            key_ends=self._key_ends(key_end),
        )
        if not behind.startswith(value_end):
            return None
        bare = self._required(_calls([{}])).partition(_NAMES[0])[2]
        if bare != made.name_end + made.tail and bare.endswith(made.tail):
            made = replace(made, name_end_bare=bare.removesuffix(made.tail))
        two = self.reply(_calls([{first: value}, {first: value}]))
        if two is None or two.count(_NAMES[1]) != 1:
            return made
        name_end = _indexed(opened, two.partition(_NAMES[1])[2].partition(first)[0]).removesuffix(key_head)
        made = replace(made, name_end=name_end, first_index=_first_index(opened, name_end))
        between = two.partition(value)[2].partition(_NAMES[1])[0].removeprefix(value_end)
        return replace(made, **_parted(before, between, made.tail))

    def _key_ends(self, usual: str) -> tuple[tuple[str, str], ...]:
        key_ends = []
        for kind, value in _KINDS.items():
            written = self._required(_calls([{_KEYS[0]: value}])).partition(_KEYS[0])[2]
            shown = value if isinstance(value, str) else json.dumps(value)
            if shown in written and (end := written.partition(shown)[0]) != usual:
                key_ends.append((kind, end))
        return tuple(key_ends)

    def _required(self, calls: Sequence[ToolCall]) -> str:
        written = self.reply(calls)
        if written is None:
            raise Malformed
        return written


def _parted(before: str, between: str, behind: str) -> dict[str, Any]:
    """What stands once before all calls, around each of them, between two, and once behind them all."""
    head = _common_end(before, between)
    rest = between.removesuffix(head)
    tail = rest[: shared_length(rest, behind)]
    return {
        "start": before.removesuffix(head) if head else before,
        "head": head,
        "tail": tail,
        "between": rest[len(tail) :],
        "end": behind[len(tail) :],
    }


def _indexed(first: str, second: str) -> str:
    """A text that has the number of its call in it, with a mark in the place of that number."""
    parts, others = re.split(r"(\d+)", first), re.split(r"(\d+)", second)
    if first == second or len(parts) != len(others):
        return first
    return "".join(INDEX if part != other else part for part, other in zip(parts, others, strict=True))


def _first_index(text: str, indexed: str) -> int:
    """The number that stood where the mark stands now."""
    at = indexed.find(INDEX)
    digits = re.match(r"\d+", text[at:]) if at >= 0 else None
    return int(digits[0]) if digits is not None else 0


def _common_end(first: str, second: str) -> str:
    size = shared_length(first[::-1], second[::-1])
    return first[len(first) - size :]
