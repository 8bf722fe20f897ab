"""What OpenAI's protocols have in common: cache marks, the head of an answer, chunks, log probabilities."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field

from perdure.chat.reply import ChatReply
from perdure.decode.request import KeptPrefix, Reply, TokenLogprob
from perdure.errors import ContextOverflow, InvalidInputError
from perdure.server.core.api_error import ApiError, invalid
from perdure.server.core.app_state import AppState
from perdure.server.core.protocol import DONE, Events, EventTemplate, event
from perdure.server.core.schemas import RequestSchema, ResponseSchema, UsageAnswer

R = TypeVar("R", Reply, ChatReply)
BREAKPOINT = "prompt_cache_breakpoint"
MARKS = 4
"""Of one request, the one behind its last message included: the latest count."""
_SECONDS = 1800.0
"""OpenAI knows one time alone, of 30 minutes."""


class PromptCacheOptions(RequestSchema):
    mode: Literal["implicit", "explicit"] = "implicit"
    """Whether there is a mark behind the last message too."""
    ttl: str = Field("30m", max_length=16)
    """Taken: what is marked is kept for 30 minutes."""


def has_breakpoint(content: Any) -> bool:
    """Whether a part of a message is marked."""
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get(BREAKPOINT) is not None for part in content
    )


def cache_marks(
    befores: Sequence[int], total: int, *, key: str | None, options: PromptCacheOptions | None
) -> list[KeptPrefix]:
    """The marks of a request of `total` messages; `befores` are the messages up to each breakpoint.

    Who sends a key, or options, has its prompt kept: by a key the latest one that came with it.
    """
    implicit = (key is not None or options is not None) and (options is None or options.mode == "implicit")
    latest = sorted(befores)[-(MARKS - implicit) :]
    marks = [KeptPrefix(after=total - before, seconds=_SECONDS) for before in latest]
    return [*marks, KeptPrefix(after=0, seconds=_SECONDS, key=key or "")] if implicit else marks


def new_id(prefix: str) -> str:
    """An id for an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


# Answer head: what all chunks and answers of one request say alike.


FinishWord = Literal["stop", "length", "tool_calls"]


def finish_word(reply: Reply | ChatReply) -> FinishWord:
    """How a reply ended, in OpenAI's words: `length` for whatever cut it short. `perdure.finish_reason` has
    ours."""
    reason = reply.finish_reason
    return reason if reason in ("stop", "tool_calls") else "length"


class AnswerHead(Generic[R]):
    """The id, time and model of one answer, whole or in chunks."""

    prefix: str
    """Of the id."""
    chunk_object: str

    def __init__(self, app_state: AppState, name: str = "", created: int | None = None) -> None:
        """With `name` and `created`, those of an answer that is made again."""
        self._app_state = app_state
        self.common: dict[str, Any] = {
            "id": name or new_id(self.prefix),
            "created": int(time.time()) if created is None else created,
            "model": app_state.name,
            "system_fingerprint": app_state.fingerprint,
        }

    def chunk(self, choices: list[dict[str, Any]], more: Mapping[str, Any]) -> dict[str, Any]:
        """A chunk as JSON, with further fields."""
        return {**self.common, "object": self.chunk_object, "choices": choices, **more}

    def piece(self, token: int) -> bytes:
        """The bytes of a token, control tokens written out."""
        return self._app_state.runtime.model.piece(token, special=True)

    def extension(self, reply: R) -> ResponseSchema:
        """How a reply came about."""
        raise NotImplementedError


class ChunkWriter(Generic[R]):
    """Chunks in OpenAI's shape. Every sample ends once, whatever happens in between."""

    new: ClassVar[str]
    """What a choice calls that which is new in it."""
    nothing: ClassVar[Any]

    def __init__(self, head: AnswerHead[R], n: int, *, include_usage: bool) -> None:
        self._head: AnswerHead[R] = head
        self._open = set(range(n))
        self._usage: dict[str, Any] = {"usage": None} if include_usage else {}
        self._templates = [EventTemplate(partial(self._text, index)) for index in range(n)]

    def keep_alive(self, progress: dict[str, Any]) -> Events:
        return [event(self._chunk(min(self._open, default=0), self.nothing, more=progress))]

    def end(self, replies: Sequence[R]) -> Events:
        chunks: list[dict[str, Any]] = []
        for reply in replies:
            self._open.discard(reply.index)
            more = {"perdure": self._head.extension(reply).model_dump()}
            chunks.append(self._chunk(reply.index, self.nothing, finish_word(reply), more=more))
        if self._usage:
            usage = UsageAnswer.of([reply.usage for reply in replies])
            chunks.append(self._head.chunk([], {"usage": usage.model_dump()}))
        return [*map(event, chunks), DONE]

    def error(self, error: ApiError) -> Events:
        ends: list[dict[str, Any]] = [
            self._chunk(index, self.nothing, "length") for index in sorted(self._open)
        ]
        return [event(error.body), *map(event, ends), DONE]

    def _text(self, index: int, text: str) -> dict[str, Any]:
        return self._chunk(index, text)

    def _chunk(
        self,
        index: int,
        new: Any,
        finish_reason: str | None = None,
        *,
        logprobs: Any = None,
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, self.new: new, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head.chunk([choice], {**self._usage, **(more or {})})


def fill_in(
    app_state: AppState, before: str, after: str, files: Sequence[tuple[str, str]] = (), param: str = "suffix"
) -> list[int]:
    """The prompt that fills in between two texts; `param` is the field that asks for it."""
    try:
        return list(app_state.runtime.infill_prompt(before, after, files=files))
    except ContextOverflow:
        raise
    except InvalidInputError as error:
        raise invalid(param, str(error), code="unsupported_parameter") from None


def tier_options(service_tier: str | None) -> dict[str, Any]:
    """OpenAI's service tiers: `flex` waits while others are served."""
    return {"priority": "background"} if service_tier == "flex" else {}


def logprobs_of(
    entries: Sequence[TokenLogprob] | None, piece: Callable[[int], bytes]
) -> list[dict[str, Any]]:
    """Log probabilities of tokens, each with the likeliest ones beside it; `piece` gives their bytes."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        written = piece(token)
        text = written.decode("utf-8", "replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(written)}

    return [
        {
            **shown(entry.token, entry.logprob),
            "top_logprobs": [shown(each.token, each.logprob) for each in entry.top],
        }
        for entry in entries or ()
    ]


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI says -9999 for what is all but impossible."""
    return max(logprob, -9999.0)
