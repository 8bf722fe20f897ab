"""What a template does not show is written in the nearest form that it shows, and the reply says so."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Template
from perdure.chat.formats.registry import detect
from perdure.chat.message import Message, Tool, parse_messages
from perdure.chat.normaliser import MessageNormaliser, Normalised
from perdure.chat.template.template import UNGUARDED
from perdure.errors import PerdureError
from perdure.testing.toy import ToyModel

FOLDER = Path(__file__).parent / "templates"
ALL = [*sorted(FOLDER.glob("*.jinja")), *sorted((FOLDER / "llama.cpp").glob("*.jinja"))]
TOOL = Tool.parse(
    {
        "name": "zqlook",
        "description": "zqdescribed",
        "parameters": {"type": "object", "properties": {"zqwhere": {"type": "string"}}},
    }
)


def call(number: int, arguments: str = '{"zqwhere": "zqsea"}') -> dict[str, Any]:
    return {"id": f"call0000{number}", "function": {"name": f"zqcall{number}", "arguments": arguments}}


def assistant(content: str | None = None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": f"zqresult{number}"}


def said(role: str, word: str) -> dict[str, Any]:
    return {"role": role, "content": word}


USER, AGAIN = said("user", "zquser"), said("user", "zqagain")
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], tuple[str, ...]]] = {
    "developer": ([said("developer", "zqdeveloper"), USER], ("zqdeveloper", "zquser")),
    "both": (
        [said("system", "zqsystem"), said("developer", "zqdeveloper"), USER],
        ("zqsystem", "zqdeveloper", "zquser"),
    ),
    "later": (
        [USER, assistant("zqanswer"), said("system", "zqlater"), AGAIN],
        ("zquser", "zqanswer", "zqlater", "zqagain"),
    ),
    "later developer": (
        [said("system", "zqsystem"), USER, assistant("zqanswer"), said("developer", "zqlater"), AGAIN],
        ("zqsystem", "zquser", "zqanswer", "zqlater", "zqagain"),
    ),
    "in a row": ([USER, AGAIN], ("zquser", "zqagain")),
    "call": ([USER, assistant(None, call(1)), result(1)], ("zqcall1", "zqsea", "zqresult1")),
    "told": (
        [USER, assistant(None, call(1)), result(1), assistant("zqanswer"), AGAIN],
        ("zqcall1", "zqsea", "zqresult1", "zqanswer", "zqagain"),
    ),
    "two calls": (
        [USER, assistant(None, call(1), call(2)), result(1), result(2)],
        ("zqcall1", "zqcall2", "zqresult1", "zqresult2"),
    ),
    "two calls, results the other way": (
        [USER, assistant(None, call(1), call(2)), result(2), result(1), assistant("zqanswer"), AGAIN],
        ("zqcall1", "zqcall2", "zqresult1", "zqresult2", "zqanswer"),
    ),
    "two rounds": (
        [USER, assistant(None, call(1)), result(1), assistant(None, call(2)), result(2)],
        ("zqcall1", "zqcall2", "zqresult1", "zqresult2"),
    ),
    "no JSON": ([USER, assistant(None, call(1, "zqbroken{")), result(1)], ("zqcall1", "zqbroken{")),
    "no object": ([USER, assistant(None, call(1, "[41]")), result(1)], ("zqcall1", "[41]")),
    "no arguments": ([USER, assistant(None, call(1, "")), result(1)], ("zqcall1", "zqresult1")),
    "text beside": (
        [USER, assistant("zqtext", call(1)), result(1)],
        ("zqtext", "zqcall1", "zqresult1"),
    ),
    "text beside, later": (
        [USER, assistant("zqbeside", call(1)), result(1), assistant("zqanswer"), AGAIN],
        ("zqcall1", "zqresult1", "zqanswer", "zqagain"),
    ),
}


@cache
def template(path: Path) -> Template:
    return Template(path.read_text(), bos="<s>", eos="</s>")


def normalised(path: Path, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Normalised:
    found = template(path)
    return MessageNormaliser(found, detect(found.source).writer, UNGUARDED).normalise(messages, tools)


def rendered(path: Path, given: Normalised) -> str:
    return template(path).render(given.messages, tools=given.tools, **given.variables)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_nothing_is_dropped_in_silence(path: Path) -> None:
    """Every word of every shape of conversation is in the text, with tools and without."""
    for name, (conversation, words) in CONVERSATIONS.items():
        for tools in ((TOOL,), ()):
            given = normalised(path, parse_messages(conversation), tools)
            text = rendered(path, given)
            told = (*words, *(("zqlook", "zqdescribed", "zqwhere") if tools else ()))
            missing = [word for word in told if word not in text]
            if missing == ["zqtext"]:
                assert "text beside calls: not shown by the template" in given.notes
                continue
            assert missing == [], (name, bool(tools), given.notes, text[-1500:])


@pytest.mark.extension("families")
@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_plain_conversation_is_normalised_as_any_other(path: Path) -> None:
    """Plain messages take a short way. A choice about reasoning has them go the long one, to the same end."""
    found = template(path)
    normaliser = MessageNormaliser(found, detect(found.source).writer, UNGUARDED)
    answer, thought = assistant("zqanswer"), assistant("zqanswer", reasoning="zqthought")
    conversations = [messages for messages, _ in CONVERSATIONS.values()]
    conversations.append([USER, assistant("zqbeside", call(1, "zqbroken{"))])
    for start in ([], [said("system", "zqsystem")], [said("system", "zqfirst")] * 2):
        conversations += [[*start, USER], [*start, USER, answer, AGAIN], [*start, USER, thought, AGAIN]]
        conversations += [[*start, USER, AGAIN], [*start, answer], [*start, USER, answer, answer]]
    for messages in map(parse_messages, conversations):
        short = normaliser.normalise(messages)
        switched = normaliser.normalise(messages, keep_reasoning=False)
        assert (short.messages, short.tools, short.notes) == (
            switched.messages,
            switched.tools,
            switched.notes,
        )
        for count in range(1, len(messages)):
            first = messages[:count]
            if normaliser.normalise(first).messages == first and not any(each.tool_calls for each in first):
                assert normaliser.normalise(messages, unchanged=count) == short
        switch = normaliser.capabilities(with_tools=False).switch
        assert short.variables.keys() == switched.variables.keys() - ({switch[0]} if switch else set())


def test_the_reply_says_what_was_written_instead() -> None:
    """Of ChatML, which shows neither tools nor calls."""
    messages = [said("developer", "Be brief."), USER, assistant(None, call(1)), result(1)]
    with perdure.open(ToyModel(), n_ctx=2048, slots=1) as rt:
        reply = rt.chat(messages, tools=[TOOL.to_dict()], max_tokens=2)
        assert reply.notes == ("calls: written into the text", "tools: written into a system message")
        assert rt.chat([USER], max_tokens=2).notes == ()


def test_a_forced_call_is_read_again_where_it_is_written_into_the_text() -> None:
    """C2: the next prompt has the very tokens of the call."""
    with perdure.open(ToyModel(), n_ctx=2048, slots=1) as rt:
        schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
        tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
        first = rt.chat([USER], tools=[tool], tool_choice="required", parallel_tool_calls=False, seed=1)
        [made] = first.tool_calls
        told = {"role": "tool", "tool_call_id": made.id, "content": "dry"}
        later = rt.chat([USER, first.message, told], tools=[tool], max_tokens=2)
        assert later.usage.cached_tokens >= first.usage.prompt_tokens + first.usage.completion_tokens - 1


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_broken_arguments_do_not_end_a_conversation(path: Path) -> None:
    """Whatever a model or a client wrote as arguments, the next prompt can be made."""
    for arguments in (
        "{",
        '"x"',
        "null",
        "[1, 2]",
        "",
        " ",
        '{"a": }',
        "{'a': 1}",
        "{}",
        '{"a": {"b": null}}',
    ):
        for count in (1, 2):
            calls = [call(number, arguments) for number in range(1, count + 1)]
            results = [result(number) for number in range(1, count + 1)]
            messages = parse_messages([USER, assistant(None, *calls), *results, assistant("zqanswer"), AGAIN])
            assert "zqanswer" in rendered(path, normalised(path, messages, (TOOL,)))


def test_reasoning_goes_back_as_a_part_of_the_content() -> None:
    """Ministral's template takes it in no other way."""
    [path] = [each for each in ALL if "Ministral" in each.stem]
    messages = parse_messages([USER, assistant("zqanswer", reasoning="zqthought"), AGAIN])
    text = rendered(path, normalised(path, messages, ()))
    assert "[THINK]zqthought[/THINK]zqanswer" in text
    called = parse_messages([USER, assistant(None, call(1), reasoning="zqthought"), result(1)])
    assert "[THINK]zqthought[/THINK][TOOL_CALLS]zqcall1" in rendered(path, normalised(path, called, (TOOL,)))


def test_templates_may_take_out_of_lists_of_their_own() -> None:
    """Kimi's templates queue the ids of calls for their results."""
    [path] = [each for each in ALL if each.stem == "Kimi-K2-Instruct"]
    messages, _ = CONVERSATIONS["two calls"]
    text = rendered(path, normalised(path, parse_messages(messages), (TOOL,)))
    assert "## Return of functions.zqcall1:0\nzqresult1" in text
    assert "## Return of functions.zqcall2:1\nzqresult2" in text
    with pytest.raises(PerdureError, match="changes what it was given"):
        Template("{% set _ = messages.pop() %}").render([Message(role="user", content="x")])


def test_two_calls_are_written_one_after_the_other_where_one_is_allowed() -> None:
    [path] = [each for each in ALL if each.stem == "meta-llama-Llama-3.1-8B-Instruct"]
    messages, _ = CONVERSATIONS["two calls, results the other way"]
    given = normalised(path, parse_messages(messages), (TOOL,))
    shapes = [(each.role, len(each.tool_calls), each.tool_call_id) for each in given.messages]
    assert shapes[1:5] == [
        ("assistant", 1, None),
        ("tool", 0, "call00001"),
        ("assistant", 1, None),
        ("tool", 0, "call00002"),
    ]
    assert given.notes == ("calls made together: written one after the other",)


def test_what_has_no_place_is_refused_with_a_way_out() -> None:
    [path] = [each for each in ALL if "gemma-2" in each.stem]
    with pytest.raises(PerdureError, match="leave the tools out"):
        normalised(path, parse_messages([assistant("zqanswer")]), (TOOL,))


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("GLM-4.7-Flash", {"clear_thinking": False}),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"truncate_history_thinking": False}),
        ("LFM2.5-8B-A1B", {"preserve_thinking": True}),
        ("deepseek-ai-DeepSeek-V4", {"drop_thinking": False}),
    ],
)
def test_reasoning_of_earlier_turns_is_kept_by_the_templates_own_switch(
    name: str, switch: dict[str, Any]
) -> None:
    [path] = [each for each in ALL if each.stem == name]
    messages = parse_messages([USER, assistant("zqanswer", reasoning="zqthought"), AGAIN])
    found = template(path)
    normaliser = MessageNormaliser(found, detect(found.source).writer, UNGUARDED)
    kept = normaliser.normalise(messages, keep_reasoning=True)
    assert kept.variables == switch
    thinking: dict[str, Any] = {"enable_thinking": True}
    assert "zqthought" in found.render(kept.messages, **kept.variables, **thinking)
    gone = normaliser.normalise(messages, keep_reasoning=False)
    assert "zqthought" not in found.render(gone.messages, **gone.variables, **thinking)


def test_a_template_without_a_switch_says_so() -> None:
    [path] = [each for each in ALL if each.stem == "Qwen-Qwen3-0.6B"]
    found = template(path)
    messages = parse_messages([USER, assistant("zqanswer", reasoning="zqthought"), AGAIN])
    normaliser = MessageNormaliser(found, detect(found.source).writer, UNGUARDED)
    assert normaliser.normalise(messages, keep_reasoning=True).notes == (
        "reasoning of earlier turns: the template has no switch that keeps it",
    )
