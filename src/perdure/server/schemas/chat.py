"""Conversations in OpenAI's shape."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from perdure.config import Overflow, ReasoningMode
from perdure.server.schemas.base import (
    Items,
    Name,
    RequestSchema,
    ResponseSchema,
    ReuseAnswer,
    SamplingSchema,
    StreamOptions,
    TimingsAnswer,
    UsageAnswer,
)

REFUSED = {
    "functions": "give tools instead",
    "function_call": "give tool_choice instead",
    "audio": "only text can be written",
    "web_search_options": "there is no search",
    "verbosity": "the model has no such setting; say it in a message",
}
"""Fields of OpenAI's that would change the answer, and what to do instead."""


class TextPart(RequestSchema):
    type: Literal["text"]
    text: str


class CallFunction(RequestSchema):
    name: str = Field(min_length=1)
    arguments: str = "{}"


class Call(RequestSchema):
    id: str = ""
    type: Literal["function"] = "function"
    function: CallFunction


class ChatMessage(RequestSchema):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Items[Call] | None = None
    tool_call_id: str | None = None

    @property
    def plain(self) -> dict[str, Any]:
        """As the runtime takes it."""
        return self.model_dump(exclude_none=True, include=set(type(self).model_fields))


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


class Extension(RequestSchema):
    """What OpenAI's API has no words for."""

    session: Name | None = None
    """The session to go on with: `messages` are then only what is new. Made if it does not exist."""
    overflow: Overflow | None = None
    """What happens when the conversation no longer fits. An error, unless this says otherwise."""
    reasoning: ReasoningMode | None = None
    reasoning_budget: int | None = Field(None, ge=0, lt=2**31)
    """Tokens that the model may reason for."""
    timeout: float | None = Field(None, gt=0, le=86400)
    """Seconds until the request ends, wherever it is."""
    regex: str | None = Field(None, max_length=10_000)
    """What the reply must match."""
    variables: dict[str, Any] | None = None
    """For the model's template."""


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
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    perdure: Extension | None = None


class ChatRequest(ChatOptionsSchema):
    model: str = ""
    messages: Items[ChatMessage] = Field(min_length=1)
    n: int | None = Field(None, ge=1, le=128)
    modalities: Items[str] | None = None


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


class Choice(ResponseSchema):
    index: int
    message: MessageAnswer
    finish_reason: Literal["stop", "length", "tool_calls", "cancelled", "error"]
    logprobs: LogprobsAnswer | None = None


class ExtensionAnswer(ResponseSchema):
    """How a reply came about."""

    reuse: ReuseAnswer
    timings: TimingsAnswer
    seed: int
    dropped: int = 0
    """Of the oldest messages, left out because an overflow policy was chosen."""
    problems: list[str] = Field(default_factory=list)
    """What is wrong with the arguments of tool calls, by their schemas."""
    session: str | None = None
    kept: bool = False
    """Whether it is now a durable part of the session."""
    not_kept: str | None = None
    """Why it should have been and is not."""


class ChatAnswer(ResponseSchema):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: UsageAnswer
    service_tier: str | None = None
    system_fingerprint: str
    perdure: ExtensionAnswer
