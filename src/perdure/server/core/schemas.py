"""What all schemas have in common: strict types, and one way to treat fields that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, TypedDict, TypeVar

from fastapi import Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from perdure.decode.request import Timings, Usage
from perdure.decode.slots import ReuseReport
from perdure.server.core.api_error import ApiError


class _NameRule(TypedDict):
    min_length: int
    max_length: int
    pattern: str


NAME: _NameRule = {"min_length": 1, "max_length": 200, "pattern": r"^[^/\x00-\x1f\x7f]+$"}
"""What a session may be called, wherever its name stands in a request."""
Name = Annotated[str, Field(**NAME)]
Label = Annotated[str, Field(min_length=1, max_length=200)]
"""Of a memory or a kept prefix."""


T = TypeVar("T")

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong item is told: a hundred thousand wrong ones would take seconds and a gigabyte."""
_BIASES = 1024


def _few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > _BIASES:
        raise ValueError(f"{len(given)} entries, {_BIASES} are allowed")
    return given


Token = Annotated[int, Field(ge=0, lt=2**31)]

PAGE = 100
Limit = Annotated[int, Query(ge=1, le=1000)]
"""How many of a list are given at once."""


class RequestSchema(BaseModel):
    """Something that is sent to the server. A value of the wrong type is refused, never bent to fit."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class ResponseSchema(BaseModel):
    """Something that the server sends."""

    model_config = ConfigDict(frozen=True)


class ErrorDetail(ResponseSchema):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(ResponseSchema):
    """What every error looks like."""

    error: ErrorDetail


class PromptTokens(ResponseSchema):
    cached_tokens: int


class CompletionTokens(ResponseSchema):
    reasoning_tokens: int = 0


class UsageAnswer(ResponseSchema):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens

    @classmethod
    def of(cls, *prompts: Sequence[Usage]) -> UsageAnswer:
        """Of the samples of each prompt, which is counted once."""
        prompt = sum(samples[0].prompt_tokens for samples in prompts)
        cached = sum(samples[0].cached_tokens for samples in prompts)
        written = sum(usage.completion_tokens for samples in prompts for usage in samples)
        thought = sum(usage.reasoning_tokens for samples in prompts for usage in samples)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=written,
            total_tokens=prompt + written,
            prompt_tokens_details=PromptTokens(cached_tokens=cached),
            completion_tokens_details=CompletionTokens(reasoning_tokens=thought),
        )


class ReuseAnswer(ResponseSchema):
    """Where the state of a prompt came from: tokens by tier, tokens computed, and why not fewer."""

    tiers: dict[str, int]
    computed: int
    why: str

    @classmethod
    def of(cls, report: ReuseReport) -> ReuseAnswer:
        return cls(tiers=dict(report.tiers), computed=report.computed, why=report.why)


class TimingsAnswer(ResponseSchema):
    """Seconds, and tokens a second."""

    queued: float
    prefill: float
    decode: float
    prefilled_tokens: int
    decoded_tokens: int
    prefill_speed: float
    decode_speed: float

    @classmethod
    def of(cls, timings: Timings) -> TimingsAnswer:
        return cls(**asdict(timings), prefill_speed=timings.prefill_speed, decode_speed=timings.decode_speed)


class SamplingSchema(RequestSchema):
    """How tokens are drawn. What is left out is as the runtime has it."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=1e-6, le=1e6)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few)] | None
    ) = None
    """By token id. -100 rules a token out."""
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The same in the runtime's words."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repeat_penalty",
            "frequency_penalty",
            "presence_penalty",
        )
        settings = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.seed is not None:
            settings["seed"] = self.seed % _SEEDS
        if self.logit_bias:
            settings["logit_bias"] = {_token(key): _bias(value) for key, value in self.logit_bias.items()}
        if self.stop:
            settings["stop"] = self.stop
        return settings


class StreamOptions(RequestSchema):
    include_usage: bool | None = None


def refuse_fields(asked: RequestSchema, *, strict: bool, refused: Mapping[str, str]) -> None:
    """Refuse what would change the answer and cannot be done; when `strict`, also what nobody knows.

    Within `perdure`, which is ours alone, what nobody knows is always a mistake.
    """
    own = getattr(asked, "perdure", None)
    if isinstance(own, RequestSchema) and own.model_extra:
        name = next(iter(own.model_extra))
        known = list(type(own).model_fields)
        near = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        path = f"perdure.{name[:100]}"
        raise ApiError(400, f"{path}: no such field; {advice}", param=path, code="unknown_parameter")
    for name, value in (asked.model_extra or {}).items():
        if name in refused and value not in (None, [], {}, False):
            raise ApiError(400, f"{name}: {refused[name]}", param=name, code="unsupported_parameter")
    if strict:
        for path in _unknown(asked):
            raise ApiError(400, f"{path}: no such field", param=path, code="unknown_parameter")


def _unknown(asked: RequestSchema, path: str = "") -> Iterator[str]:
    for name in asked.model_extra or ():
        yield path + name
    for name in type(asked).model_fields:
        value = getattr(asked, name)
        for index, each in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(each, RequestSchema):
                place = f"{path}{name}.{index}." if isinstance(value, list) else f"{path}{name}."
                yield from _unknown(each, place)


_SEEDS = 2**32 - 1


def _token(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 9:
        raise ApiError(
            400, f"logit_bias: {key[:40]!r} is no token id", param="logit_bias", code="invalid_value"
        )
    return int(key)


def _bias(value: float) -> float:
    return float("-inf") if value <= -100 else value


class DeletedAnswer(ResponseSchema):
    deleted: int


_WHAT = {
    400: "Something in the request is wrong; `param` says where",
    401: "No key, or a wrong one",
    403: "The key is for something else",
    404: "There is no such thing",
    408: "The body came too slowly",
    409: "It is in use, exists already, or cannot go back",
    413: "More tokens than fit the context, or more bytes than are allowed",
    415: "The content type is not the one that this route takes",
    422: "A saved state that is damaged, or of another model",
    429: "The queue is full; `Retry-After` says when to ask again",
    500: "The server failed",
    503: "The engine or the store is not there just now",
    504: "Not finished in time",
    507: "The store is full",
    529: "The engine or the store is not there just now",
}
_ANYWHERE = (400, 401, 403, 408, 413, 415, 429, 500, 503)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors that can come from anywhere, and these."""
    return {
        status: {"model": ErrorAnswer, "description": _WHAT[status]}
        for status in sorted({*_ANYWHERE, *statuses})
    }


NO_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
}
"""Of a POST that says all by its path: an empty object, whose type a page of another site cannot send."""


def streamed(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The same for what can also come as a stream."""
    events: dict[str, Any] = {"text/event-stream": {"schema": {}}}
    return {
        200: {
            "description": "The answer, or with `stream` its pieces as server-sent events",
            "content": events,
        },
        **errors(504, *statuses),
    }
