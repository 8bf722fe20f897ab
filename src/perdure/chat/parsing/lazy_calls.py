"""Lazy grammar of tool calls: a reply is free up to a call's opener, and held to the tools from there on.

    I need the weather. <tool_call>\\n{"name": "get_weather", "arguments": {"city": "Paris"}}\\n</tool_call>
    free                held: the name is a tool's, the arguments fit its schema

An opener is held where the family's parser reads behind it what the writer writes there. One that also opens
reasoning or a message to the user is free, and so are formats whose calls have no opener, or whose grammar
does not hold arguments to all that a schema says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perdure.chat.message import Tool, ToolCall
from perdure.chat.parsing import Malformed
from perdure.chat.parsing.call_writer import CallFormat, CallWriter, marks_in
from perdure.chat.parsing.family import Family
from perdure.chat.parsing.rules import Rules, pattern_of

if TYPE_CHECKING:
    from perdure.decode.sampling.grammar import Grammar

_PROBE = Tool(name="probe", parameters={"type": "object", "properties": {"n": {"type": "integer"}}})
_CALL = ToolCall(id="a1b2c3d4e", name=_PROBE.name, arguments='{"n": 1}')


@dataclass(frozen=True, slots=True)
class HeldOpener:
    """An opener, and the one that the writer writes in its place; empty: it writes none."""

    text: str
    written: str
    closes: bool
    """Whether the calls behind it have an end, so that other text may follow."""


def held_openers(family: Family, writer: CallWriter) -> tuple[HeldOpener, ...]:
    """The openers of a family behind which calls are held to their tools."""
    calls = family.calls
    if calls is None or family.prompt_opener or not writer.holds_all:
        return ()
    return tuple(_held(family, calls, writer))


def _held(family: Family, calls: CallFormat, writer: CallWriter) -> Iterator[HeldOpener]:
    reasoning = () if family.reasoning is None else (family.reasoning.open,)
    others = (*reasoning, family.restart, family.answer_open, *family.answers)
    before = writer.start + writer.head
    own = next((opener for opener in calls.openers if opener in before), "")
    for opener in calls.openers:
        if any(other.startswith(opener) for other in others):
            continue
        if opener in calls.text_openers and not opener.startswith("<"):
            # Words that any text may have.
            continue
        if (marks := marks_in(opener)) and marks != (opener,):
            # Control tokens and words: that it begins is not certain until it ends.
            return
        written = opener if opener in before else own
        if (closes := _closes(calls, writer, opener, written)) is not None:
            yield HeldOpener(opener, written, closes)


def _closes(calls: CallFormat, writer: CallWriter, opener: str, written: str) -> bool | None:
    """Whether the parser knows the end of a call behind an opener; None where it reads no call there."""
    parser = calls.parser(opener, (_PROBE,))
    text = writer.write((_CALL,))
    with suppress(Malformed):
        parser.push(text.partition(written)[2] if written else text)
    if ("name", _PROBE.name) not in parser.events or ("end", "") not in parser.events:
        return None
    if parser.done:
        return True
    try:
        parser.push("\n{")
    except Malformed:
        return True
    return parser.done


def lazy_calls(
    family: Family, writer: CallWriter, tools: Sequence[Tool], *, parallel: bool, control: Mapping[str, int]
) -> Grammar | None:
    """What holds the calls of a reply to `tools`. None where the family has no opener to hold them from.

    `control` maps those of the family's marks that are control tokens of the model to their ids.
    """
    from perdure.decode.sampling.matcher import Openers

    held = held_openers(family, writer)
    if not held or not tools:
        return None
    rules = Rules(control)
    patterns = {each.text: pattern_of(each.text) for each in held}
    any_opener = "|".join(patterns.values())
    free = rules.terminal(f"/(?s:.+)/ & ~/(?s:.*)({any_opener})(?s:.*)/")
    goes_on = parallel and all(each.closes for each in held)
    calls = []
    for each in held:
        mine, others = patterns[each.text], [p for text, p in patterns.items() if text != each.text]
        excluded = "|".join([f"{mine}(?s:.+)", *others])
        opened = rules.terminal(f"/(?s:.*){mine}/ & ~/(?s:.*)({excluded})(?s:.*)/")
        if each.text in control:
            opened = f"({opened} | {free}? {rules.literal(each.text)})"
        calls.append(f"{opened} {writer.behind(rules, tools, each.written, parallel=parallel)}")
    marks = [f"{free}? <[{token}]>" for mark, token in control.items() if mark not in patterns]
    call = rules.rule(" | ".join(calls))
    if goes_on:
        start = f"({' | '.join([call, *marks])})* {free}?"
    else:
        start = f"({' | '.join(marks)})* ({call} | {free})?" if marks else f"({call} | {free})?"
    quotes = (family.reasoning.open, family.reasoning.close) if family.reasoning is not None else ()
    openers = Openers(tuple(patterns), goes_on, quotes if family.quotes_calls else ())
    return rules.grammar(start, openers)
