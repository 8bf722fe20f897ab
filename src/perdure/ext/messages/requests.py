"""Requests of Anthropic's Messages, read into the inner form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from perdure import Image, KeptPrefix
from perdure.spi.chat import parse_messages
from perdure.spi.server import (
    AppState,
    Items,
    NamingFields,
    ReplyRequest,
    RequestSchema,
    SamplingSchema,
    SessionExtension,
    extend,
    image_of_base64,
    image_of_url,
    invalid,
    unreadable,
)

_BILLING = "x-anthropic-billing-header:"
"""How a block begins that Claude Code puts first, and that changes from request to request: no part of the
prompt, or no prompt would begin as the one before it."""
_UNREADABLE = {"document": "documents other than text", "container_upload": "files"}

FIVE_MINUTES, HOUR = 300.0, 3600.0
_CACHE_MARKS = 4
"""Of one request, as Anthropic has it."""

Text = Annotated[str, Field(max_length=1 << 24)]


class CacheControl(RequestSchema):
    """A mark: what is read up to there is to be kept for a time."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> float:
        return HOUR if self.ttl == "1h" else FIVE_MINUTES


class ContentBlock(RequestSchema):
    """A part of a message. What a kind has besides is read by its kind."""

    has_more = True

    type: str
    text: Text | None = None
    cache_control: CacheControl | None = None

    def get(self, name: str) -> Any:
        return (self.model_extra or {}).get(name)


class InputMessage(RequestSchema):
    role: Literal["user", "assistant", "system"]
    content: str | Items[ContentBlock]


class MessagesTool(RequestSchema):
    """A tool. Those that Anthropic's own servers run have another type, and are left out."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class MessagesToolChoice(RequestSchema):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingAsked(RequestSchema):
    type: str
    budget_tokens: int | None = Field(None, ge=0, lt=2**31)
    display: str | None = None


class OutputFormat(RequestSchema):
    type: str
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class OutputConfig(RequestSchema):
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(RequestSchema):
    """What a prompt is made of."""

    model: str = ""
    messages: Items[InputMessage] = Field(min_length=1)
    system: str | Items[ContentBlock] | None = None
    tools: Annotated[Items[MessagesTool], Field(max_length=1024)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingAsked | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """An older place of `output_config.format`."""
    cache_control: CacheControl | None = None
    """A mark behind the last message."""


class MessagesRequest(NamingFields, SamplingSchema, CountRequest):
    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: Items[str] | None = None
    """What Anthropic calls `stop`."""
    perdure: SessionExtension | None = None
    stream: bool | None = None

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"


def reply_request(body: MessagesRequest, app_state: AppState, namespace: str) -> ReplyRequest:
    """What a request asks for, in the inner form."""
    options = {**app_state.model_options(body.model), **prompt_options(body)}
    # Clients ask for all that their own models could write.
    options["max_tokens"], options["limit_to_context"] = body.max_tokens, True
    options |= body.sampling
    if stops := [stop for stop in body.stop_sequences or () if stop]:
        options["stop"] = stops
    extend(options, body.perdure, app_state)
    thinking = body.thinking
    if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is not None:
        options["reasoning_budget"] = thinking.budget_tokens
    conversation = InnerMessages(body, app_state, namespace)
    if conversation.is_prefilled:
        options["continue_final_message"] = True
    if conversation.marks:
        options["cache_marks"] = conversation.cache_marks
    return ReplyRequest(
        messages=parse_messages(conversation.messages),
        options=app_state.server.defaults.fill(options),
        place=body.perdure.place if body.perdure is not None else None,
        stores=body.stores,
    )


def prompt_options(body: CountRequest) -> dict[str, Any]:
    """What is asked of the prompt: tools, their choice, a schema, how to think."""
    options: dict[str, Any] = {}
    tools = [
        {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        for tool in body.tools or ()
        if tool.name and tool.type in (None, "custom")
    ]
    if tools:
        options["tools"] = tools
    if body.tool_choice is not None and tools:
        kind = body.tool_choice.type
        options["tool_choice"] = {"any": "required", "tool": body.tool_choice.name}.get(kind, kind)
        if options["tool_choice"] is None:
            raise invalid("tool_choice.name", "which tool?")
        if body.tool_choice.disable_parallel_tool_use:
            options["parallel_tool_calls"] = False
    output_format = (body.output_config.format if body.output_config else None) or body.output_format
    if output_format is not None and output_format.type == "json_schema":
        if output_format.schema_ is None:
            raise invalid("output_config.format.schema", "the schema is missing")
        options["schema"] = output_format.schema_
    variables: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        variables["enable_thinking"] = body.thinking.type == "enabled"
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    if variables:
        options["variables"] = variables
    return options


class InnerMessages:
    """The messages of a request in the inner form, the system message first, and its cache marks."""

    def __init__(self, body: CountRequest, app_state: AppState, namespace: str) -> None:
        app_state.server.check_message_count(len(body.messages))
        self.messages: list[dict[str, Any]] = []
        self.marks: list[tuple[int, CacheControl]] = []
        """Each with the number of messages before it."""
        self._cipher, self._namespace = app_state.server.reasoning_cipher, namespace
        if system := _system(body.system):
            self.messages.append({"role": "system", "content": system})
        # Tools are shown with the system message, whatever comes first in a request.
        for tool in body.tools or ():
            self._mark(tool.cache_control)
        for block in body.system if isinstance(body.system, list) else ():
            self._mark(block.cache_control)
        for at, message in enumerate(body.messages):
            where = f"messages.{at}.content"
            if isinstance(message.content, str):
                self.messages.append({"role": message.role, "content": message.content})
            elif message.role == "assistant":
                self._add_assistant(message.content, where)
            else:
                self._add_user(message.role, message.content, where)
        self._mark(body.cache_control)
        if not any(message["role"] != "system" for message in self.messages):
            raise invalid("messages", "there is nothing to answer")
        if len(self.marks) > _CACHE_MARKS:
            raise invalid(
                "cache_control",
                f"a maximum of {_CACHE_MARKS} blocks with cache_control may be provided, "
                f"found {len(self.marks)}",
            )

    @property
    def is_prefilled(self) -> bool:
        """Whether the last message is the beginning of the reply."""
        last = self.messages[-1]
        return last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")

    @property
    def cache_marks(self) -> list[KeptPrefix]:
        total = len(self.messages)
        return [KeptPrefix(after=total - before, seconds=mark.seconds) for before, mark in self.marks]

    def _mark(self, control: CacheControl | None) -> None:
        if control is not None:
            self.marks.append((len(self.messages), control))

    def _add_user(self, role: str, blocks: list[ContentBlock], where: str) -> None:
        """Results of tools first: they answer the message before."""
        parts: list[str | Image] = []
        marks = []
        for at, block in enumerate(blocks):
            place = f"{where}.{at}"
            if block.type == "tool_result":
                self.messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": _text(block.get("tool_use_id"), f"{place}.tool_use_id"),
                        "content": _result(block, place),
                    }
                )
                self._mark(block.cache_control)
            elif (part := _readable_or_image(block, place)) is not None:
                parts.append(part)
                marks.append(block.cache_control)
        if parts:
            self.messages.append({"role": role, "content": _joined(parts)})
        for mark in marks:
            self._mark(mark)

    def _add_assistant(self, blocks: list[ContentBlock], where: str) -> None:
        texts, thoughts, calls = [], [], []
        for at, block in enumerate(blocks):
            place = f"{where}.{at}"
            if block.type in ("thinking", "redacted_thinking"):
                encrypted = block.get("signature" if block.type == "thinking" else "data")
                # What another server's model thought is not what this one did.
                is_text = isinstance(encrypted, str)
                if is_text and (thought := self._cipher.decrypt(encrypted, self._namespace)):
                    thoughts.append(thought)
            elif block.type == "tool_use":
                calls.append(
                    {
                        "id": _text(block.get("id"), f"{place}.id"),
                        "function": {
                            "name": _text(block.get("name"), f"{place}.name"),
                            "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False),
                        },
                    }
                )
            elif (text := _readable(block, place)) is not None:
                texts.append(text)
        if texts or thoughts or calls:
            message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
            if thoughts:
                message["reasoning_content"] = "".join(thoughts)
            if calls:
                message["tool_calls"] = calls
            self.messages.append(message)
        for block in blocks:
            self._mark(block.cache_control)


def _system(system: str | list[ContentBlock] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [block.text for block in system if block.text and not block.text.startswith(_BILLING)]
    return "\n\n".join(texts)


def _result(block: ContentBlock, where: str) -> str | list[str | Image]:
    content = block.get("content")
    result: str | list[str | Image]
    if content is None or isinstance(content, str):
        result = content or ""
    elif isinstance(content, list):
        parts = [
            _readable_or_image(_block(part, f"{where}.content.{at}"), f"{where}.content.{at}")
            for at, part in enumerate(content)
            if isinstance(part, dict)
        ]
        result = _joined([part for part in parts if part is not None])
    else:
        raise invalid(f"{where}.content", "a text, or a list of blocks")
    if block.get("is_error") is not True or not result:
        return result
    return f"Error: {result}" if isinstance(result, str) else ["Error: ", *result]


def _joined(parts: Sequence[str | Image]) -> str | list[str | Image]:
    """Texts with empty lines between them; images between texts stay apart."""
    joined: list[str | Image] = []
    for part in parts:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] = f"{joined[-1]}\n\n{part}"
        else:
            joined.append(part)
    return joined[0] if len(joined) == 1 and isinstance(joined[0], str) else joined


def _readable_or_image(block: ContentBlock, where: str) -> str | Image | None:
    """The text of a block, or its image; None of one that says nothing to this model."""
    if block.type != "image":
        return _readable(block, where)
    source = block.get("source")
    fields = source if isinstance(source, dict) else {}
    if fields.get("type") == "base64":
        return image_of_base64(fields.get("data"), f"{where}.source.data")
    return image_of_url(fields.get("url"), f"{where}.source")


def _block(fields: dict[str, Any], where: str) -> ContentBlock:
    """A block inside of another one: those are read by their kinds, after the request was checked."""
    try:
        return ContentBlock.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join([where, *map(str, first["loc"])])
        raise invalid(place, first["msg"]) from None


def _readable(block: ContentBlock, where: str) -> str | None:
    """The text of a block; None of one that says nothing to this model, such as a search by others."""
    if block.type in ("text", "mid_conv_system"):
        return block.text if block.text is not None else _blocks_text(block.get("content"))
    if block.type == "document":
        source = block.get("source")
        if isinstance(source, dict) and source.get("type") == "text":
            return _text(source.get("data"), f"{where}.source.data")
    if block.type == "search_result":
        return _blocks_text(block.get("content"))
    if block.type == "image":
        raise unreadable(where, "images of the system or the assistant")
    if block.type in _UNREADABLE:
        raise unreadable(where, _UNREADABLE[block.type])
    return None


def _blocks_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _text(text: Any, where: str) -> str:
    if not isinstance(text, str) or not text:
        raise invalid(where, "a text is missing")
    return text
