"""Capabilities of a chat template: what it shows of a conversation, found by rendering short ones."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, Literal

from perdure.chat.message import Message, Tool, ToolCall
from perdure.chat.template.template import NormalisedMessage, Template
from perdure.errors import PerdureError

ToolsForm = Literal["tools", "list", "xml_tools", "functions", "with system", "none"]
"""How a template takes tools: as the variable `tools`, which may have to be a list even if there are none, as
another variable, only beside a system message, or not at all."""
ReasoningForm = Literal["field", "part", "none"]
"""How a template takes reasoning: as a field of its message, as a part of the content, or not at all."""

SWITCHES: tuple[tuple[str, bool], ...] = (
    ("clear_thinking", False),
    ("truncate_history_thinking", False),
    ("preserve_thinking", True),
    ("preserved_thinking", True),
    ("drop_thinking", False),
    ("keep_past_thinking", True),
    ("preserve_reasoning", True),
)
"""Variables that make templates show the reasoning of earlier turns, and the value of each."""

_REMEMBERED = 64
_NOW = datetime(2026, 1, 31)
_THINKING: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": True})
_AS_DATA = ("'thinking'", '"thinking"')
_TOOL = Tool(
    name="zqtool",
    description="zqdescribed",
    parameters={"type": "object", "properties": {"zqkey": {"type": "string", "description": "zqmeant"}}},
)
_BARE = Tool(name="zqbare", parameters={"type": "object", "properties": {"zqkey": {"type": "string"}}})
_USER = Message(role="user", content="zquser")
_ASSISTANT = Message(role="assistant", content="zqanswer")
_AGAIN = Message(role="user", content="zqagain")
_SYSTEM = Message(role="system", content="zqsystem")
_CALL = ToolCall(id="zq1234567", name="zqcalled", arguments='{"zqkey": "zqvalue"}')
_OTHER = ToolCall(id="zq7654321", name="zqother", arguments='{"zqkey": "zqworth"}')
_RESULT = Message(role="tool", content="zqresult", tool_call_id=_CALL.id, name=_CALL.name)
_SECOND = Message(role="tool", content="zqsecond", tool_call_id=_OTHER.id, name=_OTHER.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCapabilities:
    """What a template shows, with tools or without."""

    tools: ToolsForm
    system: bool
    """A system message at the start."""
    second_system: bool
    """Another one right behind it."""
    later_system: bool
    """One in the middle of a conversation, at its own place: some templates write it at the start."""
    developer: bool
    """A developer's message at the start."""
    second_developer: bool
    """One behind a system message."""
    later_developer: bool
    """One in the middle of a conversation, at its own place."""
    bare_tools: bool
    """Whether tools are shown whose parameters have no description."""
    calls: bool
    null_content: bool
    """Whether calls are shown only of messages whose content is none."""
    two_calls: bool
    text_arguments: bool
    """Whether arguments must be given as JSON text."""
    raw_arguments: bool
    """Whether arguments that are no JSON object are shown unchanged."""
    text_with_calls: bool
    split_text: bool
    """Whether a text and a call are shown as two messages of the assistant."""
    results: bool
    repeated_users: bool
    repeated_assistants: bool
    reasoning: ReasoningForm
    """How the reasoning of the turn at hand is taken."""
    keeps_reasoning: bool
    """Whether the reasoning of earlier turns is shown without being asked for."""
    switch: tuple[str, bool] | None
    """The variable that has it shown."""


_lock = threading.Lock()
_known: OrderedDict[tuple[str, str, str, bool], TemplateCapabilities] = OrderedDict()


def capabilities(template: Template, *, with_tools: bool) -> TemplateCapabilities:
    """What a template shows. It is tried once, and remembered by the template's digest."""
    key = (template.digest, template.bos, template.eos, with_tools)
    with _lock:
        if (shown := _known.get(key)) is not None:
            _known.move_to_end(key)
            return shown
    shown = _Trials(template, with_tools=with_tools).capabilities()
    with _lock:
        _known[key] = shown
        while len(_known) > _REMEMBERED:
            _known.popitem(last=False)
    return shown


class _Trials:
    """Short conversations, rendered to see what a template makes of them."""

    def __init__(self, template: Template, *, with_tools: bool) -> None:
        self._template = template
        self._with_tools = with_tools
        self._form: ToolsForm = "tools"
        self._text = self._null = False
        """Whether arguments are given as JSON text, and no content as none."""

    def capabilities(self) -> TemplateCapabilities:
        self._form = self._tools()
        calls = self._calls()
        results = self.shows([_USER, self._said(_CALL) if calls else _ASSISTANT, _RESULT])
        end = [_RESULT] if results else []
        ends = [_RESULT, _SECOND] if results else []
        raw = replace(_CALL, arguments="zq raw")
        reasoning = self._reasoning(calls, end)
        keeps = self._keeps(reasoning, {})
        developer = Message(role="developer", content="zqdeveloper")
        return TemplateCapabilities(
            tools=self._form,
            system=self.shows([_SYSTEM, _USER]),
            second_system=self.shows([_SYSTEM, replace(_SYSTEM, content="zqsecond"), _USER]),
            later_system=self.shows(
                [_SYSTEM, _USER, _ASSISTANT, replace(_SYSTEM, content="zqlater"), _AGAIN], in_place=True
            ),
            developer=self.shows([developer, _USER]),
            second_developer=self.shows([_SYSTEM, developer, _USER]),
            later_developer=self.shows([_SYSTEM, _USER, _ASSISTANT, developer, _AGAIN], in_place=True),
            bare_tools=self._form == "none"
            or self.shows([_SYSTEM, _USER], *(["zqbare"] if self._with_tools else []), tool=_BARE),
            calls=calls,
            null_content=self._null,
            two_calls=calls and self.shows([_USER, self._said(_CALL, _OTHER), *ends]),
            text_arguments=self._text,
            raw_arguments=calls and self.shows([_USER, self._said(raw), *end], "zq raw"),
            text_with_calls=calls and self.shows([_USER, self._said(_CALL, content="zqbeside"), *end]),
            split_text=calls
            and self.shows(
                [_USER, _ASSISTANT, self._said(_CALL), *end, self._said(content="zqmore"), _AGAIN]
            ),
            results=results,
            repeated_users=self.shows([_USER, _AGAIN]),
            repeated_assistants=self.shows([_USER, _ASSISTANT, self._said(content="zqmore"), _AGAIN]),
            reasoning=reasoning,
            keeps_reasoning=keeps,
            switch=None if keeps else self._switch(reasoning),
        )

    def _tools(self) -> ToolsForm:
        words = ("zqtool", "zqdescribed", "zqkey") if self._with_tools else ("zquser",)
        forms: tuple[ToolsForm, ...] = ("tools", "list", "xml_tools", "functions")
        for self._form in forms:
            named = self._form in ("tools", "list") or self._form in self._template.source
            if named and self.shows([_USER], *words):
                return self._form
        self._form = "tools"
        # One that does not show them may look at them all the same.
        return "with system" if self._with_tools and self.shows([_SYSTEM, _USER], *words) else "none"

    def _calls(self) -> bool:
        """Whether calls are shown; in which form is noted."""
        for self._null in (False, True):
            for self._text in (False, True):
                for end in ([_RESULT], []):
                    if self.shows([_USER, self._said(_CALL), *end], _CALL.name, "zqkey", "zqvalue"):
                        return True
        self._null = self._text = False
        return False

    def _said(
        self,
        *calls: ToolCall,
        content: str | None = None,
        reasoning: str | None = None,
        thinking_part: bool = False,
    ) -> Message:
        return NormalisedMessage(
            role="assistant",
            content=content,
            tool_calls=calls,
            text_arguments=self._text,
            null_content=self._null and bool(calls),
            reasoning=reasoning,
            thinking_part=thinking_part,
        )

    def _reasoning(self, calls: bool, end: list[Message]) -> ReasoningForm:
        """How reasoning is taken, of calls or of an answer."""
        forms: tuple[ReasoningForm, ...] = ("field", "part")
        for form in forms:
            part = form == "part"
            called = self._said(_CALL, reasoning="zqthought", thinking_part=part)
            answered = self._said(content="zqanswer", reasoning="zqthought", thinking_part=part)
            for reply in ([called, *end], [answered]):
                if (calls or reply[0].content) and self._thinks([_USER, *reply]):
                    return form
        return "none"

    def _thinks(self, messages: list[Message], variables: Mapping[str, Any] = MappingProxyType({})) -> bool:
        """Whether reasoning is shown, as such and not as the data that it came in, where thinking is on."""
        return any(
            self.shows(messages, "zqthought", hidden=_AS_DATA, variables={**variables, **more})
            for more in _THINKING
        )

    def _keeps(self, how: ReasoningForm, variables: dict[str, Any]) -> bool:
        """Whether reasoning before the last question is shown."""
        if how == "none":
            return False
        answer = self._said(content="zqanswer", reasoning="zqthought", thinking_part=how == "part")
        return self._thinks([_USER, answer, _AGAIN], variables)

    def _switch(self, how: ReasoningForm) -> tuple[str, bool] | None:
        for name, value in SWITCHES:
            if name in self._template.source and self._keeps(how, {name: value}):
                return name, value
        return None

    def shows(
        self,
        messages: list[Message],
        *words: str,
        hidden: tuple[str, ...] = (),
        tool: Tool = _TOOL,
        variables: Mapping[str, Any] = MappingProxyType({}),
        in_place: bool = False,
    ) -> bool:
        """Whether a conversation can be rendered and these words are in its text, the hidden ones not: if
        none are named, the texts of its messages and the names and values of its calls. With `in_place` they
        must come in their order too."""
        expected = words or tuple(
            word
            for message in messages
            for word in (message.content, *_words(message.tool_calls))
            if word is not None
        )
        tools, more = given_tools(self._form, (tool,) if self._with_tools else (), _NOW)
        try:
            text = self._template.render(messages, tools=tools, now=_NOW, **more, **variables)
        except PerdureError:
            return False
        if in_place and (places := [text.find(word) for word in expected]) != sorted(places):
            return False
        return all(word in text for word in expected) and not any(word in text for word in hidden)


def given_tools(
    form: ToolsForm, tools: tuple[Tool, ...], now: datetime | None
) -> tuple[tuple[Tool, ...], dict[str, Any]]:
    """The tools that a template takes as such, and the variables in which it takes them otherwise."""
    if form == "xml_tools" and tools:
        return (), {"xml_tools": [tool.to_dict() for tool in tools]}
    if form == "functions":
        shown = json.dumps([tool.to_dict() for tool in tools], indent=4, ensure_ascii=False) if tools else ""
        moment = (now or datetime.now()).strftime("%b %d %Y %H:%M:%S")
        return (), {"functions": shown, "datetime": moment}
    if form == "list" and not tools:
        return (), {"no_tools": []}
    return tools, {}


def _words(calls: tuple[ToolCall, ...]) -> list[str]:
    words = []
    for call in calls:
        words += [call.name, *(json.loads(call.arguments).values() if call.arguments[0] == "{" else ())]
    return words
