"""Families: which one a template is of, and grammars that hold a reply to a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import jsonschema
import pytest

import perdure
from chat.conversations import SEARCH, WEATHER
from chat.templates.test_template import PUBLISHED
from perdure import GrammarError, InvalidInputError, Model, Runtime
from perdure.chat.formats.registry import detect, family, names, register
from perdure.chat.message import Tool, ToolCall
from perdure.chat.parsing.family import Family
from perdure.chat.parsing.reply_parser import parse_reply
from perdure.chat.template.template import Template
from perdure.decode.sampling.grammar import Grammars
from perdure.decode.sampling.matcher import Matcher
from perdure.testing.toy import ToyModel

EXPECTED = {
    "chatml": "chatml",
    "command-r7b": "command",
    "deepseek-r1": "deepseek",
    "falcon-3": "hermes",
    "gemma-3": "gemma",
    "gpt-oss": "harmony",
    "granite-3.3": "granite",
    "llama-3.1": "llama3",
    "llama-3.2": "llama3",
    "mistral-v3-tekken": "mistral",
    "mistral-v7": "magistral",
    "olmo-2": "generic",
    "phi-4": "chatml",
    "phi-4-mini": "phi",
    "qwen-2.5": "hermes",
    "qwen-3": "qwen3",
    "smollm2": "chatml",
    "smollm3": "qwen3",
    "zephyr": "generic",
}


@pytest.mark.extension("families")
def test_every_template_is_of_the_family_of_its_marks() -> None:
    assert {name: detect(source).name for name, source in PUBLISHED.items()} == EXPECTED


@pytest.mark.extension("families")
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("gemma3", "gemma"),
        ("qwen3moe", "qwen3"),
        ("gpt-oss", "harmony"),
        ("llama", "generic"),
        ("", "generic"),
    ],
)
def test_without_a_template_the_architecture_tells(architecture: str, name: str) -> None:
    assert detect("", architecture).name == name


def test_a_template_that_says_nothing_is_not_guessed_at_by_architecture() -> None:
    assert detect("{{ messages[0].content }}", "gemma3").name == "generic"


def test_families_go_by_their_names_and_others_are_refused() -> None:
    for name in names():
        assert family(name).name == name
    with pytest.raises(InvalidInputError, match=r"there is no family 'none'; known are .*qwen3.*register"):
        family("none")
    with pytest.raises(InvalidInputError, match="a Family can be registered"):
        register("hermes")  # type: ignore[arg-type]


@pytest.mark.extension("families")
@pytest.mark.parametrize(("name", "opened"), [("deepseek-r1", True), ("qwen-3", False), ("qwen-2.5", False)])
def test_a_prompt_that_opens_the_reasoning_is_seen(name: str, opened: bool) -> None:
    from chat.conversations import CONVERSATIONS

    template = Template(PUBLISHED[name])
    prompt = template.render(CONVERSATIONS["one"])
    assert detect(template.source).opens_reasoning(prompt) is opened
    closed = Template(PUBLISHED["qwen-3"]).render(CONVERSATIONS["one"], enable_thinking=False)
    assert not family("qwen3").opens_reasoning(closed)


# Grammars.


def feed(matcher: Matcher, text: str) -> None:
    for byte in text.encode():
        matcher.mask()
        matcher.consume(byte)


SMALL = (
    Tool.parse(
        {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}},
                "required": ["city"],
                "$defs": {"city": {"enum": ["Paris", "Söul", 'a"b']}},
            },
        }
    ),
    Tool.parse(
        {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {
                    "n": {"type": "integer", "minimum": 0, "maximum": 99},
                    "on": {"type": "boolean"},
                },
                "required": ["n"],
            },
        }
    ),
    Tool.parse({"name": "stop_all"}),
)


@pytest.fixture(scope="module")
def rt(zoo_path: Callable[[str], Path]) -> Iterator[Runtime]:
    with Model(zoo_path("llama")) as model, perdure.open(model, n_ctx=1024, slots=2, threads=1) as runtime:
        yield runtime


@pytest.mark.parametrize("name", names())
def test_a_reply_held_to_a_call_is_one_that_reads_back_and_fits_its_tool(name: str, rt: Runtime) -> None:
    chosen = family(name)
    grammar = chosen.grammar(SMALL, parallel=False)
    called = set()
    for seed in range(4):
        reply = rt.generate("Do it:", grammar=grammar, max_tokens=300, seed=seed, temperature=1.5)
        assert reply.finish_reason == "stop"
        made = parse_reply(chosen, reply.text, tools=SMALL, prompt=chosen.prompt_opener)
        assert not made.content
        (call,) = made.tool_calls
        jsonschema.validate(call.parsed, {tool.name: tool.parameters for tool in SMALL}[call.name])
        called.add(call.name)
    assert called <= {tool.name for tool in SMALL}


@pytest.mark.parametrize("name", names())
def test_a_reply_held_to_one_tool_calls_that_one(name: str, rt: Runtime) -> None:
    chosen = family(name)
    grammar = chosen.grammar(SMALL[1:2], parallel=False)
    reply = rt.generate("Do it:", grammar=grammar, max_tokens=300, seed=1)
    assert [
        call.name
        for call in parse_reply(chosen, reply.text, tools=SMALL, prompt=chosen.prompt_opener).tool_calls
    ] == ["search"]


@pytest.mark.parametrize("name", names())
def test_several_calls_may_be_written_where_they_are_allowed(name: str) -> None:
    """The grammar takes exactly what the family's own writing of two calls is, and it is read back."""
    chosen, model = family(name), ToyModel()
    assert chosen.calls is not None
    calls = [
        ToolCall(id="a1b2c3d4e5", name="get_weather", arguments='{"city": "Söul"}'),
        ToolCall(id="zzzzzzzzz0", name="search", arguments='{"n": 7, "on": true}'),
    ]
    text = chosen.calls.writer.write(calls)
    matcher = Grammars(model).matcher(chosen.grammar(SMALL, parallel=True))
    feed(matcher, text)
    made = parse_reply(chosen, text, tools=SMALL, prompt=chosen.prompt_opener).tool_calls
    assert [(call.name, call.arguments) for call in made] == [(call.name, call.arguments) for call in calls]
    single = Grammars(model).matcher(chosen.grammar(SMALL, parallel=False))
    with pytest.raises(GrammarError):
        feed(single, text)


@pytest.mark.extension("families")
@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("solar", [("a1b2c3d4e5", True), ("", False), ("a1b2c3d4e", False), ("A1B2C3D4E5", False)]),
    ],
)
def test_ids_in_calls_are_as_the_template_asks_for_them(name: str, ids: list[tuple[str, bool]]) -> None:
    """Solar's template says: ten small letters or digits."""
    chosen = family(name)
    for given, is_taken in ids:
        text = chosen.writer.write([ToolCall(id=given, name="search", arguments='{"n": 7}')])
        matcher = Grammars(ToyModel()).matcher(chosen.grammar(SMALL, parallel=False))
        with nullcontext() if is_taken else pytest.raises(GrammarError):
            feed(matcher, text)
        (call,) = parse_reply(chosen, text, tools=SMALL).tool_calls
        assert call.id == given or not given


@pytest.mark.extension("families")
def test_control_tokens_are_asked_for_by_their_ids(rt: Runtime) -> None:
    """A mark that is a control token of the model cannot be spelled in plain text."""
    (start,) = rt.model.tokenize("<|im_start|>", special=True, bos=False)
    assert rt.model.is_control(start)
    harmony = family("harmony")
    shape = f"<[{start}]>"
    assert shape in harmony.grammar(SMALL, parallel=False, control={"<|channel|>": start}).text
    assert "<[" not in harmony.grammar(SMALL, parallel=False).text
    reply = rt.generate(
        "Do it:",
        grammar=harmony.grammar(SMALL[1:2], parallel=False, control={"<|channel|>": start}),
        max_tokens=200,
        seed=1,
    )
    assert reply.tokens[0] == start


def test_a_call_of_no_tools_cannot_be_required() -> None:
    with pytest.raises(GrammarError, match="give at least one"):
        family("hermes").grammar((), parallel=False)


def test_a_family_without_a_format_asks_for_plain_json() -> None:
    assert '"arguments' in Family("plain").grammar(SMALL, parallel=False).text


def test_the_tools_of_the_tests_are_valid_schemas() -> None:
    for tool in (WEATHER, SEARCH, *SMALL):
        jsonschema.Draft202012Validator.check_schema(tool.parameters)
