"""What is said in a conversation: messages, tool calls, and the tools that may be called."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from perdure.errors import InvalidInputError

ROLES = ("system", "developer", "user", "assistant", "tool")
_PLAIN_ROLES = ("system", "user", "assistant")
_SHORT = 1024
"""Characters of a message that is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that a model asks for. `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments as a mapping; InvalidInputError where they are none."""
        return _arguments(self.arguments, f"the arguments of {self.name}")

    @classmethod
    def parse(cls, value: object, where: str = "tool_call") -> ToolCall:
        if isinstance(value, cls):
            return value
        fields = _mapping(value, where)
        kind = fields.get("type", "function")
        if kind != "function":
            raise InvalidInputError(f'{where}.type must be "function", got {kind!r}')
        function = _mapping(fields.get("function"), f"{where}.function")
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, Mapping):
            arguments = _json(arguments, f"{where}.function.arguments")
        return cls(
            id=_text(fields.get("id", ""), f"{where}.id"),
            name=_name(function.get("name"), f"{where}.function.name"),
            arguments=_text(arguments, f"{where}.function.arguments"),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. Its parts are plain text, whatever shape they came in."""

    role: str
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @classmethod
    def parse(cls, value: object, where: str = "message") -> Message:
        """A message out of a Message or a mapping in OpenAI's shape."""
        if isinstance(value, cls):
            return value
        if (simple := _simple(value)) is not None:
            return simple
        fields = _mapping(value, where)
        role = fields.get("role")
        if role not in ROLES:
            raise InvalidInputError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}")
        content = _content(fields.get("content"), f"{where}.content")
        reasoning, calls = None, fields.get("tool_calls") or ()
        for field_name in ("reasoning_content", "reasoning"):
            if fields.get(field_name) is not None:
                reasoning = _text(fields[field_name], f"{where}.{field_name}")
                break
        if isinstance(calls, (str, Mapping)) or not isinstance(calls, Iterable):
            raise InvalidInputError(f"{where}.tool_calls must be a list, got {type(calls).__name__}")
        parsed = tuple(
            ToolCall.parse(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        )
        if role != "assistant" and (parsed or reasoning is not None):
            what = "tool_calls" if parsed else "reasoning"
            raise InvalidInputError(f"{where}.{what}: only an assistant message has them, this one is {role}")
        if content is None and not parsed and reasoning is None:
            raise InvalidInputError(f"{where}.content is missing: give a text")
        return cls(
            role=role,
            content=content,
            reasoning=reasoning,
            tool_calls=parsed,
            tool_call_id=_optional(fields.get("tool_call_id"), f"{where}.tool_call_id"),
            name=_optional(fields.get("name"), f"{where}.name"),
        )

    def to_dict(self) -> dict[str, Any]:
        """In OpenAI's shape, ready for JSON; `parse` gives the same message back."""
        shape: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            shape["reasoning_content"] = self.reasoning
        if self.tool_calls:
            shape["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        if self.tool_call_id is not None:
            shape["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            shape["name"] = self.name
        return shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may call. `parameters` is a JSON schema of an object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    @classmethod
    def parse(cls, value: object, where: str = "tool") -> Tool:
        """A tool out of a Tool or a mapping in OpenAI's shape, with or without its envelope."""
        if isinstance(value, cls):
            return value
        fields = _mapping(value, where)
        if "function" in fields or "type" in fields:
            if fields.get("type", "function") != "function":
                raise InvalidInputError(f'{where}.type must be "function", got {fields["type"]!r}')
            where = f"{where}.function"
            fields = _mapping(fields.get("function"), where)
        parameters = fields.get("parameters")
        if parameters is None:
            parameters = {"type": "object", "properties": {}}
        schema = json.loads(_json(_mapping(parameters, f"{where}.parameters"), f"{where}.parameters"))
        if schema.get("type", "object") != "object":
            raise InvalidInputError(
                f"{where}.parameters must be the schema of an object, got type {schema['type']!r}"
            )
        return cls(
            name=_name(fields.get("name"), f"{where}.name"),
            description=_optional(fields.get("description"), f"{where}.description") or "",
            parameters=schema,
        )

    def to_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def parse_messages(values: Iterable[object]) -> tuple[Message, ...]:
    """The messages of a conversation, at least one."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise InvalidInputError(
            'messages must be a list such as [{"role": "user", "content": "Hi"}], '
            f"got {type(values).__name__}"
        )
    messages = tuple(values)
    if not messages:
        raise InvalidInputError("messages must not be empty: give at least one")
    if set(map(type, messages)) == {Message}:
        return cast("tuple[Message, ...]", messages)
    return tuple(
        _simple(value) or Message.parse(value, f"messages[{index}]") for index, value in enumerate(messages)
    )


def _simple(value: object) -> Message | None:
    """A message that is a role and a text, as almost all are: whole histories come again and again."""
    if type(value) is dict and len(value) == 2:
        role, content = value.get("role"), value.get("content")
        if type(content) is str and type(role) is str and role in _PLAIN_ROLES and content.isascii():
            return _plain(role, content) if len(content) <= _SHORT else Message(role=role, content=content)
    return None


@lru_cache(maxsize=4096)
def _plain(role: str, content: str) -> Message:
    """A message that came before is the same object, which tuples of messages compare at once."""
    return Message(role=role, content=content)


def _content(value: object, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value if value is None else _text(value, where)
    if not isinstance(value, (list, tuple)):
        raise InvalidInputError(f"{where} must be text, got {type(value).__name__}")
    texts = []
    for index, part in enumerate(value):
        fields = _mapping(part, f"{where}[{index}]")
        kind = fields.get("type")
        if kind != "text":
            raise InvalidInputError(
                f'{where}[{index}].type must be "text", got {kind!r}: images, audio and files cannot be read'
            )
        texts.append(_text(fields.get("text"), f"{where}[{index}].text"))
    return "".join(texts)


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where} must be JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidInputError(f"{where} must be a JSON object, got {type(parsed).__name__}")
    return parsed


def _json(value: Mapping[str, Any], where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where} must be JSON: {error}") from None


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInputError(f"{where} must be a mapping, got {type(value).__name__}")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidInputError(f"{where} must be text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{where} is no valid Unicode: a lone surrogate at {error.start}; decode the bytes with 'replace'"
        ) from None
    return value


def _optional(value: object, where: str) -> str | None:
    return None if value is None else _text(value, where)


def _name(value: object, where: str) -> str:
    name = _text(value, where)
    if not name:
        raise InvalidInputError(f"{where} must not be empty")
    return name
