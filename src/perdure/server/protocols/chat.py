"""OpenAI's chat completions: requests, answers and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from perdure.chat.difference import Miss
from perdure.chat.message import Message, parse_messages
from perdure.chat.options import RESERVED
from perdure.chat.reply import CallDelta, ChatDelta, ChatReply
from perdure.decode.request import FinishReason, KeptPrefix, TokenLogprob
from perdure.server.core.api_error import ApiError, for_client, invalid, unreadable
from perdure.server.core.app_state import AppState
from perdure.server.core.protocol import Events, event
from perdure.server.core.schemas import (
    Items,
    RequestSchema,
    ResponseSchema,
    ReuseAnswer,
    SamplingSchema,
    StreamOptions,
    TimingsAnswer,
    UsageAnswer,
    refuse_fields,
)
from perdure.server.core.settings import ReplyDefaults
from perdure.server.protocols.image_input import image_of_url, sound_of_base64
from perdure.server.protocols.naming_fields import NamingFields
from perdure.server.protocols.openai import (
    AnswerHead,
    ChunkWriter,
    FinishWord,
    PromptCacheOptions,
    cache_marks,
    finish_word,
    logprobs_of,
    tier_options,
)
from perdure.server.protocols.reply_request import ReplyRequest, SessionExtension, extend

# Chat requests in OpenAI's shape, and what they mean in the runtime's words.

REFUSED = {
    "functions": "give tools instead",
    "function_call": "give tool_choice instead",
    "audio": "only text can be written",
    "web_search_options": "there is no search",
}
"""Fields of OpenAI's that would change the answer, and what to do instead."""


class TextPart(RequestSchema):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None
    """A cache mark: the conversation up to this message is to be kept for a time."""


class ImageUrl(RequestSchema):
    url: str
    detail: Literal["auto", "low", "high"] | None = None
    """`low` has it scaled down to at most 512 pixels a side, where it takes fewer tokens so; the others give
    the model all that it takes."""


class ImagePart(RequestSchema):
    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(RequestSchema):
    data: str
    """A WAV file, in base64."""
    format: str = "wav"
    """Others are refused."""


class AudioPart(RequestSchema):
    type: Literal["input_audio"]
    input_audio: InputAudio


class OtherPart(RequestSchema):
    """A part that the current clients can send, and that cannot be read here."""

    type: Literal["file", "refusal"]


Part: TypeAlias = TextPart | ImagePart | AudioPart | OtherPart


class CallFunction(RequestSchema):
    name: str = Field(min_length=1)
    arguments: str = "{}"


class CallSchema(RequestSchema):
    id: str = ""
    type: Literal["function"] = "function"
    function: CallFunction


_SIMPLE = {"role", "content"}


class ChatMessage(RequestSchema):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Annotated[Part, Field(discriminator="type")]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, as vLLM and OpenRouter call it."""
    tool_calls: Items[CallSchema] | None = None
    tool_call_id: str | None = None

    @property
    def plain(self) -> dict[str, Any]:
        """As `Message.parse` takes it."""
        if isinstance(self.content, str) and self.model_fields_set == _SIMPLE:
            # Almost all are so, and whole histories come again and again.
            return {"role": self.role, "content": self.content}
        if not isinstance(self.content, list):
            return self.model_dump(exclude_none=True, include=set(type(self).model_fields))
        fields = self.model_dump(exclude_none=True, include=set(type(self).model_fields) - {"content"})
        return {**fields, "content": list(map(_part, self.content))}


def _part(part: Part) -> Any:
    """A part as `Message.parse` takes it."""
    if isinstance(part, ImagePart):
        return image_of_url(part.image_url.url, "image_url.url", detail=part.image_url.detail or "auto")
    if isinstance(part, AudioPart):
        return sound_of_base64(part.input_audio.data, "input_audio.data")
    return part.model_dump(exclude_none=True)


class Function(RequestSchema):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolAsked(RequestSchema):
    type: Literal["function"] = "function"
    function: Function


class ChosenFunction(RequestSchema):
    name: str = Field(min_length=1)


class ToolChosen(RequestSchema):
    type: Literal["function"] = "function"
    function: ChosenFunction


class SchemaAsked(RequestSchema):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(RequestSchema):
    type: Literal["text"]


class JsonFormat(RequestSchema):
    type: Literal["json_object"]


class SchemaFormat(RequestSchema):
    type: Literal["json_schema"]
    json_schema: SchemaAsked


class ChatOptionsSchema(SamplingSchema):
    """What can be asked of a reply in a conversation, besides its messages."""

    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    response_format: Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    tools: Annotated[Items[ToolAsked], Field(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChosen | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning_effort: str | None = None
    """Taken, and left to the model's template."""
    verbosity: str | None = None
    """The same."""
    store: bool | None = None
    """False: nothing is written down. Else a chat is stored where it names a session or a conversation."""
    service_tier: str | None = Field(None, max_length=40)
    """`flex` is a request in the background; others are taken."""
    prediction: dict[str, Any] | None = None
    """Taken: a guess of the reply could only make it faster."""
    chat_template_kwargs: dict[str, Any] | None = None
    """For the model's template, as vLLM and llama.cpp take them."""
    continue_final_message: bool | None = None
    """Whether the reply goes on from the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with what opens a reply: by default unless a message is continued."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    perdure: SessionExtension | None = None

    @property
    def is_resumable(self) -> bool:
        """Whether the reply continues after its client leaves, which can then reconnect."""
        return bool(self.stream and self.perdure is not None and self.perdure.resumable)


class ChatRequest(NamingFields, ChatOptionsSchema):
    model: str = ""
    messages: Items[ChatMessage] = Field(min_length=1)
    n: int | None = Field(None, ge=1, le=128)
    modalities: Items[str] | None = None
    prompt_cache_key: str | None = Field(None, max_length=512)
    """The latest prompt that came with this key is kept for a time."""
    prompt_cache_options: PromptCacheOptions | None = None


def check_chat_options(
    body: ChatOptionsSchema, app_state: AppState, notes: dict[str, Any] | None = None
) -> None:
    """Refuse what cannot be done, or was said twice; what is ignored is named in `notes`."""
    refuse_fields(body, strict=app_state.server.strict, refused=REFUSED, notes=notes)
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(
            400,
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}: "
            "they mean the same, give one",
            param="max_tokens",
            code="invalid_value",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "set logprobs too")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "only with stream")
    for name, variables in (
        ("perdure.variables", body.perdure.variables if body.perdure else None),
        ("chat_template_kwargs", body.chat_template_kwargs),
    ):
        if taken := sorted(RESERVED & (variables or {}).keys()):
            raise invalid(name, f"{taken[0]} is set by the server")


def chat_options(
    body: ChatOptionsSchema, app_state: AppState, defaults: ReplyDefaults | None = None
) -> dict[str, Any]:
    """What is asked of a reply, in the runtime's words, whole."""
    return (defaults or app_state.server.defaults).fill(given_chat_options(body, app_state))


def given_chat_options(body: ChatOptionsSchema, app_state: AppState) -> dict[str, Any]:
    """What a request says of its reply, in the runtime's words."""
    options = body.sampling | tier_options(body.service_tier)
    if (limit := body.max_completion_tokens or body.max_tokens) is not None:
        options["max_tokens"] = limit
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    if body.tools:
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    if body.tool_choice is not None:
        chosen = body.tool_choice
        options["tool_choice"] = chosen.model_dump() if isinstance(chosen, ToolChosen) else chosen
    if body.parallel_tool_calls is not None:
        options["parallel_tool_calls"] = body.parallel_tool_calls
    if isinstance(body.response_format, SchemaFormat):
        options["schema"] = body.response_format.json_schema.schema_
    elif body.response_format is not None and body.response_format.type == "json_object":
        options["schema"] = {"type": "object"}
    levels = {"reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity}
    if variables := {name: value for name, value in levels.items() if value is not None}:
        options["variables"] = variables
    extend(options, body.perdure, app_state)
    if body.chat_template_kwargs:
        options["variables"] = {**options.get("variables", {}), **body.chat_template_kwargs}
    for name in ("continue_final_message", "add_generation_prompt"):
        if (value := getattr(body, name)) is not None:
            options[name] = value
    return options


def parsed(messages: Sequence[ChatMessage], app_state: AppState) -> tuple[Message, ...]:
    """The messages in the inner form; what cannot be read is refused by its place."""
    app_state.server.check_message_count(len(messages))
    for at, message in enumerate(messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, OtherPart):
                where = f"messages.{at}.content.{place}"
                raise unreadable(where, _UNREADABLE[part.type])
            if isinstance(part, AudioPart) and part.input_audio.format != "wav":
                raise unreadable(f"messages.{at}.content.{place}", "sounds other than WAV files")
    return parse_messages(message.plain for message in messages)


def _marks(body: ChatRequest) -> list[KeptPrefix]:
    befores = [
        at
        for at, message in enumerate(body.messages, 1)
        for part in (message.content if isinstance(message.content, list) else ())
        if isinstance(part, TextPart) and part.prompt_cache_breakpoint is not None
    ]
    return cache_marks(
        befores, len(body.messages), key=body.prompt_cache_key, options=body.prompt_cache_options
    )


_UNREADABLE = {"file": "files", "refusal": "refusals"}


def reply_request(
    body: ChatRequest,
    app_state: AppState,
    notes: dict[str, Any] | None = None,
    *,
    defaults: ReplyDefaults | None = None,
) -> ReplyRequest:
    """What a request asks for, in the inner form; with `defaults`, in the place of the server's."""
    check_chat_options(body, app_state, notes)
    app_state.server.models.check(body.model)
    if body.modalities and set(body.modalities) != {"text"}:
        raise invalid("modalities", "only text can be written", code="unsupported_parameter")
    messages = parsed(body.messages, app_state)
    options = {**app_state.model_options(body.model), **chat_options(body, app_state, defaults)}
    if body.n is not None:
        options["n"] = body.n
    if marks := _marks(body):
        options["cache_marks"] = marks
    return ReplyRequest(
        messages=messages,
        options=options,
        place=body.perdure.place if body.perdure is not None else None,
        timeout=body.perdure.timeout if body.perdure is not None else None,
        stores=body.stores,
    )


# Whole chat answers in OpenAI's shape.


class TopLogprob(ResponseSchema):
    token: str
    logprob: float
    bytes: list[int]


class TokenAnswer(TopLogprob):
    top_logprobs: list[TopLogprob]


class LogprobsAnswer(ResponseSchema):
    content: list[TokenAnswer]
    refusal: None = None


class FunctionAnswer(ResponseSchema):
    name: str
    arguments: str


class CallAnswer(ResponseSchema):
    id: str
    type: Literal["function"] = "function"
    function: FunctionAnswer


class MessageAnswer(ResponseSchema):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[CallAnswer] | None = None
    refusal: None = None


class ChatChoice(ResponseSchema):
    index: int
    message: MessageAnswer
    finish_reason: FinishWord
    logprobs: LogprobsAnswer | None = None


class ExtensionAnswer(ResponseSchema):
    """How a reply came about."""

    finish_reason: FinishReason
    """How it ended, in our words: `repetition`, `cancelled` and `error` are none of the protocol's."""
    reuse: ReuseAnswer
    miss: Miss | None = None
    """What was computed again, and why."""
    timings: TimingsAnswer
    seed: int
    dropped: int = 0
    """Of the oldest messages, left out because an overflow policy was chosen."""
    problems: list[str] = Field(default_factory=list)
    """What is wrong with the arguments of tool calls, by their schemas."""
    notes: list[str] = Field(default_factory=list)
    """What the model's template does not show as it was given, and what the model read instead."""
    session: str | None = None
    kept: bool = False
    """Whether it is now a durable part of the session."""
    not_kept: str | None = None
    """Why it should have been and is not."""
    ignored: list[str] = Field(default_factory=list)
    """Fields of the request that nobody knows, by their places."""


class ChatAnswer(ResponseSchema):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    service_tier: str | None = None
    system_fingerprint: str
    perdure: ExtensionAnswer


def extension(
    reply: ChatReply, session: str | None = None, *, ignored: Sequence[str] = ()
) -> ExtensionAnswer:
    """How a reply came about, as every protocol reports it."""
    why = for_client(reply.not_kept, "store_unavailable") if reply.could_not_be_kept else reply.not_kept
    return ExtensionAnswer.copy_of(reply, session=session, not_kept=why or None, ignored=list(ignored))


class ChatHead(AnswerHead[ChatReply]):
    """The head of chat answers, and what they say of a reply."""

    prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        app_state: AppState,
        session: str | None,
        *,
        with_logprobs: bool,
        ignored: Sequence[str] = (),
        name: str = "",
        created: int | None = None,
        turn_stored: bool = False,
    ) -> None:
        """Of an answer that is made again, `name` is its id, `created` its time, and `turn_stored`
        whether its turn is in the session already."""
        super().__init__(app_state, name, created)
        self._session = session
        self._with_logprobs = with_logprobs
        self._ignored = ignored
        self._turn_stored = turn_stored

    def whole(self, replies: Sequence[ChatReply]) -> ChatAnswer:
        return ChatAnswer(
            **self.common,
            choices=[self._choice(reply) for reply in replies],
            usage=UsageAnswer.of([reply.usage for reply in replies]),
            perdure=self.extension(replies[0]),
        )

    def extension(self, reply: ChatReply) -> ExtensionAnswer:
        reply = replace(reply, kept=True) if self._turn_stored else reply
        return extension(reply, self._session, ignored=self._ignored)

    def logprobs(self, entries: Sequence[TokenLogprob] | None) -> LogprobsAnswer | None:
        if not self._with_logprobs:
            return None
        return LogprobsAnswer.model_validate({"content": logprobs_of(entries, self.piece)})

    def _choice(self, reply: ChatReply) -> ChatChoice:
        calls = [
            CallAnswer(id=call.id, function=FunctionAnswer(name=call.name, arguments=call.arguments))
            for call in reply.tool_calls
        ]
        return ChatChoice(
            index=reply.index,
            message=MessageAnswer(
                content=reply.text or (None if calls else ""),
                reasoning_content=reply.reasoning,
                tool_calls=calls or None,
            ),
            finish_reason=finish_word(reply),
            logprobs=self.logprobs(reply.logprobs),
        )


# Chat answers as a stream: chunks in OpenAI's shape, and `[DONE]` at the end.


class ChatWriter(ChunkWriter[ChatReply]):
    """Chunks of chats. Every sample opens once, too."""

    new = "delta"
    nothing: ClassVar[dict[str, Any]] = {}
    _head: ChatHead

    def start(self) -> Events:
        return [
            event(self._chunk(index, {"role": "assistant", "content": ""})) for index in sorted(self._open)
        ]

    def delta(self, delta: ChatDelta) -> Events:
        if delta.text and not (delta.reasoning or delta.tool_calls or delta.logprobs):
            return (self._templates[delta.index](delta.text),)
        new: dict[str, Any] = {}
        if delta.text:
            new["content"] = delta.text
        if delta.reasoning:
            new["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            new["tool_calls"] = [_call(call) for call in delta.tool_calls]
        logprobs = self._head.logprobs(delta.logprobs) if delta.logprobs else None
        if not new and not logprobs:
            return ()
        return [event(self._chunk(delta.index, new, logprobs=logprobs.model_dump() if logprobs else None))]

    def _text(self, index: int, text: str) -> dict[str, Any]:
        return self._chunk(index, {"content": text})


def _call(call: CallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    shape: dict[str, Any] = {"index": call.index, "function": function}
    if call.name:
        function["name"] = call.name
    if call.id:
        shape |= {"id": call.id, "type": "function"}
    return shape
