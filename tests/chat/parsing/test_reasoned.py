"""Reasoning and grammars together: the model thinks first, then goes on under the grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

import perdure
from perdure import GrammarError, Template
from perdure.chat.formats.registry import family, names
from perdure.chat.message import Tool, ToolCall
from perdure.chat.parsing.family import Family
from perdure.chat.parsing.reasoned import reasoned
from perdure.chat.parsing.reply_parser import parse_reply
from perdure.decode.sampling.grammar import Grammar, Grammars
from perdure.testing.toy import ToyModel

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOL = Tool.parse({"name": "count", "parameters": SCHEMA})
THINKING = [name for name in names() if family(name).reasoning is not None]
ANSWERS = {
    "schema": Grammar.json_schema(SCHEMA),
    "regex": Grammar.regex(r'\{"n": \d+\}'),
    "lark": Grammar.lark('start: "{" body\nbody: /"n": \\d+/ "}"\n'),
    "gbnf": Grammar.gbnf('root ::= "{" body "}"\nbody ::= "\\"n\\": " [0-9]+\n'),
}


def feed(grammar: Grammar, text: str) -> None:
    matcher = Grammars(ToyModel()).matcher(grammar)
    for byte in text.encode():
        matcher.mask()
        matcher.consume(byte)


def opened(chosen: Family) -> str:
    assert chosen.reasoning is not None
    return chosen.reasoning.open


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("name", THINKING)
def test_a_reply_thinks_first_and_answers_under_the_grammar(name: str, kind: str) -> None:
    """Where the prompt opens the reasoning, the JSON is in the text, not in the reasoning."""
    chosen = family(name)
    assert chosen.reasoning is not None
    grammar = reasoned(ANSWERS[kind], chosen, "opened", is_call=False, control={})
    text = f"Hm, {{}}.{chosen.reasoning.close}{chosen.restart}{chosen.answer_open}" + '{"n": 7}'
    feed(grammar, text)
    made = parse_reply(chosen, text, prompt=opened(chosen))
    assert made.content == '{"n": 7}'
    assert (made.reasoning or "").endswith("Hm, {}.")
    hidden = parse_reply(chosen, text, prompt=opened(chosen), reasoning="hide")
    assert (hidden.content, hidden.reasoning) == ('{"n": 7}', None)
    with pytest.raises(GrammarError):
        feed(grammar, text.replace("7", "seven"))


@pytest.mark.parametrize("name", THINKING)
def test_a_required_call_comes_after_the_reasoning(name: str) -> None:
    chosen = family(name)
    assert chosen.reasoning is not None
    assert chosen.calls is not None
    call = chosen.grammar([TOOL], parallel=False, control={})
    grammar = reasoned(call, chosen, "opened", is_call=True, control={})
    written = chosen.calls.writer.write([ToolCall(id="", name="count", arguments='{"n": 7}')])
    text = f"Hm.{chosen.reasoning.close}{chosen.restart}{written}"
    feed(grammar, text)
    made = parse_reply(chosen, text, tools=[TOOL], prompt=opened(chosen))
    assert [(each.name, each.parsed) for each in made.tool_calls] == [("count", {"n": 7})]
    assert (made.reasoning or "").endswith("Hm.")


@pytest.mark.extension("families")
def test_an_answer_of_gpt_oss_is_in_its_final_channel() -> None:
    chosen = family("harmony")
    grammar = reasoned(ANSWERS["schema"], chosen, "none", is_call=False, control={})
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for before in ("", thought):
        text = before + '<|channel|>final<|message|>{"n": 7}'
        feed(grammar, text)
        assert parse_reply(chosen, text).content == '{"n": 7}'
    with pytest.raises(GrammarError):
        feed(grammar, '{"n": 7}')


def test_without_reasoning_a_grammar_stays_as_it_is() -> None:
    for name in ("qwen3", "hermes"):
        assert (
            reasoned(ANSWERS["schema"], family(name), "none", is_call=False, control={}) is ANSWERS["schema"]
        )


OPENS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}{# <tool_call> #}"
)


@pytest.mark.parametrize("wanted", ["schema", "call"])
def test_a_budget_ends_the_reasoning_and_the_answer_is_held_to_its_grammar(wanted: str) -> None:
    asked: dict[str, Any] = {"schema": SCHEMA}
    if wanted == "call":
        asked = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    with perdure.open(ToyModel(), n_ctx=1024, slots=1, template=Template(OPENS)) as rt:
        for seed in range(3):
            reply = rt.chat(
                [{"role": "user", "content": "Count."}],
                reasoning_budget=8,
                max_tokens=400,
                seed=seed,
                temperature=1.0,
                **asked,
            )
            assert reply.reasoning
            if wanted == "schema":
                assert type(json.loads(reply.text)["n"]) is int
            else:
                assert reply.tool_calls[0].name == "count"
                assert reply.problems == ()
