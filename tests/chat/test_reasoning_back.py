"""Reasoning that a client does not send back, and the day that a template asks for."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import perdure
from chat.test_chat_format import saying, toy, user
from perdure import Runtime, Template
from perdure.chat.formats.registry import detect
from perdure.chat.message import Message, Tool, ToolCall
from perdure.chat.options import ChatOptions
from perdure.chat.parsing.reply_parser import parse_reply
from perdure.engine.contract import ModelInfo
from perdure.errors import InvalidInputError
from perdure.sessions import session as module
from perdure.testing.toy import ToyModel

SHOWS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SAYS = '<think>Look first.</think>{"name": "look", "arguments": {}}'


def called(*ids: str, reasoning: str | None = None, name: str = "look") -> Message:
    calls = tuple(ToolCall(id=each, name=name, arguments="{}") for each in ids)
    return Message(role="assistant", tool_calls=calls, reasoning=reasoning)


@pytest.fixture
def rt() -> Any:
    with toy(n_ctx=1024, template=Template(SHOWS)) as runtime:
        yield runtime


@pytest.mark.parametrize("mode", ["capture", "hide"])
def test_it_is_put_back_by_the_id_of_its_call(rt: Runtime, mode: Any) -> None:
    """Clients of OpenAI's shape send the call, and not the reasoning: nothing is read again."""
    settings: dict[str, Any] = {"tools": [TOOL], "reasoning": mode}
    first = rt.chat([user("Dry?")], processors=[saying(SAYS, rt.model)], **settings)
    assert first.reasoning == ("Look first." if mode == "capture" else None)
    [call] = first.tool_calls
    sent = {"role": "assistant", "content": None, "tool_calls": [call.to_dict()]}
    told = {"role": "tool", "tool_call_id": call.id, "content": "dry"}
    later = rt.chat([user("Dry?"), sent, told], max_tokens=2, **settings)
    assert later.usage.cached_tokens >= first.usage.prompt_tokens + first.usage.completion_tokens - 1


def test_nobody_else_gets_it(rt: Runtime) -> None:
    """H5: not from another namespace."""
    settings: dict[str, Any] = {"tools": [TOOL]}
    first = rt.chat([user("Dry?")], namespace="a", processors=[saying(SAYS, rt.model)], **settings)
    sent = [user("Dry?"), replace(first.message, reasoning=None)]
    for namespace, found in (("a", True), ("b", False), ("", False)):
        text = rt.chat_format.prompt(tuple(map(Message.parse, sent)), namespace=namespace).transcript.text
        assert ("Look first." in text) is found


def test_what_a_model_writes_is_no_id_that_was_drawn() -> None:
    """C13: what a model writes may come again in any conversation, a drawn id never does."""
    family = detect("<tool_call>", "")
    for written, kept in (("look:0", True), ("call_" + "0" * 24, False)):
        text = f'<tool_call>\n{{"name": "look", "id": "{written}", "arguments": {{}}}}\n</tool_call>'
        [call] = parse_reply(family, text, tools=(Tool(name="look"),)).tool_calls
        assert (call.id == written) is kept


# The date.

ASKS = "{{ strftime_now('%Y-%m-%d') }}\n" + SHOWS


def text(rt: Runtime, **settings: Any) -> str:
    return rt.chat_format.prompt(
        [Message(role="user", content="Hi")], ChatOptions(**settings)
    ).transcript.text


def test_the_date_is_the_one_that_is_given() -> None:
    with toy(n_ctx=512, template=Template(ASKS)) as rt:
        assert text(rt, date="2031-05-06").startswith("2031-05-06\n")
        assert text(rt, date="2031-05-06T10:00:00").startswith("2031-05-06\n")
        assert text(rt).startswith(datetime.now().strftime("%Y-"))
        wrongs: list[tuple[Any, str]] = [
            ("soon", "date is such as 2026-01-31"),
            (7, "date is None or a text"),
        ]
        for wrong, message in wrongs:
            with pytest.raises(InvalidInputError, match=message):
                rt.chat([user("Hi")], date=wrong)


def test_a_session_stays_at_its_first_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or every morning its whole conversation would be read again. Also after a restart, and for a fork."""
    days = iter(["2031-05-06", "2031-05-07", "2031-05-08"])

    class Days(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromisoformat(next(days))

    monkeypatch.setattr(module, "datetime", Days)
    first: dict[str, Any] = {"n_ctx": 1024, "slots": 1, "store": tmp_path, "template": Template(ASKS)}
    with perdure.open(ToyModel(), **first) as rt:
        session = rt.session("a")
        session.say("Hi", max_tokens=4)
        reply = session.say("And?", max_tokens=4)
        assert reply.usage.cached_tokens > 30
    with perdure.open(ToyModel(), **first) as rt:
        session = rt.session("a").fork("b")
        session.say("Still?", max_tokens=4)
        shown = rt.model.detokenize(session.tokens, special=True)
        assert shown.startswith("2031-05-06\n")
        assert rt.session("c").say("Hi", max_tokens=1)
        assert rt.model.detokenize(rt.session("c").tokens, special=True).startswith("2031-05-07\n")
        assert rt.session("d", date="1999-12-31").say("Hi", max_tokens=1)
        assert rt.model.detokenize(rt.session("d").tokens, special=True).startswith("1999-12-31\n")


# Variables of templates.


def test_chat_template_kwargs_are_the_variables_of_the_template() -> None:
    source = "{{ mode }}{{ other }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with toy(n_ctx=256, template=Template(source)) as rt:
        settings: list[dict[str, Any]] = [
            {},
            {"chat_template_kwargs": {"mode": "12345"}},
            {"variables": {"mode": "12345"}},
            {"variables": {"mode": "1", "other": "1"}, "chat_template_kwargs": {"mode": "12345"}},
        ]
        lengths = [rt.chat([user("x")], max_tokens=1, **given).usage.prompt_tokens for given in settings]
        assert lengths == [1, 6, 6, 7]
        for name in ("messages", "tools", "add_generation_prompt", "bos_token"):
            with pytest.raises(InvalidInputError, match=f"{name} is set for the template"):
                rt.chat([user("x")], chat_template_kwargs={name: "x"})
        with pytest.raises(InvalidInputError, match="are a mapping"):
            rt.chat([user("x")], chat_template_kwargs=["x"])  # type: ignore[arg-type]


class WithToolUse(ToyModel):
    """A file that brings a second template, for tools."""

    @property
    def info(self) -> ModelInfo:
        own = "{% for t in tools %}[{{ t.function | tojson }}]{% endfor %}" + SHOWS
        return replace(super().info, tool_template=own)


def test_the_files_template_for_tools_is_taken_where_there_are_some() -> None:
    with perdure.open(WithToolUse(), n_ctx=512, slots=1) as rt:
        plain = rt.chat([user("Hi")], max_tokens=1)
        with_tools = rt.chat([user("Hi")], tools=[TOOL], max_tokens=1)
        assert with_tools.usage.prompt_tokens > plain.usage.prompt_tokens + len("[look]")
        assert with_tools.notes == ()
        none = rt.chat([user("Hi")], tools=[TOOL], tool_choice="none", max_tokens=1)
        assert none.usage.prompt_tokens == with_tools.usage.prompt_tokens
    with perdure.open(WithToolUse(), n_ctx=512, slots=1, template=Template(SHOWS)) as rt:
        assert rt.chat([user("Hi")], tools=[TOOL], max_tokens=1).notes
