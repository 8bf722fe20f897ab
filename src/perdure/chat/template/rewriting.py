"""Message rewriter: what a template does not show, in the nearest form that it shows.

developer: "Be terse."    ->    system: "Be terse."
two calls in one message  ->    one after the other, each with its result
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, Unpack

from perdure.chat.message import Message, Tool, ToolCall
from perdure.chat.parsing.call_writer import CallText, CallWriter
from perdure.chat.template.capabilities import TemplateCapabilities
from perdure.chat.template.template import Guard, NormalisedMessage, plain, shape_tool
from perdure.errors import InvalidInputError

_LEADING = ("system", "developer")
_EXAMPLE = ToolCall(id="abcdefghi", name="function", arguments='{"argument": "value"}')


class _Form(TypedDict, total=False):
    """The fields that normalising may change."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    before: str
    behind: str
    null_content: bool
    text_arguments: bool
    thinking_part: bool


@dataclass(slots=True)
class MessageRewriter:
    """One conversation on its way into a template's form."""

    shown: TemplateCapabilities
    writer: CallWriter
    guard: Guard
    notes: dict[str, None] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """The names of calls, by their ids."""

    def note(self, words: str) -> None:
        self.notes[words] = None

    # Instructions.

    def leading(self, messages: Sequence[Message]) -> list[Message]:
        """Messages of the system and of developers in roles and places that are shown."""
        count = next((at for at, each in enumerate(messages) if each.role not in _LEADING), len(messages))
        head = self._head(list(messages[:count]))
        rest: list[Message] = []
        for message in messages[count:]:
            if message.role not in _LEADING:
                rest.append(message)
            elif rest and rest[-1].role == "user":
                # Such a message may be the last of its prompt, which models then answer otherwise: whether
                # more follows must not change how it is written.
                self.note(f"{message.role}: behind a message of the user, written at its end")
                text = "\n\n".join(each.content for each in (rest[-1], message) if each.content)
                rest[-1] = replace(rest[-1], content=text)
            elif rest and rest[-1].role == "tool":
                self.note(f"{message.role}: behind results of tools, written as a message of the user")
                rest.append(replace(message, role="user"))
            else:
                rest.append(self._later(message))
        if head and head[0].role == "system" and not self.shown.system and rest and rest[0].role == "user":
            self.note("system: written before the first message of the user")
            text = "\n\n".join(each.content or "" for each in (*head, rest[0]))
            return [replace(rest[0], content=text), *rest[1:]]
        return [*head, *rest]

    def _head(self, head: list[Message]) -> list[Message]:
        has_developer = any(each.role == "developer" for each in head)
        second = self.shown.second_developer if has_developer else self.shown.second_system
        alone = self.shown.developer if has_developer else True
        if (len(head) > 1 and not second) or not alone:
            if has_developer:
                self.note("developer: written as system")
            if len(head) > 1:
                self.note("system: messages at the start written as one")
            text = "\n\n".join(each.content or "" for each in head)
            return [Message(role="system", content=text)]
        return head

    def _later(self, message: Message) -> Message:
        if self.shown.later_developer if message.role == "developer" else self.shown.later_system:
            return message
        if message.role == "developer" and self.shown.later_system:
            self.note("developer: written as system")
            return replace(message, role="system")
        self.note(f"{message.role}: written as a message of the user behind the start")
        return replace(message, role="user")

    # Calls and their results.

    def with_calls(self, messages: Iterable[Message]) -> list[Message]:
        written: list[Message] = []
        for message in self._one_at_a_time(list(messages)):
            if message.tool_calls:
                self.names |= {call.id: call.name for call in message.tool_calls}
                written += self._called(message)
            elif message.role == "tool" and not self.shown.results:
                self.note("results of tools: written as messages of the user")
                name = message.name or self.names.get(message.tool_call_id or "", "") or "the call"
                text = f"Result of {name}:\n{message.content or ''}"
                written.append(Message(role="user", content=text))
            elif message.reasoning and self.shown.reasoning == "part":
                written.append(self._form(message))
            else:
                written.append(message)
        return written

    def _one_at_a_time(self, messages: list[Message]) -> list[Message]:
        """Calls that were made together, each with its result, where only one is shown."""
        if not self.shown.calls or self.shown.two_calls:
            return messages
        separated: list[Message] = []
        at = 0
        while at < len(messages):
            message, at = messages[at], at + 1
            if len(message.tool_calls) < 2:
                separated.append(message)
                continue
            self.note("calls made together: written one after the other")
            end = at
            while end < len(messages) and messages[end].role == "tool":
                end += 1
            results, at = messages[at:end], end
            for index, call in enumerate(message.tool_calls):
                first = message if not index else Message(role="assistant")
                separated.append(replace(first, tool_calls=(call,)))
                mine = [each for each in results if each.tool_call_id == call.id]
                separated += mine
                results = [each for each in results if each not in mine]
            separated += results
        return separated

    def _called(self, message: Message) -> list[Message]:
        """A message with calls, and what must stand before it."""
        calls = tuple(map(self._with_arguments, message.tool_calls))
        if calls != message.tool_calls:
            message = replace(message, tool_calls=calls)
        if not self.shown.calls:
            self.note("calls: written into the text")
            text = self.writer.write(map(self._guarded, message.tool_calls))
            gap = "\n" if message.content else ""
            # Empty rather than none: such a message is rendered by itself, like any other.
            return [_normalised(message, content=message.content or "", tool_calls=(), behind=gap + text)]
        if message.content and not self.shown.text_with_calls:
            if not self.shown.split_text:
                self.note("text beside calls: not shown by the template")
            else:
                self.note("text beside calls: written as a separate message")
                text_only = replace(message, tool_calls=(), reasoning=None)
                return [text_only, self._form(replace(message, content=None))]
        return [self._form(message)]

    def _form(self, message: Message) -> Message:
        part = bool(message.reasoning) and self.shown.reasoning == "part"
        as_text = bool(message.tool_calls) and self.shown.text_arguments
        null = bool(message.tool_calls) and self.shown.null_content
        if not (part or as_text or null):
            return message
        return _normalised(message, thinking_part=part, text_arguments=as_text, null_content=null)

    def _with_arguments(self, call: ToolCall) -> ToolCall:
        """A call with arguments that the template can take apart."""
        if not call.arguments.strip():
            return replace(call, arguments="{}")
        if self.shown.calls and (self.shown.raw_arguments or self.shown.text_arguments):
            return call
        try:
            _ = call.parsed
        except InvalidInputError:
            self.note("arguments that are no JSON object: written as one argument")
            return replace(call, arguments=json.dumps({"arguments": call.arguments}, ensure_ascii=False))
        return call

    def _guarded(self, call: ToolCall) -> ToolCall:
        """A call for a writer: what came from outside in it stays text."""
        if isinstance(self.writer, CallText):
            arguments = self.guard.text(call.arguments)
        else:
            # JSON may hide a mark in its escapes, which the writer takes apart.
            values = plain(call.parsed, "arguments", self.guard.text, self.guard.name)
            arguments = json.dumps(values, ensure_ascii=False)
        return ToolCall(id=self.guard.name(call.id), name=self.guard.name(call.name), arguments=arguments)

    # Tools.

    def with_tools(self, messages: list[Message], tools: tuple[Tool, ...]) -> list[Message]:
        has_system = bool(messages) and messages[0].role == "system"
        if not tools or self.shown.tools not in ("with system", "none"):
            return messages
        if self.shown.tools == "with system":
            if has_system:
                return messages
            self.note("tools: an empty system message added, without which they are not shown")
            return [Message(role="system", content=""), *messages]
        text = self._tools_text(tools)
        if has_system:
            self.note("tools: written into the system message")
            return [_normalised(messages[0], behind=f"\n\n{text}"), *messages[1:]]
        if self.shown.system:
            self.note("tools: written into a system message")
            return [NormalisedMessage(role="system", content="", behind=text), *messages]
        for at, message in enumerate(messages):
            if message.role == "user":
                self.note("tools: written before the first message of the user")
                return [*messages[:at], _normalised(message, before=f"{text}\n\n"), *messages[at + 1 :]]
        raise InvalidInputError(
            "the template shows neither tools nor system messages, and there is no message of a user to "
            "write the tools into: add one, or leave the tools out"
        )

    def described(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        """Tools whose parameters all have a description, for templates that fail without."""
        if self.shown.bare_tools:
            return tools
        return tuple(replace(tool, parameters=_described(tool.parameters)) for tool in tools)

    def _tools_text(self, tools: tuple[Tool, ...]) -> str:
        shapes = [shape_tool(tool, self.guard)["function"] for tool in tools]
        lines = "\n".join(json.dumps(shape, ensure_ascii=False) for shape in shapes)
        example = self.writer.write([_EXAMPLE])
        return f"You can call these functions:\n{lines}\n\nTo call one, reply with nothing but:\n{example}"

    # Roles.

    def joined(self, messages: list[Message]) -> list[Message]:
        """Messages of one role as one, where the template insists that roles take turns."""
        joins = {
            role
            for role, repeats in (
                ("user", self.shown.repeated_users),
                ("assistant", self.shown.repeated_assistants),
            )
            if not repeats
        }
        merged: list[Message] = []
        for message in messages:
            last = merged[-1] if merged else None
            if last is None or last.role != message.role or last.role not in joins:
                merged.append(message)
                continue
            if not _can_join(last, message):
                merged.append(message)
                continue
            self.note(f"messages of the {last.role} in a row: written as one")
            form = _normalised(message)
            merged[-1] = _normalised(
                last,
                content="\n\n".join(each.content for each in (last, message) if each.content),
                reasoning="\n\n".join(each.reasoning for each in (last, message) if each.reasoning) or None,
                tool_calls=message.tool_calls,
                behind=form.behind,
                text_arguments=form.text_arguments,
                null_content=form.null_content,
                thinking_part=form.thinking_part,
            )
        return merged

    # Reasoning.

    def keep_reasoning(self, messages: list[Message], keep: bool) -> dict[str, Any]:
        """The template's own switch for the reasoning of earlier turns."""
        if self.shown.switch is not None:
            name, value = self.shown.switch
            return {name: value if keep else not value}
        if keep and not self.shown.keeps_reasoning and any(each.reasoning for each in messages):
            self.note("reasoning of earlier turns: the template has no switch that keeps it")
        return {}


def _normalised(message: Message, **form: Unpack[_Form]) -> NormalisedMessage:
    if isinstance(message, NormalisedMessage):
        return replace(message, **form)
    fields = {name: getattr(message, name) for name in Message.__dataclass_fields__}
    return NormalisedMessage(**{**fields, **form})


def _described(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return schema
    filled = {
        key: {"type": "string", "description": "", **each} if isinstance(each, dict) else each
        for key, each in properties.items()
    }
    return {**schema, "properties": filled}


def _can_join(first: Message, second: Message) -> bool:
    """Whether nothing stands between the texts of two messages."""
    return not (first.tool_calls or _normalised(first).behind or _normalised(second).before)
