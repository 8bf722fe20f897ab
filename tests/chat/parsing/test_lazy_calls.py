"""Calls that are valid by construction: text is free, and from a call's opener on a grammar holds it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import perdure
from chat.parsing.random_calls import drawn_reply, problems_of, random_tools, toy_free_text
from perdure import GrammarError, Template, Tool
from perdure.chat.formats.registry import family, names
from perdure.chat.parsing.lazy_calls import held_openers, lazy_calls
from perdure.decode.sampling.grammar import Grammars
from perdure.testing.toy import ToyModel

TEMPLATES = Path(__file__).parents[1] / "templates" / "llama.cpp"
HERMES = TEMPLATES / "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja"
LOOK = Tool.parse(
    {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["sea", "sky"]}, "n": {"type": "integer"}},
            "required": ["at"],
        },
    }
)
HELD = [name for name in names() if held_openers(family(name), family(name).writer)]
HELLO = [{"role": "user", "content": "Look!"}]


def model_of(name: str, *, with_marks: bool) -> tuple[ToyModel, dict[str, int]]:
    """A toy that has a family's marks as control tokens, or as plain text."""
    if not with_marks:
        return ToyModel(), {}
    marks = sorted(family(name).marks)
    model = ToyModel(marks=marks)
    return model, {mark: model.tokenize(mark, special=True, bos=False)[0] for mark in marks}


def draw_calls(name: str, count: int) -> None:
    for with_marks in (False, True):
        model, control = model_of(name, with_marks=with_marks)
        grammars = Grammars(model)
        for seed in range(count):
            draw = random.Random(f"{name} {with_marks} {seed}")
            tools = random_tools(draw)
            text = drawn_reply(family(name), tools, grammars, draw, control)
            if text is not None:
                assert problems_of(family(name), text, tools) == [], (seed, text, tools)


@pytest.mark.parametrize("name", HELD)
def test_a_call_that_is_drawn_at_random_fits_its_tool_r1(name: str) -> None:
    draw_calls(name, 2)


@pytest.mark.soak
@pytest.mark.parametrize("name", HELD)
def test_100000_calls_that_are_drawn_at_random_fit_their_tools_r1(name: str) -> None:
    draw_calls(name, 50_000 // len(HELD) + 1)


@pytest.mark.parametrize("name", HELD)
def test_text_is_free_before_a_call_and_behind_it(name: str) -> None:
    model, control = model_of(name, with_marks=False)
    grammar = lazy_calls(family(name), family(name).writer, [LOOK], parallel=True, control=control)
    assert grammar is not None
    assert grammar.openers is not None
    matcher = Grammars(model).lazy_matcher(grammar)
    draw = random.Random(name)
    for _ in range(50):
        for token in toy_free_text(draw).encode():
            assert matcher.allows(token)
            matcher.consume(token)
    matcher.consume(ord("."))
    asleep = not matcher.awake
    opener = grammar.openers.texts[0]
    for token in opener.encode():
        assert matcher.allows(token)
        matcher.consume(token)
    assert asleep
    assert matcher.awake
    assert not matcher.accepts_end


@pytest.mark.extension("families")
def test_formats_whose_calls_are_held_are_known() -> None:
    """docs/not_supported.md has the others."""
    others = (Path(__file__).parents[3] / "docs" / "not_supported.md").read_text()
    [line] = [line for line in others.splitlines() if "are not held" in line]
    free = {name for name in names() if not held_openers(family(name), family(name).writer)}
    assert {name for name in names() if f"`{name}`" in line} == free


def test_an_opener_in_quoted_reasoning_opens_nothing() -> None:
    """Reka quotes calls while it thinks."""
    reka = family("reka")
    grammar = lazy_calls(reka, reka.writer, [LOOK], parallel=True, control={})
    assert grammar is not None
    matcher = Grammars(ToyModel()).lazy_matcher(grammar)
    for byte in b"<think>I may write <tool_call> here.":
        matcher.consume(byte)
    asleep = not matcher.awake
    for byte in b"</think><tool_call>":
        matcher.consume(byte)
    assert asleep
    assert matcher.awake
    assert not matcher.allows(ord("x"))


# With the engine.


@pytest.fixture(
    params=[
        pytest.param(False, id="in process"),
        pytest.param(True, id="isolated", marks=pytest.mark.extension("workers")),
    ]
)
def rt(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    template = Template(HERMES.read_text(), bos="<s>", eos="<|im_end|>")
    source = (
        "ext.workers.engines:with_marks" if request.param else ToyModel(marks=["<tool_call>", "</tool_call>"])
    )
    with perdure.open(
        source, n_ctx=4096, slots=2, template=template, store=tmp_path, isolated=request.param
    ) as runtime:
        yield runtime


def opening(rt: Any, bias: float) -> dict[int, float]:
    [token] = rt.model.tokenize("<tool_call>", special=True, bos=False)
    return {token: bias}


def test_a_call_that_a_model_begins_fits_its_tool_r1(rt: Any) -> None:
    asked: dict[str, Any] = {"tools": [LOOK], "max_tokens": 300, "temperature": 1.0}
    for seed in range(4):
        single = rt.chat(HELLO, seed=seed, parallel_tool_calls=False, logit_bias=opening(rt, 90.0), **asked)
        assert [call.name for call in single.tool_calls] == ["look"]
        assert (single.problems, single.finish_reason) == ((), "tool_calls")
    free = rt.chat(HELLO, seed=0, unchecked_calls=True, logit_bias=opening(rt, 90.0), **asked)
    assert not free.tool_calls or free.problems


def test_who_names_a_function_gets_one_call(rt: Any) -> None:
    asked: dict[str, Any] = {"tools": [LOOK], "max_tokens": 300, "seed": 0, "temperature": 1.0}
    reply = rt.chat(HELLO, tool_choice="look", logit_bias=opening(rt, 90.0), **asked)
    assert (len(reply.tool_calls), reply.finish_reason) == (1, "tool_calls")


def test_a_reply_without_a_call_is_what_it_is_without_the_grammar_k5(rt: Any) -> None:
    asked: dict[str, Any] = {"tools": [LOOK], "max_tokens": 60, "temperature": 1.0}
    for seed in range(3):
        held, free = (
            rt.chat(HELLO, seed=seed, unchecked_calls=unchecked, logit_bias=opening(rt, -100.0), **asked)
            for unchecked in (False, True)
        )
        assert held.raw.tokens == free.raw.tokens


def test_a_call_is_the_same_warm_cold_and_with_guesses_k5(rt: Any) -> None:
    asked: dict[str, Any] = {"tools": [LOOK], "max_tokens": 200, "seed": 5, "logit_bias": opening(rt, 90.0)}
    replies = [rt.chat(HELLO, **asked), rt.chat(HELLO, **asked), rt.chat(HELLO, speculate=4, **asked)]
    assert replies[0].tool_calls
    assert {reply.raw.tokens for reply in replies} == {replies[0].raw.tokens}


def test_a_schema_that_calls_cannot_be_held_to_is_refused_before_any_work(rt: Any) -> None:
    tools: Sequence[Any] = [
        {"name": "pick", "parameters": {"properties": {"of": {"type": "array", "uniqueItems": True}}}}
    ]
    with pytest.raises(GrammarError, match=r"uniqueItems.*unchecked_calls"):
        rt.chat(HELLO, tools=tools, max_tokens=1)
    assert rt.chat(HELLO, tools=tools, max_tokens=1, unchecked_calls=True).raw.tokens
    assert rt.chat(HELLO, tools=tools, max_tokens=1, tool_choice="none").raw.tokens


def test_formats_of_an_application_and_keywords_that_say_nothing_are_no_reason_to_refuse_a_tool(
    rt: Any,
) -> None:
    """As pydantic, zod and generators of clients write them."""
    at = {"type": "integer", "format": "int64"}
    by_name = {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "string"},
    }
    tools = [
        {
            "name": "look",
            "parameters": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {"format": at, "by": by_name, "l": {"type": "array", "uniqueItems": False}},
                "required": ["format"],
            },
        }
    ]
    asked: dict[str, Any] = {"max_tokens": 400, "seed": 1, "parallel_tool_calls": False}
    reply = rt.chat(HELLO, tools=tools, logit_bias=opening(rt, 90.0), **asked)
    [call] = reply.tool_calls
    assert type(call.parsed["format"]) is int
