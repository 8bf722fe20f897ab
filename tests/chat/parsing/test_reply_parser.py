"""Replies read as they come: the same whatever the cuts, no marker shown, nothing else lost."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat.conversations import CONVERSATIONS, TOOLS
from chat.parsing.replies import PARIS, RAW, Raw, message
from chat.templates.test_template import BOS, EOS, PUBLISHED
from perdure import InvalidInputError
from perdure.chat.formats import registry
from perdure.chat.formats.registry import detect, family, names
from perdure.chat.message import Message, parse_messages
from perdure.chat.parsing import family as module
from perdure.chat.parsing.family import Family, Markers
from perdure.chat.parsing.reply_parser import Part, ReplyParser, gather, parse_reply
from perdure.chat.template.template import Template
from perdure.decode.stops import TextStream


def parts(raw: Raw, pieces: Iterable[str], mode: Any = "capture") -> list[Part]:
    tools = TOOLS if raw.with_tools else ()
    parser = ReplyParser(family(raw.family), reasoning=mode, tools=tools, thinking=raw.thinking)
    found = [part for piece in pieces for part in parser.push(piece)]
    return found + parser.finish()


def without_ids(made: Message) -> Message:
    return replace(made, tool_calls=tuple(replace(call, id="") for call in made.tool_calls))


def said(found: Sequence[Part]) -> Message:
    return without_ids(gather(found))


@pytest.mark.parametrize("raw", RAW, ids=str)
def test_a_reply_is_read_for_what_it_says(raw: Raw) -> None:
    assert said(parts(raw, [raw.text])) == message(raw)
    tools = TOOLS if raw.with_tools else ()
    markers = family(raw.family).reasoning
    prompt = markers.open if raw.thinking and markers is not None else ""
    whole = parse_reply(family(raw.family), raw.text, tools=tools, prompt=prompt)
    assert without_ids(whole) == message(raw)


@pytest.mark.parametrize("raw", RAW, ids=str)
def test_cut_at_every_byte_it_says_the_same_c8_c9(raw: Raw) -> None:
    """C8 and C9: every marker and every character is cut at every byte, and the pieces go through the
    decoder of text as a reply's do."""
    data = raw.text.encode()
    for mode in ("capture", "show", "hide"):
        whole = said(parts(raw, [raw.text], mode))
        for cut in range(len(data) + 1):
            stream = TextStream()
            pieces = [stream.push(data[:cut]), stream.push(data[cut:]), stream.finish()]
            assert said(parts(raw, pieces, mode)) == whole, cut


@pytest.mark.parametrize("raw", RAW, ids=str)
def test_one_character_at_a_time_it_says_the_same_c8(raw: Raw) -> None:
    assert said(parts(raw, raw.text)) == message(raw)


@given(st.sampled_from(RAW), st.lists(st.integers(0, 400), max_size=8), st.sampled_from(["show", "hide"]))
def test_cut_anywhere_it_says_the_same_c8(raw: Raw, cuts: list[int], mode: str) -> None:
    ends = [0, *sorted(cut for cut in cuts if cut < len(raw.text)), len(raw.text)]
    pieces = [raw.text[start:end] for start, end in pairwise(ends)]
    assert said(parts(raw, pieces)) == message(raw)
    assert said(parts(raw, pieces, mode)) == said(parts(raw, [raw.text], mode))


@pytest.mark.parametrize("raw", RAW, ids=str)
def test_no_marker_is_ever_shown_c8(raw: Raw) -> None:
    """C8. Arguments are another matter: a text in them may be anything."""
    marks = family(raw.family).marks - {"```tool_code\n"}
    for mode in ("capture", "show", "hide"):
        for pieces in ([raw.text], raw.text):
            made = gather(parts(raw, pieces, mode))
            shown = (made.content or "") + (made.reasoning or "")
            assert not [mark for mark in marks if mark in shown]


def is_marked(chosen: Family) -> bool:
    """Whether the same texts are marks of the family wherever they stand."""
    calls = chosen.calls
    shown = calls is not None and bool(calls.text_openers)
    channels = chosen.name in ("harmony", "gemma4", "muse")
    in_words = chosen.reasoning is not None and chosen.reasoning.opens_in_words
    return not (shown or channels or in_words or chosen.quotes_calls)


MARKED = [name for name in names() if is_marked(family(name))]
SCRAPS = [
    "a",
    " b ",
    "\n",
    "é🙂",
    "<",
    "[",
    "｜",
    '{"',
    '{"name": "f',
    "arguments",
    ":",
    ", ",
    "```",
    "]",
    "to=",
]


@st.composite
def soups(draw: st.DrawFn) -> tuple[Family, list[str]]:
    chosen = family(draw(st.sampled_from(MARKED)))
    marks = sorted(chosen.marks) or ["<x>"]
    cut = st.sampled_from(marks).flatmap(lambda mark: st.integers(1, len(mark)).map(lambda n: mark[:n]))
    return chosen, draw(st.lists(st.sampled_from(SCRAPS) | st.sampled_from(marks) | cut, max_size=12))


def without_marks(chosen: Family, text: str) -> str:
    marks = sorted(chosen.marks, key=len, reverse=True)
    kept = re.sub("|".join(map(re.escape, marks)), "", text) if marks else text
    return re.sub(r"[ \t\r\n]", "", kept)


@given(soups(), st.booleans(), st.sampled_from(["capture", "show"]))
def test_all_but_markers_arrives_once_and_in_order_c8(
    soup: tuple[Family, list[str]], thinking: bool, mode: Any
) -> None:
    """C8, on texts that hold no whole call: what is not a marker comes out in the order it went in."""
    chosen, pieces = soup
    parser = ReplyParser(chosen, reasoning=mode, tools=TOOLS, thinking=thinking)
    found = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    arrived = "".join(part.text for part in found if part.kind != "call")
    assert re.sub(r"[ \t\r\n]", "", arrived) == without_marks(chosen, "".join(pieces))


@given(soups(), st.booleans())
def test_any_soup_is_read_the_same_in_one_piece_and_in_many_c8(
    soup: tuple[Family, list[str]], thinking: bool
) -> None:
    chosen, pieces = soup
    text = "".join(pieces)
    for cut in (pieces, [text], list(text)):
        parser = ReplyParser(chosen, tools=TOOLS, thinking=thinking)
        found = [part for piece in cut for part in parser.push(piece)] + parser.finish()
        markers = chosen.reasoning
        prompt = markers.open if thinking and markers is not None else ""
        assert said(found) == without_ids(parse_reply(chosen, text, tools=TOOLS, prompt=prompt))


def test_markers_would_show_without_the_holding_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has teeth: with nothing held back, a cut marker is shown."""
    raw = next(each for each in RAW if each.text.startswith("<think>\nHm, so."))
    first = module.MarkerScanner.first

    def careless(self: module.MarkerScanner, text: str) -> tuple[int, str]:
        end, marker = first(self, text)
        return (end, marker) if marker else (len(text), "")

    monkeypatch.setattr(module.MarkerScanner, "first", careless)
    assert said(parts(raw, raw.text)) != message(raw)


# Reasoning.


def test_reasoning_is_captured_shown_or_hidden() -> None:
    text = "<think>\nHm.\n</think>\n\nHello!"
    qwen = family("qwen3")
    captured = parse_reply(qwen, text)
    shown, hidden = parse_reply(qwen, text, reasoning="show"), parse_reply(qwen, text, reasoning="hide")
    assert (captured.content, captured.reasoning) == ("Hello!", "Hm.")
    assert (shown.content, shown.reasoning) == ("Hm.\n\n\nHello!", None)
    assert (hidden.content, hidden.reasoning) == ("Hello!", None)
    with pytest.raises(InvalidInputError, match="one of show, hide, capture"):
        ReplyParser(qwen, reasoning="keep")  # type: ignore[arg-type]


def test_a_reader_tells_whether_it_is_in_reasoning() -> None:
    parser = ReplyParser(family("qwen3"), thinking=True)
    states = [parser.thinking]
    for piece in ("Hm.</thi", "nk>", "Hello", "<think>"):
        parser.push(piece)
        states.append(parser.thinking)
    assert states == [True, True, False, False, True]
    assert not ReplyParser(family("hermes"), thinking=True).thinking


def test_a_budgets_end_closes_the_reasoning_of_every_family() -> None:
    """Whoever ends it early pushes the closing marker as the model would have written it."""
    for name in names():
        markers = family(name).reasoning
        if markers is None:
            continue
        parser = ReplyParser(family(name), thinking=True)
        parser.push("Hm. And then")
        parser.push(markers.close)
        assert not parser.thinking
        assert gather([*parser.push("Hello"), *parser.finish()]).content == "Hello"


# Calls as they come.


def test_a_reply_that_is_made_again_has_the_same_ids_of_calls() -> None:
    """Where they are made of something; else each is drawn."""
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'

    def ids(made_of: str) -> list[str]:
        parser = ReplyParser(family("hermes"), tools=TOOLS, call_ids=made_of)
        return [part.id for part in [*parser.push(call + call), *parser.finish()] if part.id]

    assert len({*ids("a"), *ids("b"), *ids(""), *ids("")}) == 8
    assert ids("a") == ids("a")
    assert all(re.fullmatch("call_[0-9a-f]{24}", each) for each in ids("a"))


def test_arguments_arrive_bit_by_bit_behind_their_name() -> None:
    parser = ReplyParser(family("hermes"), tools=TOOLS)
    assert parser.push('<tool_call>\n{"name": "search", "argum') == []
    first = parser.push('ents": {"q')
    assert [(part.kind, part.name, part.text, part.call) for part in first] == [("call", "search", '{"q', 0)]
    assert re.fullmatch("call_[0-9a-f]{24}", first[0].id)
    assert parser.push('uery": 1}') == [Part("call", 'uery": 1}')]
    assert parser.push("}\n</tool_call>\n") == []
    second = parser.push('<tool_call>{"name": "f", "arguments": {}}')
    assert [(part.call, part.name, part.text) for part in second] == [(1, "f", "{}")]
    assert second[0].id != first[0].id


def test_a_call_that_turns_out_to_be_none_is_taken_back_and_its_text_follows() -> None:
    parser = ReplyParser(family("hermes"), tools=TOOLS)
    started = parser.push('Look: <tool_call>{"name": "search", "arguments": {"query": "a')
    assert [part.kind for part in started] == ["text", "call"]
    ended = parser.push('", }') + parser.finish()
    assert ended[0] == Part("call", call=0, dropped=True)
    made = gather(started + ended)
    assert made.tool_calls == ()
    assert made.content == 'Look: {"name": "search", "arguments": {"query": "a", }'


@pytest.mark.extension("families")
def test_calls_of_one_reply_have_ids_of_their_own() -> None:
    made = [
        parse_reply(family("mistral"), f'[TOOL_CALLS][{{"name": "f", "arguments": {PARIS[1]}}}]')
        for _ in range(50)
    ]
    assert len({each.tool_calls[0].id for each in made}) == 50


# Through a template and back.

ENDS = {
    "qwen-2.5": "<|im_end|>",
    "qwen-3": "<|im_end|>",
    "llama-3.1": "<|eot_id|>",
    "mistral-v3-tekken": EOS,
    "mistral-v7": EOS,
    "deepseek-r1": "<｜end▁of▁sentence｜>",
    "granite-3.3": "<|end_of_text|>",
    "phi-4-mini": "<|end|>",
    "command-r7b": "<|END_OF_TURN_TOKEN|>",
    "gpt-oss": "<|call|>",
}
KEEPS_REASONING = ("qwen-3", "mistral-v7", "command-r7b", "gpt-oss")


@pytest.mark.extension("families")
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("conversation", ["call", "call and text", "reasoned call", "parallel"])
def test_what_a_template_writes_is_read_back(name: str, conversation: str) -> None:
    messages = list(CONVERSATIONS[conversation])
    while messages[-1].role != "assistant":
        messages.pop()
    answer = messages[-1]
    if len(answer.tool_calls) > 1 and name in ("llama-3.1", "gpt-oss"):
        pytest.skip("one call at once")
    if answer.reasoning and name not in KEEPS_REASONING:
        answer = replace(answer, reasoning=None)
    if name in ("command-r7b", "gpt-oss", "llama-3.1", "mistral-v3-tekken"):
        answer = replace(answer, content=None)
    if name == "mistral-v3-tekken":
        # It puts the system message before the last user message only while that is last.
        messages = [each for each in messages if each.role != "system"]
    template = Template(PUBLISHED[name], bos=BOS, eos=EOS)
    prompt = template.render(messages[:-1])
    text = template.render([*messages[:-1], answer], add_generation_prompt=False)
    if name == "deepseek-r1":
        prompt = prompt.removesuffix("<think>\n")
    assert text.startswith(prompt)
    raw = text[len(prompt) : text.rindex(ENDS[name])]
    made = parse_reply(detect(template.source), raw, tools=TOOLS)
    assert made.content == answer.content
    assert made.reasoning == answer.reasoning
    assert [(call.name, call.parsed) for call in made.tool_calls] == [
        (call.name, call.parsed) for call in answer.tool_calls
    ]


# Families of one's own.


def test_a_family_of_ones_own_is_read_and_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    mine = Family("mine", Markers(open="<<", close=">>"), None, signs=("<<mine>>",))
    registry.register(mine)
    assert detect("{# <<mine>> <tool_call> #}") is mine
    made = parse_reply(mine, "<<Hm.>> Hi")
    assert (made.content, made.reasoning) == ("Hi", "Hm.")


@pytest.mark.parametrize(
    ("markers", "words"),
    [
        (Markers(open="<a", close="<ab"), "'<a' is the beginning of '<ab'"),
        (Markers(open="", close="b"), "empty or starts with space"),
        (Markers(open=" a", close="b"), "empty or starts with space"),
    ],
)
def test_markers_that_cannot_be_told_apart_are_refused(markers: Markers, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Family("mine", markers)


MARK = "]<]minimax[>["


@pytest.mark.extension("families")
@pytest.mark.parametrize(
    "text",
    [
        f"a {MARK}b",
        f"a b{MARK}",
        f"a b{MARK}<tool_",
        f'a b{MARK}<tool_call>\n{MARK}<invoke name="f">{MARK}<x',
        f"a {MARK}<tool_call>{MARK}b{MARK}</tool_call>",
    ],
)
def test_a_mark_that_others_begin_with_is_not_shown(text: str) -> None:
    """C8: wherever the text is cut, and whatever it ends with."""
    whole = parse_reply(family("minimax-m3"), text)
    assert MARK not in (whole.content or "")
    for at in range(len(text) + 1):
        parser = ReplyParser(family("minimax-m3"))
        made = gather([*parser.push(text[:at]), *parser.push(text[at:]), *parser.finish()])
        assert made == whole, at


def test_parse_messages_takes_what_a_reader_makes() -> None:
    made = parse_reply(family("qwen3"), RAW[0].text)
    assert parse_messages([made.to_dict()]) == (made,)
