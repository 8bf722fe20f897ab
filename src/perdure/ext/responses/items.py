"""Items of Responses, read into messages and written out of them."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure import Image, Message, ToolCall
from perdure.spi.chat import DETAILS, Detail
from perdure.spi.server import KEPT, image_of_url, invalid, sound_of_base64, unreadable

Item = dict[str, Any]
Decrypt = Callable[[str], str | None]
FindItems = Callable[[str], Sequence[Item]]
"""The items that an id stands for."""

_UNREADABLE = {"input_file": "files", "input_audio": "audio", "input_video": "video"}
_MEDIA = ("input_image", "input_audio")
_ROLES = ("user", "system", "developer", "assistant")


@dataclass(slots=True)
class _Assistant:
    """What the model said, gathered over items that stand one after another."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message | None:
        if not (self.reasoning or self.texts or self.calls):
            return None
        return Message(
            role="assistant",
            content="".join(self.texts) if self.texts else None,
            reasoning="".join(self.reasoning) or None,
            tool_calls=tuple(self.calls),
        )


def messages_of(items: Sequence[Any], decrypt: Decrypt, find_items: FindItems) -> list[Message]:
    """The messages that items make. Items that say nothing to this model are left out, never refused."""
    made: list[Message] = []
    assistant = _Assistant()

    def close() -> None:
        nonlocal assistant
        if (message := assistant.message()) is not None:
            made.append(message)
        assistant = _Assistant()

    for where, item in _resolved(items, find_items):
        kind = item.get("type") or ("message" if "role" in item else "")
        if kind == "message" and item.get("role") == "assistant":
            if assistant.calls:
                close()
            assistant.texts.append(content_text(item.get("content"), f"{where}.content"))
        elif kind == "message":
            close()
            role = item.get("role")
            if role not in _ROLES:
                raise invalid(f"{where}.role", f"one of {', '.join(_ROLES)}, got {role!r}")
            made.append(_said(role, item.get("content"), f"{where}.content"))
        elif kind == "reasoning":
            if assistant.texts or assistant.calls:
                close()
            if thought := _thought(item, decrypt):
                assistant.reasoning.append(thought)
        elif kind == "compaction":
            close()
            encrypted = item.get("encrypted_content")
            if isinstance(encrypted, str) and (summary := decrypt(encrypted)):
                made.append(Message(role="system", content=summary))
        elif kind in ("function_call", "custom_tool_call"):
            assistant.calls.append(_call(item, kind, where))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            close()
            call_id = _text(item, "call_id", where)
            made.append(_said("tool", item.get("output"), f"{where}.output", tool_call_id=call_id))
    close()
    return made


def _resolved(items: Sequence[Any], find_items: FindItems) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Items with their places, those that are references replaced by what they name."""
    for at, item in enumerate(items):
        where = f"input.{at}"
        if not isinstance(item, Mapping):
            raise invalid(where, "an item is an object")
        if item.get("type") == "item_reference" or (set(item) == {"id"}):
            for each in find_items(_text(item, "id", where)):
                yield where, each
        else:
            yield where, item


def _said(role: str, content: Any, where: str, **fields: str) -> Message:
    """A message of a user or a tool, with the images and sounds in it."""
    parts = content if isinstance(content, list) else []
    media = [isinstance(part, Mapping) and part.get("type") in _MEDIA for part in parts]
    if not any(media):
        text = content_text(content, where)
        return Message(role=role, content=text, tool_call_id=fields.get("tool_call_id"))
    said = [
        _medium(part, f"{where}.{at}") if is_medium else content_text([part], f"{where}.{at}")
        for at, (part, is_medium) in enumerate(zip(parts, media, strict=True))
    ]
    return Message.parse({"role": role, "content": said, **fields}, where)


def _medium(part: Mapping[str, Any], where: str) -> Image:
    if part.get("type") == "input_audio":
        return _sound(part, f"{where}.input_audio")
    if part.get("image_url") is None and part.get("file_id") is not None:
        raise unreadable(where, "files by their ids")
    return image_of_url(part.get("image_url"), where, detail=_detail(part, where))


def _sound(part: Mapping[str, Any], where: str) -> Image:
    sound = part.get("input_audio")
    if not isinstance(sound, Mapping):
        raise invalid(where, "an object with data and format is missing")
    if sound.get("format", "wav") != "wav":
        raise unreadable(where, "sounds other than WAV files")
    return sound_of_base64(sound.get("data"), f"{where}.data")


def _detail(part: Mapping[str, Any], where: str) -> Detail:
    detail = part.get("detail")
    if detail not in (None, "original", *DETAILS):
        raise invalid(f"{where}.detail", f"one of {', '.join(DETAILS)}, original, got {detail!r}")
    return "low" if detail == "low" else "auto"


def content_text(content: Any, where: str) -> str:
    """The text of a message's content, or of what a tool gave."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        # What a tool gave may be any JSON.
        return json.dumps(content, ensure_ascii=False)
    texts = []
    for at, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise invalid(f"{where}.{at}", "a part is an object")
        kind = part.get("type")
        if isinstance(kind, str) and kind in _UNREADABLE:
            raise unreadable(f"{where}.{at}", _UNREADABLE[kind])
        text = part.get("refusal") if kind == "refusal" else part.get("text")
        if isinstance(text, str):
            texts.append(text)
    return "".join(texts)


def _thought(item: Mapping[str, Any], decrypt: Decrypt) -> str:
    """Reasoning as it was: by what we encrypted, or else by the text that the client has of it."""
    encrypted = item.get("encrypted_content")
    if isinstance(encrypted, str) and (text := decrypt(encrypted)):
        return text
    for name in ("content", "summary"):
        parts = item.get(name)
        texts = (
            [part.get("text") for part in parts if isinstance(part, Mapping)]
            if isinstance(parts, list)
            else []
        )
        if text := "".join(each for each in texts if isinstance(each, str)):
            return text
    return ""


def _call(item: Mapping[str, Any], kind: str, where: str) -> ToolCall:
    custom = kind == "custom_tool_call"
    text = item.get("input" if custom else "arguments")
    text = text if isinstance(text, str) else ""
    arguments = json.dumps({"input": text}, ensure_ascii=False) if custom else text or "{}"
    return ToolCall(id=_text(item, "call_id", where), name=_text(item, "name", where), arguments=arguments)


# Out.


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How a response writes its items: which tools are custom, and how reasoning is shown."""

    id: str
    custom: frozenset[str] = frozenset()
    """Names of tools whose input is text."""
    namespaces: Mapping[str, str] = field(default_factory=dict)
    """Of tools that came in a namespace."""
    summarised: bool = False
    """Whether reasoning is shown as a summary."""
    encrypt: Callable[[str], str] = lambda text: ""

    def items(self, message: Message, *, status: str = "completed", logprobs: Any = ()) -> list[Item]:
        """All of a reply, in the order in which a stream has them."""
        items = []
        if message.reasoning:
            items.append(self.reasoning(message.reasoning, status="completed"))
        if message.content or not (message.reasoning or message.tool_calls):
            items.append(self.message(message.content or "", status=status, logprobs=logprobs))
        return items + [self.call(call, at) for at, call in enumerate(message.tool_calls)]

    def reasoning(self, text: str | None, *, status: str) -> Item:
        item: Item = {
            "id": make_item_id("rs", self.id),
            "type": "reasoning",
            "status": status,
            "summary": [],
            "encrypted_content": None,
        }
        if text is None:
            return item
        if self.summarised:
            item["summary"] = [{"type": "summary_text", "text": text}]
        else:
            item["content"] = [{"type": "reasoning_text", "text": text}]
        return {**item, "encrypted_content": self.encrypt(text)}

    def message(self, text: str | None, *, status: str, logprobs: Any = ()) -> Item:
        content = [] if text is None else [text_part(text, logprobs)]
        return {
            "id": make_item_id("msg", self.id),
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def call(self, call: ToolCall, number: int, *, begun: bool = False) -> Item:
        """A call, or with `begun` as it is shown before its arguments."""
        common = {"status": "in_progress" if begun else "completed", "call_id": call.id, "name": call.name}
        if call.name in self.namespaces:
            common["namespace"] = self.namespaces[call.name]
        if call.name in self.custom:
            text = "" if begun else custom_input(call.arguments)
            key = make_item_id("ctc", self.id, number)
            return {"id": key, "type": "custom_tool_call", **common, "input": text}
        arguments = "" if begun else call.arguments
        return {
            "id": make_item_id("fc", self.id, number),
            "type": "function_call",
            **common,
            "arguments": arguments,
        }


def text_part(text: str, logprobs: Any = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def custom_input(arguments: str) -> str:
    """The text that a custom tool is given."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = parsed.get("input") if isinstance(parsed, dict) else None
    return text if isinstance(text, str) else arguments


def with_kept_images(items: Any) -> Any:
    """Items as they are stored: images and sounds by the digests of files that are in the store."""
    if isinstance(items, list):
        return [with_kept_images(item) for item in items]
    if not isinstance(items, Mapping):
        return items
    if items.get("type") == "input_image" and isinstance(items.get("image_url"), str):
        return {**items, "image_url": KEPT + image_of_url(items["image_url"], "input").digest}
    if items.get("type") == "input_audio":
        return {**items, "input_audio": _kept_sound(_sound(items, "input"))}
    return {
        name: with_kept_images(items[name]) if name in ("content", "output") else items[name]
        for name in items
    }


def _kept_sound(sound: Image) -> Item:
    return {"data": KEPT + sound.digest, "format": "wav"}


def _content_parts(message: Message) -> list[Item]:
    """The texts, images and sounds of a message."""
    text, parts, at = message.content or "", list[Item](), 0
    for place, image in message.images:
        if place > at:
            parts.append({"type": "input_text", "text": text[at:place]})
        if image.is_sound:
            parts.append({"type": "input_audio", "input_audio": _kept_sound(image)})
        else:
            detail = "low" if image.low else "auto"
            parts.append({"type": "input_image", "image_url": KEPT + image.digest, "detail": detail})
        at = place
    if text[at:] or not parts:
        parts.append({"type": "input_text", "text": text[at:]})
    return parts


def said_items(messages: Sequence[Message], owner: str) -> list[Item]:
    """Messages as items, with ids by their places."""
    items: list[Item] = []
    for message in messages:
        number = len(items)
        if message.role == "tool":
            items.append(
                {
                    "id": make_item_id("fco", owner, number, of_input=True),
                    "type": "function_call_output",
                    "status": "completed",
                    "call_id": message.tool_call_id or "",
                    "output": _content_parts(message) if message.images else message.content or "",
                }
            )
            continue
        if message.role == "assistant":
            reply_items = OutputForm(owner).items(message)
            for at, item in enumerate(reply_items, number):
                item["id"] = make_item_id(item["id"].partition("_")[0], owner, at, of_input=True)
            items += reply_items
            continue
        items.append(
            {
                "id": make_item_id("msg", owner, number, of_input=True),
                "type": "message",
                "role": message.role,
                "status": "completed",
                "content": _content_parts(message),
            }
        )
    return items


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    text = item.get(name)
    if not isinstance(text, str) or not text:
        raise invalid(f"{where}.{name}", "a text is missing")
    return text


# Ids of responses, conversations and their items. An item's id says which response it belongs to.

_RESPONSE = re.compile(r"resp_([0-9a-f]{32})")
_CONVERSATION = re.compile(r"conv_([0-9a-f]{32})")
_ITEM = re.compile(r"([a-z]{2,4})_([0-9a-f]{32})(?:_([a-z]?)(\d{1,6}))?")
_PLACE = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})_(\d{1,9})i(\d{1,6})")


def new_response_id() -> str:
    return f"resp_{uuid.uuid4().hex}"


def new_conversation_id() -> str:
    return f"conv_{uuid.uuid4().hex}"


def is_response_id(response_id: str) -> bool:
    return _RESPONSE.fullmatch(response_id) is not None


def is_conversation_id(conversation_id: str) -> bool:
    return _CONVERSATION.fullmatch(conversation_id) is not None


def make_item_id(kind: str, owner: str, number: int | None = None, *, of_input: bool = False) -> str:
    """The id of an item of a response or conversation: its reasoning, its message, its calls, its input."""
    key = owner.partition("_")[2]
    if number is None:
        return f"{kind}_{key}"
    return f"{kind}_{key}_{'i' if of_input else ''}{number}"


def owner_of(item_id: str) -> str | None:
    """The response that an item belongs to, by its id."""
    match = _ITEM.fullmatch(item_id)
    return f"resp_{match[2]}" if match else None


def conversation_item_id(kind: str, owner: str, turn: int, place: int) -> str:
    """The id of an item of a conversation: the turn that it was said in, and its place there."""
    return f"{kind}_{owner.partition('_')[2]}_{turn}i{place}"


def conversation_place(item_id: str, owner: str) -> tuple[int, int] | None:
    """The turn and the place that the id of an item names, if it is of this conversation."""
    match = _PLACE.fullmatch(item_id)
    return (int(match[2]), int(match[3])) if match and match[1] == owner.partition("_")[2] else None
