"""Completions in OpenAI's older shape, and tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from perdure.server.schemas.base import (
    Items,
    RequestSchema,
    ResponseSchema,
    ReuseAnswer,
    SamplingSchema,
    StreamOptions,
    TimingsAnswer,
    UsageAnswer,
)

REFUSED = {"functions": "give them to /v1/chat/completions as tools"}

Token = Annotated[int, Field(ge=0, lt=2**31)]


class CompletionExtension(RequestSchema):
    timeout: float | None = Field(None, gt=0, le=86400)
    regex: str | None = Field(None, max_length=10_000)


class CompletionRequest(SamplingSchema):
    model: str = ""
    prompt: str | Items[str] | Items[Token] | Items[Items[Token]]
    max_tokens: int | None = Field(16, ge=1, lt=2**31)
    """16, as OpenAI has it; null goes on until the model ends or the context is full."""
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    perdure: CompletionExtension | None = None


class CompletionLogprobs(ResponseSchema):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionExtensionAnswer(ResponseSchema):
    reuse: ReuseAnswer
    timings: TimingsAnswer
    seed: int


class CompletionChoice(ResponseSchema):
    index: int
    text: str
    finish_reason: Literal["stop", "length", "cancelled", "error"]
    logprobs: CompletionLogprobs | None = None


class CompletionAnswer(ResponseSchema):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer
    system_fingerprint: str
    perdure: CompletionExtensionAnswer


class TokenizeRequest(RequestSchema):
    content: str = Field(max_length=1 << 20)
    special: bool = False
    """Whether the likes of `<|im_end|>` are read as the tokens they name."""
    add_special: bool = True
    """Whether the marks are added that the model puts around every text."""


class TokenizeAnswer(ResponseSchema):
    tokens: list[int]
    count: int


class DetokenizeRequest(RequestSchema):
    tokens: Items[Token]
    special: bool = False


class DetokenizeAnswer(ResponseSchema):
    content: str


class ModelAnswer(ResponseSchema):
    """A model with the fields that OpenAI's clients read, and those of Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int
    created: int
    owned_by: str
    n_ctx: int
    """Tokens that one request can hold."""
    n_vocab: int
    architecture: str
    digest: str


class CodexModel(ResponseSchema):
    """A model as Codex reads it."""

    slug: str
    display_name: str
    context_window: int
    supported_in_api: bool = True


class ModelList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[ModelAnswer]
    has_more: bool = False
    first_id: str
    last_id: str
    models: list[CodexModel]
