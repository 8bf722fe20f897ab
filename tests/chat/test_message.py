"""Messages, tool calls and tools: what is taken, what is refused and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import perdure
from perdure import InvalidInputError
from perdure.chat.message import Message, Tool, ToolCall, parse_messages
from perdure.testing.toy import ToyModel

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}

BAD: list[tuple[object, str]] = [
    (7, "messages must be a list such as"),
    ("Hi", "messages must be a list such as"),
    ({"role": "user", "content": "Hi"}, "messages must be a list such as"),
    ([], "messages must not be empty"),
    (["Hi"], r"messages\[0\] must be a mapping, got str"),
    ([{"content": "Hi"}], r"messages\[0\].role must be one of system, .*, got None"),
    ([{"role": "robot", "content": "Hi"}], r"messages\[0\].role must be one of .*, got 'robot'"),
    ([{"role": ["user"], "content": "Hi"}], r"messages\[0\].role must be one of"),
    (
        [{"role": "user", "content": "a"}, {"role": "user", "content": 7}],
        r"\[1\].content must be text, got int",
    ),
    ([{"role": "user"}], r"messages\[0\].content is missing"),
    ([{"role": "user", "content": None}], r"messages\[0\].content is missing"),
    ([{"role": "user", "content": [5]}], r"content\[0\] must be a mapping"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be text, got NoneType"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        r"content\[0\].type must be \"text\", got 'image_url': an image is a perdure.Image",
    ),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "files cannot be read"),
    ([{"role": "user", "content": "\ud800"}], "no valid Unicode: a lone surrogate at 0"),
    ([{"role": "user", "content": "a", "tool_calls": [CALL]}], "only an assistant message"),
    ([{"role": "user", "content": "a", "reasoning": "b"}], "only an assistant message"),
    ([{"role": "assistant", "reasoning": 7}], r"messages\[0\].reasoning must be text"),
    ([{"role": "assistant", "tool_calls": CALL}], r"tool_calls must be a list, got dict"),
    ([{"role": "assistant", "tool_calls": 7}], r"tool_calls must be a list, got int"),
    ([{"role": "assistant", "tool_calls": [7]}], r"messages\[0\].tool_calls\[0\] must be a mapping"),
    ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], r"tool_calls\[0\].function must be a mapping"),
    ([{"role": "assistant", "tool_calls": [{"type": "x"}]}], r"tool_calls\[0\].type must be"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], r"function.name must be text"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}], r"name must not be empty"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 7}}]}],
        r"function.arguments must be text",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": object()}}}]}],
        r"function.arguments must be JSON",
    ),
    ([{"role": "tool", "content": "a", "tool_call_id": 7}], r"tool_call_id must be text, got int"),
]


@pytest.mark.parametrize(("values", "words"), BAD)
def test_what_is_no_conversation_is_refused_with_its_place(values: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        parse_messages(values)


def test_content_in_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert Message.parse({"role": "user", "content": parts}).content == "a b"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_goes_by_either_name(field: str) -> None:
    message = Message.parse({"role": "assistant", "content": "a", field: "b"})
    assert (message.content, message.reasoning) == ("a", "b")


def test_arguments_may_come_as_a_mapping_and_are_kept_as_text() -> None:
    call = ToolCall.parse({"id": "1", "function": {"name": "f", "arguments": {"é": [1, None]}}})
    assert call.arguments == '{"é": [1, null]}'
    assert call.parsed == {"é": [1, None]}


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "7", '"a"'])
def test_arguments_that_are_no_object_are_an_error_when_they_are_parsed(arguments: str) -> None:
    call = ToolCall(id="1", name="f", arguments=arguments)
    with pytest.raises(InvalidInputError, match="the arguments of f must be"):
        _ = call.parsed


@pytest.mark.parametrize("half", ["\\ud83d", "\\uDE00", "\\ude00\\ud83d"])
def test_half_a_surrogate_pair_in_arguments_is_a_replacement_character_i7(half: str) -> None:
    """I7: a conversation with such a call could not go on. A whole pair stays what it is."""
    call = ToolCall(id="1", name="f", arguments=f'{{"a{half}": ["{half}", "\\ud83d\\ude00", 1.5]}}')
    written = "\ufffd" * half.count("u")
    assert call.parsed == {f"a{written}": [written, "\U0001f600", 1.5]}
    with perdure.open(ToyModel(), n_ctx=1024, slots=1) as rt:
        said = [
            Message(role="user", content="Hi"),
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", content="1", tool_call_id="1", name="f"),
            Message(role="user", content="Go on."),
        ]
        assert rt.chat(said, max_tokens=1).usage.prompt_tokens


def test_a_message_is_its_own_parse() -> None:
    message = Message(role="user", content="Hi")
    assert Message.parse(message) is message
    assert parse_messages([message]) == (message,)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
calls = st.builds(ToolCall, id=text, name=text.filter(bool), arguments=text)


@given(
    st.builds(
        Message,
        role=st.just("assistant"),
        content=text,
        reasoning=st.none() | text,
        tool_calls=st.lists(calls, max_size=3).map(tuple),
        name=st.none() | text,
    )
    | st.builds(Message, role=st.sampled_from(["system", "user", "developer"]), content=text)
    | st.builds(Message, role=st.just("tool"), content=text, tool_call_id=st.none() | text)
)
def test_a_message_goes_through_json_and_back_unchanged_c9(message: Message) -> None:
    """C9: any Unicode."""
    assert Message.parse(json.loads(json.dumps(message.to_dict()))) == message


def test_a_tool_is_taken_with_or_without_its_envelope() -> None:
    function = {"name": "f", "description": "Does.", "parameters": {"type": "object", "properties": {}}}
    tool = Tool.parse(function)
    assert Tool.parse({"type": "function", "function": function}) == tool
    assert Tool.parse(tool.to_dict()) == tool
    assert Tool.parse({"name": "f"}).parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (7, "tool must be a mapping"),
        ({}, "tool.name must be text"),
        ({"type": "function"}, "tool.function must be a mapping"),
        ({"type": "retrieval", "function": {}}, 'tool.type must be "function"'),
        ({"name": "f", "parameters": 7}, "tool.parameters must be a mapping"),
        ({"name": "f", "parameters": {"type": "string"}}, "must be the schema of an object"),
        ({"name": "f", "parameters": {"const": object()}}, "tool.parameters must be JSON"),
        ({"name": "f", "description": 7}, "tool.description must be text"),
    ],
)
def test_what_is_no_tool_is_refused_with_its_place(value: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Tool.parse(value)


def test_a_tools_schema_is_its_own_copy() -> None:
    parameters: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = Tool.parse({"name": "f", "parameters": parameters})
    parameters["properties"]["b"] = {}
    assert list(tool.parameters["properties"]) == ["a"]


@given(
    role=st.sampled_from(["system", "developer", "user", "assistant"]),
    content=st.text(st.characters(exclude_categories=["Cs"])),
)
def test_a_simple_message_is_read_as_any_other(role: str, content: str) -> None:
    given = {"role": role, "content": content}
    assert parse_messages([given]) == (Message.parse(given),)


@pytest.mark.parametrize("role", [["user"], {}, None, 7])
def test_a_role_that_is_no_text_is_refused_in_a_simple_message_too(role: object) -> None:
    with pytest.raises(InvalidInputError, match=r"messages\[0\].role must be one of"):
        parse_messages([{"role": role, "content": "Hi"}])
