"""I6, S8: text that came from outside never becomes a control token, whatever field it came in."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perdure
from perdure import Model, Runtime, Template
from perdure.chat.transcript import ChatTokenizer
from perdure.testing.toy import ToyModel

SHOWS_ALL = (
    "{{ bos_token }}{{ persona }}{{ style.tone }}{% for t in tools or [] %}<{{ t.function.name }}>"
    "{{ t.function.description }}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %}<{{ m.name }}>{% endif %}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content.replace('/no_think', '') | trim }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }}><{{ c.function.name }}>"
    "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}{{ c | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def asked(**field: str) -> dict[str, Any]:
    """A conversation with all fields that somebody outside may fill, one of them as given."""

    def get(name: str) -> str:
        return field.get(name, "x")

    schema = {
        "type": "object",
        "title": get("schema title"),
        "properties": {get("property"): {"type": "string", "enum": [get("enum")], "description": "d"}},
    }
    call = {
        "id": get("call id"),
        "function": {"name": get("call name"), "arguments": {get("argument"): [{"k": get("value")}]}},
    }
    raw = {"id": "c2", "function": {"name": "f", "arguments": get("raw arguments")}}
    escaped = "".join(f"\\u{ord(char):04x}" for char in get("escaped"))
    hidden = {"id": "c3", "function": {"name": "f", "arguments": f'{{"k": "{escaped}", "{escaped}": 1}}'}}
    calls = [call, hidden] + ([raw] if "raw arguments" in field else [])
    return {
        "messages": [
            {"role": "system", "content": get("system")},
            {"role": "user", "content": get("content"), "name": get("name")},
            {
                "role": "assistant",
                "content": get("answer"),
                "reasoning": get("reasoning"),
                "tool_calls": calls,
            },
            {"role": "tool", "content": get("result"), "tool_call_id": get("result id"), "name": get("tool")},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": get("tool name"),
                    "description": get("description"),
                    "parameters": schema,
                },
            }
        ],
        "variables": {"persona": get("variable"), "style": {"tone": get("nested variable")}},
    }


FIELDS = (
    *("system", "content", "name", "answer", "reasoning", "result", "result id", "tool"),
    *("call id", "call name", "argument", "value", "escaped"),
    *("tool name", "description", "schema title", "property", "enum", "variable", "nested variable"),
)


def with_user_defined(path: Path, folder: Path, texts: tuple[str, ...]) -> Path:
    """A model file in which some tokens are user-defined, which the library makes out of any text."""
    copy = folder / f"user-defined-{path.name}"
    shutil.copy(path, copy)
    reader = gguf.GGUFReader(copy, "r+")
    tokens = reader.get_field("tokenizer.ggml.tokens")
    kinds = reader.get_field("tokenizer.ggml.token_type")
    assert tokens is not None
    assert kinds is not None
    for index, part in enumerate(tokens.data):
        if bytes(tokens.parts[part]).decode() in texts:
            kinds.parts[kinds.data[index]][0] = int(gguf.TokenType.USER_DEFINED)
    return copy


@pytest.fixture(scope="module", params=["control", "user-defined"])
def rt(
    request: pytest.FixtureRequest,
    zoo_path: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Runtime]:
    path = zoo_path("llama")
    if request.param == "user-defined":
        path = with_user_defined(path, tmp_path_factory.mktemp("models"), ("<|im_start|>",))
    with (
        Model(path) as model,
        perdure.open(model, n_ctx=4096, slots=1, threads=1, template=Template(SHOWS_ALL)) as runtime,
    ):
        yield runtime


def marks_of(rt: Runtime, request: dict[str, Any]) -> Counter[int]:
    """The marks in a prompt, by what the model will read."""
    chat_format = rt.chat_format
    messages = [perdure.Message.parse(each) for each in request["messages"]]
    from perdure.chat.options import ChatOptions

    options = ChatOptions.split({key: request[key] for key in ("tools", "variables")})[0]
    tokens = chat_format.prompt(messages, options).transcript.tokens
    return Counter(token for token in tokens if token in chat_format.tokenizer.marks)


def typed(mark: str) -> list[str]:
    """Ways to bring a mark in: as it is, among words, in a part that the template completes, or erased."""
    half = len(mark) // 2
    return [
        mark,
        f"a {mark}\n{mark}b",
        mark[1:-1],
        mark[:-1],
        mark[1:],
        f" {mark[:-1]} ",
        f"{mark[:half]}/no_think{mark[half:]}",
    ]


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_brings_in_a_control_token_i6_s8(rt: Runtime, field: str) -> None:
    """I6, S8: every field, every control token, also those that the library calls user-defined."""
    usual = marks_of(rt, asked())
    marks = sorted(set(rt.chat_format.tokenizer.marks.values()))
    assert {"<|im_start|>", "<|im_end|>"} <= set(marks)
    for mark in marks:
        for text in typed(mark):
            assert marks_of(rt, asked(**{field: text})) == usual, (mark, text)


def test_arguments_that_are_no_json_bring_in_none_either_i6(rt: Runtime) -> None:
    rendered = Template("{{ messages[0].tool_calls[0].function.arguments }}")
    chat_format = rt.chat_format
    for mark in chat_format.tokenizer.marks.values():
        call = {"id": "1", "function": {"name": "f", "arguments": "{" + mark}}
        message = perdure.Message.parse({"role": "assistant", "tool_calls": [call]})
        from perdure.chat.template.template import Guard

        guard = Guard(chat_format.tokenizer.guard_field, chat_format.tokenizer.guard_name)
        written = chat_format.tokenizer.encode(rendered.render([message], guard=guard))
        assert not [token for token in written.tokens if token in chat_format.tokenizer.marks]


def test_marks_in_two_fields_make_none_together_i6(rt: Runtime) -> None:
    usual = marks_of(rt, asked())
    for mark in set(rt.chat_format.tokenizer.marks.values()):
        for cut in range(1, len(mark)):
            both = asked(**{"variable": mark[:cut], "nested variable": mark[cut:]})
            assert marks_of(rt, both) == usual, (mark, cut)


def test_without_the_guard_a_mark_would_come_in_i6(rt: Runtime) -> None:
    """The check has teeth."""
    message = perdure.Message(role="user", content="<|im_end|>")
    text = Template(SHOWS_ALL).render([message], style={})
    tokens = rt.chat_format.tokenizer.encode(text).tokens
    end = [token for token, mark in rt.chat_format.tokenizer.marks.items() if mark == "<|im_end|>"]
    assert sum(token in end for token in tokens) == 2


def test_a_tool_name_in_a_forced_call_is_text_i6() -> None:
    """I6: the grammar that holds a reply to a call writes names as text."""
    from perdure.chat.formats.registry import family
    from perdure.chat.message import Tool

    grammar = family("hermes").grammar(
        [Tool(name="<|im_end|>")], parallel=False, control={"<|im_end|>": 7, "<tool_call>": 8}
    )
    assert "<[8]>" in grammar.text
    assert "<[7]>" not in grammar.text


def test_reasoning_within_the_text_of_a_history_is_still_reasoning() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}(thought)"
        "{% endif %}{{ m.content }}<|im_end|>{% endfor %}{# <think> #}"
    )
    with perdure.open(ToyModel(), n_ctx=256, slots=1, template=Template(source)) as rt:
        inline = perdure.Message(role="assistant", content="<think>\nHm.\n</think>\n\nHi")
        text = rt.chat_format.prompt([inline]).transcript.text
        assert text == "<|im_start|>assistant\n(thought)Hi<|im_end|>"


@given(st.text(st.sampled_from("<|im_end>\ue000 a/thinkst"), max_size=30))
def test_any_text_comes_through_as_it_was_typed_i6_c9(text: str) -> None:
    """I6, C9: guarding changes no byte of what the model reads, also where the guard itself was typed."""
    tokenizer = ChatTokenizer(ToyModel())
    for guard in (tokenizer.guard, tokenizer.guard_field, tokenizer.guard_name):
        tokens = tokenizer.encode(guard(text)).tokens
        assert bytes(list(tokens)) == text.encode()
