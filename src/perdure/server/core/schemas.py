"""What all schemas have in common: strict types, and one way to treat fields that nobody knows."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from fastapi import Query
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from perdure.chat.options import ChatOptions
from perdure.decode.request import Usage
from perdure.engine.adapters import is_name, split_layers
from perdure.errors import InvalidInputError
from perdure.options import Option, options_of
from perdure.request_options import SEED_LIMIT, RequestOptions, Sampling
from perdure.server.core.api_error import ApiError, invalid
from perdure.sessions.info import NAME_LENGTH, name_problem

OPENAI_CHAT = frozenset({"parallel_tool_calls", "continue_final_message", "add_generation_prompt"})
"""Options of a chat that have a field of their own in OpenAI's requests, or in those of vLLM."""


def _session_name(name: str) -> str:
    if (problem := name_problem(name)) is not None:
        raise PydanticCustomError("session_name", "{problem}", {"problem": problem})
    return name


Name = Annotated[
    str,
    AfterValidator(_session_name),
    WithJsonSchema(
        {
            "type": "string",
            "minLength": 1,
            "maxLength": NAME_LENGTH,
            "pattern": r"^[^/\x00-\x1f\x7f]+$",
        }
    ),
]
"""What a session may be called, wherever its name stands in a request: the rule is `name_problem`."""
Label = Annotated[str, Field(min_length=1, max_length=200)]
"""Of a memory or a kept prefix."""


T = TypeVar("T")

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that reports its first wrong item: a hundred thousand would take seconds and a gigabyte."""
Token = Annotated[int, Field(ge=0, lt=2**31)]

PAGE = 100
Limit = Annotated[int, Query(ge=1, le=1000)]
"""How many of a list are given at once."""


class RequestSchema(BaseModel):
    """Something that is sent to the server. A value of the wrong type is refused, never bent to fit."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)
    has_more: ClassVar[bool] = False
    """Whether its further fields are read too, by code that knows their kind."""

    @model_validator(mode="before")
    @classmethod
    def _pass_on(cls, fields: Any) -> Any:
        """A line of Python for each object of a large body, so that other threads have their turns."""
        return fields


_MISSING = object()


class ResponseSchema(BaseModel):
    """Something that the server sends. `model_validate` makes one of any object that has its fields."""

    model_config = ConfigDict(frozen=True, from_attributes=True)

    @classmethod
    def copy_of(cls, source: object, **others: object) -> Self:
        """One with the attributes of `source` that are called like its fields, and `others`."""
        assert others.keys() <= cls.model_fields.keys()
        fields = {name: getattr(source, name, _MISSING) for name in cls.model_fields.keys() - others.keys()}
        return cls(**{name: value for name, value in fields.items() if value is not _MISSING}, **others)


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
    image_tokens: int = 0
    """Of images."""


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
        media = sum(samples[0].media_tokens for samples in prompts)
        written = sum(usage.completion_tokens for samples in prompts for usage in samples)
        thought = sum(usage.reasoning_tokens for samples in prompts for usage in samples)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=written,
            total_tokens=prompt + written,
            prompt_tokens_details=PromptTokens(cached_tokens=cached, image_tokens=media),
            completion_tokens_details=CompletionTokens(reasoning_tokens=thought),
        )


class ReuseAnswer(ResponseSchema):
    """Where the state of a prompt came from: tokens by tier, tokens computed, and why not fewer."""

    tiers: dict[str, int]
    seconds: dict[str, float]
    """How long it took to read state out of each tier."""
    computed: int
    why: str


class TimingsAnswer(ResponseSchema):
    """Seconds, and tokens a second."""

    queued: float
    prefill: float
    decode: float
    prefilled_tokens: int
    decoded_tokens: int
    prefill_speed: float
    decode_speed: float
    forced_tokens: int
    """Written without a draw, since a grammar left no choice."""
    drafted_tokens: int
    """Guessed ahead, and of them drawn."""
    accepted_tokens: int
    gain: float
    """How many times as fast as without guesses, as measured."""


def _annotation(option: Option) -> Any:
    """What an option of a request is in JSON; the bounds of its field are those of the option."""
    if option.name == "seed":
        # Clients send numbers of 64 bits, and those below 0.
        return Annotated[int, Field(ge=-(2**63), lt=2**63)]
    if option.choices:
        return Literal[option.choices]
    text = Annotated[str, Field(max_length=option.characters)]
    if option.kind is dict:
        low, high = (option.low, option.high) if option.keys is str else (-100, 100)
        bias = Annotated[float, Field(ge=low, le=high)]
        few = BeforeValidator(functools.partial(_few, option.items))
        return Annotated[dict[str, bias], Field(max_length=option.items), few]
    if option.kind is list:
        return Annotated[Items[text], Field(max_length=option.items)]
    if option.kind is str:
        return text
    if option.kind is bool:
        return bool
    return Annotated[option.kind, Field(ge=option.low, le=option.high)]


def _few(most: int | None, entries: Any) -> Any:
    if most is not None and isinstance(entries, dict) and len(entries) > most:
        raise ValueError(f"{len(entries)} entries, {most} are allowed")
    return entries


def _schema(name: str, options: Iterable[Option]) -> type[RequestSchema]:
    """A schema with a field for each option. What is left out is as the runtime has it."""
    made: dict[str, Any] = {
        option.name: (_annotation(option) | None, Field(None, description=option.help)) for option in options
    }
    return create_model(name, __base__=RequestSchema, **made)


_STOP = options_of(RequestOptions)["stops"]
_Stop = Annotated[str, Field(max_length=_STOP.characters)]
_COMPLETION = tuple(
    options_of(RequestOptions)[name]
    for name in ("ignore_eos", "priority", "side", "loop_guard", "speculate", "adapters")
)
"""Options under `perdure` of requests without a chat."""
_EXTENDED = (
    *(each for name, each in options_of(ChatOptions).items() if name not in OPENAI_CHAT),
    *_COMPLETION,
)
"""Options that no other protocol has a field for: they stand under `perdure`."""

if TYPE_CHECKING:
    _SamplingFields = RequestSchema
    _CompletionFields = RequestSchema
    _ExtensionFields = RequestSchema
else:
    _SamplingFields = _schema("SamplingFields", options_of(Sampling).values())
    _CompletionFields = _schema("CompletionFields", _COMPLETION)
    _ExtensionFields = _schema("ExtensionFields", _EXTENDED)


class SamplingSchema(_SamplingFields):
    """How tokens are drawn, and where a reply stops: every setting, on every protocol."""

    stop: _Stop | Annotated[list[_Stop], Field(max_length=_STOP.items)] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """What was given, in the runtime's words."""
        settings = given_options(self, options_of(Sampling).values())
        if self.stop:
            settings["stop"] = self.stop
        return settings


class CompletionExtension(_CompletionFields):
    """What OpenAI's completions have no words for."""

    timeout: float | None = Field(None, gt=0, le=86400)
    regex: str | None = Field(None, max_length=10_000)

    @property
    def options(self) -> dict[str, Any]:
        """What was given, in the runtime's words, but for `timeout`."""
        options = given_options(self, _COMPLETION)
        return options if self.regex is None else {**options, "regex": self.regex}


class ReplyExtension(_ExtensionFields):
    """What the protocols of others have no words for."""

    timeout: float | None = Field(None, gt=0, le=86400)
    """Seconds until the request ends, wherever it is."""
    regex: str | None = Field(None, max_length=10_000)
    """What the reply must match."""
    variables: dict[str, Any] | None = None
    """For the model's template; `chat_template_kwargs` are the same."""

    @property
    def options(self) -> dict[str, Any]:
        """What was given, in the runtime's words, but for `timeout`."""
        options = given_options(self, _EXTENDED)
        for name in ("regex", "variables"):
            if (value := getattr(self, name)) is not None:
                options[name] = value
        return options


def given_options(body: RequestSchema, options: Iterable[Option]) -> dict[str, Any]:
    """The options that a request gives a value for, in the runtime's words."""
    values = ((option, getattr(body, option.name)) for option in options)
    return {option.name: option_value(option, value) for option, value in values if value is not None}


def option_value(option: Option, value: Any) -> Any:
    """An option's value out of JSON that was checked."""
    if option.name == "seed":
        return value % SEED_LIMIT
    if option.name == "adapters":
        check_names(value)
    try:
        return option.from_json(value)
    except InvalidInputError as error:
        raise ApiError(400, str(error), param=option.name, code="invalid_value") from None


def check_names(adapters: Mapping[str, float]) -> None:
    """Refuse adapters that could be files: what a client sends never has one read."""
    for adapter in adapters:
        if not is_name(split_layers(adapter)[0]):
            raise ApiError(
                404,
                f"there is no adapter {adapter[:100]!r}: a client names one that the server was started with",
                code="model_not_found",
                param="adapters",
            )


class StreamOptions(RequestSchema):
    include_usage: bool | None = None


def refuse_fields(
    body: RequestSchema,
    *,
    strict: bool,
    refused: Mapping[str, str],
    notes: dict[str, Any] | None = None,
) -> None:
    """Refuse what would change the answer and cannot be done; when `strict`, also what nobody knows.

    Within `perdure`, which is ours alone, what nobody knows is always a mistake. Elsewhere it is ignored, and
    named in `notes`: the answer, its header and the access log have it from there.
    """
    own = getattr(body, "perdure", None)
    if isinstance(own, RequestSchema) and own.model_extra:
        # Looking for one that is alike takes time and memory for each character.
        name = next(iter(own.model_extra))[:100]
        known = list(type(own).model_fields)
        near = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        path = f"perdure.{name}"
        raise invalid(path, f"no such field; {advice}", code="unknown_parameter")
    for name, value in (body.model_extra or {}).items():
        if name in refused and value not in (None, [], {}, False):
            raise invalid(name, refused[name], code="unsupported_parameter")
    ignored = ignored_fields(body)
    if strict and ignored:
        raise invalid(ignored[0], "no such field", code="unknown_parameter")
    if notes is not None and ignored:
        notes["ignored"] = ignored


def ignored_fields(body: RequestSchema) -> list[str]:
    """The places of fields that nobody knows: the first ones, cut to some characters."""
    return [path[:_PATH] for path in islice(_unknown(body), _NAMED)]


_NAMED, _PATH = 16, 80
"""Fields that are ignored and named, and characters of their names."""


_PLAIN = {str, int, float, bool, type(None)}
"""Most of what a body holds. To ask whether something is a schema takes longer than to see that it is not."""


def _unknown(body: RequestSchema, path: str = "") -> Iterator[str]:
    if body.has_more:
        return
    for name in body.model_extra or ():
        yield path + name
    # A large body has tens of thousands of such objects, and all clients wait meanwhile.
    for name, value in vars(body).items():
        if type(value) in _PLAIN:
            continue
        if isinstance(value, list):
            for index, each in enumerate(value):
                if type(each) not in _PLAIN and isinstance(each, RequestSchema):
                    yield from _unknown(each, f"{path}{name}.{index}.")
        elif isinstance(value, RequestSchema):
            yield from _unknown(value, f"{path}{name}.")


class DeletedAnswer(ResponseSchema):
    deleted: int


_WHAT = {
    400: "Something in the request is wrong; `param` says where",
    401: "No key, or a wrong one",
    403: "The key is for something else",
    404: "There is no such thing",
    408: "The body came too slowly",
    409: "It is in use, exists already, or cannot go back",
    413: "More bytes than are allowed",
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
