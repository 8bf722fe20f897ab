"""What is said in a conversation: messages, tool calls, and the tools that may be called."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from perdure.atomic import read_file
from perdure.checks import is_whole
from perdure.errors import InvalidInputError

ROLES = ("system", "developer", "user", "assistant", "tool")
_PLAIN_ROLES = ("system", "user", "assistant")
DRAWN_ID = re.compile(r"call_[0-9a-f]{24}")
"""The ids that are drawn for calls which the model gives none. What a model writes so is no id."""
_SHORT = 1024
"""Characters of a message that is remembered."""
_IMAGE_BYTES = 64 << 20
"""Of the file of an image."""
_DIGEST = re.compile("[0-9a-f]{64}")
Detail: TypeAlias = Literal["auto", "low", "high"]
DETAILS: tuple[Detail, ...] = ("auto", "low", "high")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""What may be half of a surrogate pair, written as an escape."""


class Image:
    """A picture: a file (PNG, JPEG, WebP, GIF), or its bytes. It is encoded when a model first reads it.

    With `detail="low"` it is scaled down before, to at most 512 pixels a side, where it takes fewer tokens
    so; "auto" and "high" give the model all that it takes. Two are equal if their files are and both are
    read alike. `data` is None for one that a session names: the store has its file.
    """

    __slots__ = ("data", "digest", "is_sound", "low")

    def __init__(self, source: str | os.PathLike[str] | bytes, *, detail: Detail = "auto") -> None:
        self.low = _is_low(detail, "detail")
        """Whether it is scaled down before it is encoded."""
        if isinstance(source, (bytes, bytearray, memoryview)):
            self.data: bytes | None = bytes(source)
        elif isinstance(source, (str, os.PathLike)):
            try:
                self.data = read_file(Path(source), _IMAGE_BYTES)
            except OSError as error:
                raise InvalidInputError(f"the image {source} cannot be read: {error.strerror}") from None
        else:
            raise InvalidInputError(f"an image is a path or bytes, got {type(source).__name__}")
        self.is_sound = is_sound(self.data)
        self.digest = hashlib.sha256(self.data).hexdigest()
        """The SHA-256 of the file, in hex."""

    @classmethod
    def kept(cls, digest: object, where: str, form: object = "auto") -> Image:
        """One whose file is in the store: a detail, or "sound"."""
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise InvalidInputError(f"{where}: a digest must be a SHA-256 in hex, got {digest!r}")
        image = cls.__new__(cls)
        image.data, image.digest, image.is_sound = None, digest, form == "sound"
        image.low = not image.is_sound and _is_low(form, where)
        return image

    @property
    def name(self) -> str:
        """What tells it apart in a prompt: the digest of its file, and whether it is scaled down."""
        return f"{self.digest}low" if self.low else self.digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Image({self.digest[:12]}…{', detail=low' if self.low else ''})"


def is_sound(data: bytes) -> bool:
    """Whether a file says that it is a sound."""
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


def _is_low(detail: object, where: str) -> bool:
    if detail not in DETAILS:
        raise InvalidInputError(
            f"{where}: the detail of an image is one of {', '.join(DETAILS)}, got {detail!r}"
        )
    return detail == "low"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that a model asks for. `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str

    @property
    def has_drawn_id(self) -> bool:
        """Whether its id was drawn here: a client that sends it has the reply with this very call."""
        return DRAWN_ID.fullmatch(self.id) is not None

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
    """One message. Its parts are plain text, images and sounds, whatever shape they came in."""

    role: str
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    images: tuple[tuple[int, Image], ...] = ()
    """Those in the content, and sounds, each with the number of characters before it."""

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
        content, images = _content(fields.get("content"), f"{where}.content")
        if "images" in fields:
            images = _kept_images(fields["images"], content or "", f"{where}.images")
        if images and role not in ("user", "tool"):
            raise InvalidInputError(f"{where}.content: only a user or a tool sends images, this is {role}")
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
            images=images,
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
        if self.images:
            # By digest: their files are in the store.
            shape["images"] = [
                [at, image.digest, *(["sound"] if image.is_sound else ["low"] * image.low)]
                for at, image in self.images
            ]
        return shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may call. `parameters` is a JSON schema of an object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    @classmethod
    def parse(cls, value: object, where: str = "tool") -> Tool:
        """A tool out of a Tool, a mapping in OpenAI's shape, with or without its envelope, or a typed
        function."""
        if isinstance(value, cls):
            return value
        if callable(value):
            from perdure.chat.function_tool import described

            value = described(value)
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


def _content(value: object, where: str) -> tuple[str | None, tuple[tuple[int, Image], ...]]:
    """A text, and the images in it."""
    if value is None or isinstance(value, str):
        return (value if value is None else _text(value, where)), ()
    if not isinstance(value, (list, tuple)):
        raise InvalidInputError(f"{where} must be text, got {type(value).__name__}")
    texts: list[str] = []
    images: list[tuple[int, Image]] = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            texts.append(_text(part, f"{where}[{index}]"))
            continue
        if isinstance(part, Image):
            images.append((sum(map(len, texts)), part))
            continue
        fields = _mapping(part, f"{where}[{index}]")
        kind = fields.get("type")
        if kind != "text":
            raise InvalidInputError(
                f'{where}[{index}].type must be "text", got {kind!r}: an image is a perdure.Image, a sound a '
                "perdure.Sound, and files cannot be read"
            )
        texts.append(_text(fields.get("text"), f"{where}[{index}].text"))
    return "".join(texts), tuple(images)


def _kept_images(value: object, content: str, where: str) -> tuple[tuple[int, Image], ...]:
    """Images whose files are in the store, as `to_dict` writes them."""
    images: list[tuple[int, Image]] = []
    for entry in value if isinstance(value, (list, tuple)) else ():
        is_entry = isinstance(entry, (list, tuple)) and len(entry) in (2, 3)
        at, digest, *form = entry if is_entry else (None, None)
        least = images[-1][0] if images else 0
        if not is_whole(at) or not least <= at <= len(content):
            raise InvalidInputError(
                f"{where} are pairs of a place in the content and a digest, got {entry!r}"
            )
        images.append((at, Image.kept(digest, where, *form)))
    return tuple(images)


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        parsed: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where} must be JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidInputError(f"{where} must be a JSON object, got {type(parsed).__name__}")
    if _SURROGATE.search(text) is not None:
        # A history may have half a pair, and no tokenizer reads it.
        whole = json.dumps(parsed, ensure_ascii=False).encode("utf-16", "surrogatepass")
        parsed = json.loads(whole.decode("utf-16", "replace"))
    mapping: dict[str, Any] = parsed
    return mapping


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
