"""Every tool-call format: what is written is read back, whatever it holds and wherever it is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perdure import Tool, ToolCall
from perdure.chat.formats.registry import family, names
from perdure.chat.parsing import ID, INDEX
from perdure.chat.parsing.family import Family
from perdure.chat.parsing.reply_parser import ReplyParser, gather

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "on": {"type": "boolean"},
        "words": {"type": "array", "items": {"type": "string"}},
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "floor": {"type": ["integer", "null"]}},
            "required": ["city", "floor"],
        },
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "from": {"type": "string"},
        "max-size": {"type": "integer"},
    },
    "required": ["text"],
}
TOOL = Tool.parse({"name": "do_it", "parameters": SCHEMA})
SCRAPS = [
    *sorted({mark for name in names() for mark in family(name).marks}),
    *('"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", "\n", "\n\n", " ", "\t", "é", "한🙂"),
    *("null", "true", "1", "</", "<", "do_it(text=", "```", "\\u003c", "\\n", "<![CDATA[", "]]>", "\u2028"),
]


def ends_of(chosen: Family) -> tuple[str, ...]:
    """What a bare string cannot hold, since it ends there."""
    assert chosen.calls is not None
    writer = chosen.calls.writer
    if chosen.name == "muse":
        return ("</atem:parameter>",)
    if chosen.name == "gemma4":
        return ('<|"|>',)
    if chosen.name == "minimax-m3":
        return ("]<]minimax[>[",)
    # Of those that write values bare, between tags.
    value_end = getattr(writer, "value_end", None)
    return () if value_end is None else (value_end.strip(), "<![CDATA[")


def texts(chosen: Family) -> st.SearchStrategy[str]:
    made = st.lists(st.sampled_from(SCRAPS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5))
    return made.map("".join).filter(lambda text: not any(end in text for end in ends_of(chosen)))


def arguments(chosen: Family) -> st.SearchStrategy[dict[str, Any]]:
    text = texts(chosen)
    whole = st.integers(-(10**12), 10**12)
    return st.fixed_dictionaries(
        {"text": text},
        optional={
            "count": whole,
            "share": st.floats(allow_nan=False, allow_infinity=False),
            "on": st.booleans(),
            "words": st.lists(text, max_size=3),
            "place": st.fixed_dictionaries({"city": text, "floor": whole | st.none()}),
            "either": whole | st.none(),
            "from": text,
            "max-size": whole,
        },
    )


@pytest.mark.parametrize("name", names())
def test_any_arguments_are_read_back_as_they_were_written(name: str) -> None:
    chosen = family(name)
    assert chosen.calls is not None
    writer = chosen.calls.writer

    @settings(max_examples=25, deadline=None)
    @given(st.lists(arguments(chosen), min_size=1, max_size=2), st.lists(st.integers(0, 2000), max_size=6))
    @example([{"text": f"a{ID}b{INDEX}"}], [])
    @example([{"text": "a\rb", "words": ["\r", '"\r', "\r\n'"]}], [])
    def check(given_arguments: list[dict[str, Any]], cuts: list[int]) -> None:
        calls = [
            ToolCall(id="", name="do_it", arguments=json.dumps(each, ensure_ascii=False))
            for each in given_arguments
        ]
        text = writer.write(calls)
        parser = ReplyParser(chosen, prompt=chosen.prompt_opener, tools=[TOOL])
        ends = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
        parts = [part for start, end in pairwise(ends) for part in parser.push(text[start:end])]
        made = gather(parts + parser.finish())
        assert [(call.name, call.parsed) for call in made.tool_calls] == [
            ("do_it", each) for each in given_arguments
        ]
        assert not made.content

    check()


@pytest.mark.parametrize("name", names())
def test_an_argument_is_given_out_before_the_next_is_written(name: str) -> None:
    """Streamed argument by argument: what a caller has when the second value begins holds the first."""
    chosen = family(name)
    assert chosen.calls is not None
    given_arguments = {"text": "first", "words": ["one"], "from": "second"}
    call = ToolCall(id="abcdefgh1", name="do_it", arguments=json.dumps(given_arguments))
    written = chosen.calls.writer.write([call])
    parser = ReplyParser(chosen, prompt=chosen.prompt_opener, tools=[TOOL])
    so_far = "".join(part.text for part in parser.push(written[: written.index("second")]))
    # An id may stand behind the arguments of these, which wait for it.
    waits = name in ("mistral", "mistral-thinking")
    assert ('"first"' in so_far and '["one"]' in so_far) != waits
