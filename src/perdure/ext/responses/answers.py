"""A response as an object: of a reply that was just made, or of a turn that is stored."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

from pydantic import ConfigDict

from perdure import ChatReply, Message, TokenLogprob, Turn
from perdure.ext.responses.items import Item, OutputForm
from perdure.spi.server import ApiError, ResponseSchema, extension, for_client, logprobs_of


class ResponseAnswer(ResponseSchema):
    """A response. Besides these it says all that was asked for."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress", "queued", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None


class ItemList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, items: Sequence[Item], limit: int) -> ItemList:
        shown = items[:limit]
        return cls(
            data=list(shown),
            first_id=shown[0]["id"] if shown else None,
            last_id=shown[-1]["id"] if shown else None,
            has_more=len(items) > limit,
        )


class DeletedResponse(ResponseSchema):
    id: str
    object: str
    deleted: bool = True


class InputTokensAnswer(ResponseSchema):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseFields(TypedDict, total=False):
    """What only some responses say."""

    usage: dict[str, Any]
    perdure: dict[str, Any]
    completed_at: int
    incomplete_details: dict[str, str]
    error: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """What a response says from its beginning to its end."""

    id: str
    created: int
    model: str
    """The one that speaks, whatever was asked for."""
    echo: Mapping[str, Any]
    form: OutputForm
    stores: bool = False
    with_logprobs: bool = False
    piece: Any = None
    """Token ids as bytes, for log probabilities."""
    ignored: Sequence[str] = ()
    """Fields of the request that nobody knows."""

    def shown(
        self, status: str, output: Sequence[Item] = (), **more: Unpack[ResponseFields]
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "incomplete_details": None,
            "error": None,
            "usage": None,
            **self.echo,
            "model": self.model,
            "output": list(output),
            **more,
        }

    def whole(self, replies: Sequence[ChatReply]) -> dict[str, Any]:
        reply = replies[0]
        output = self.form.items(
            reply.message,
            status=_item_status(reply.finish_reason),
            logprobs=self.logprobs(reply.logprobs),
        )
        fields: ResponseFields = {
            "usage": usage(
                reply.usage.prompt_tokens,
                reply.usage.cached_tokens,
                reply.usage.completion_tokens,
                reply.usage.reasoning_tokens,
            ),
            "perdure": extension(reply, self.id, ignored=self.ignored).model_dump(),
        }
        if self.stores and not reply.kept:
            why = reply.not_kept or "it was interrupted"
            fields["error"] = error_detail(not_kept(why, could_not=reply.could_not_be_kept))
            return self.shown("failed", output, **fields)
        return self.finished(finish_reason=reply.finish_reason, output=output, **fields)

    def stored(self, turn: Turn) -> dict[str, Any]:
        """The same of a turn that was read from the store."""
        count = turn.counts.get
        return self.finished(
            finish_reason=turn.finish_reason,
            output=self.form.items(
                turn.reply or Message(role="assistant", content=""), status=_item_status(turn.finish_reason)
            ),
            usage=usage(
                count("prompt_tokens", 0),
                count("cached_tokens", 0),
                count("completion_tokens", 0),
                count("reasoning_tokens", 0),
            ),
            completed_at=int(turn.created),
            perdure={"finish_reason": turn.finish_reason},
        )

    def finished(
        self, *, finish_reason: str, output: Sequence[Item], **more: Unpack[ResponseFields]
    ) -> dict[str, Any]:
        more.setdefault("completed_at", int(time.time()))
        if _item_status(finish_reason) == "incomplete":
            # The one word that there is for it; `perdure.finish_reason` has ours.
            more["incomplete_details"] = {"reason": "max_output_tokens"}
            return self.shown("incomplete", output, **more)
        return self.shown("completed", output, **more)

    def failed(self, error: ApiError, output: Sequence[Item] = ()) -> dict[str, Any]:
        return self.shown("failed", output, error=error_detail(error))

    def logprobs(self, entries: Sequence[TokenLogprob] | None) -> list[dict[str, Any]]:
        if not self.with_logprobs:
            return []
        return logprobs_of(entries, self.piece)


def usage(read: int, cached: int, written: int, thought: int) -> dict[str, Any]:
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": read - cached},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": read + written,
    }


def _item_status(finish_reason: str) -> str:
    return "completed" if finish_reason in ("stop", "tool_calls", "") else "incomplete"


# Errors inside of a response: over HTTP they have the shape of all of OpenAI's.

_CODES = {
    "queue_full": "rate_limit_exceeded",
    "too_many_requests": "rate_limit_exceeded",
    "engine_unavailable": "server_is_overloaded",
    "store_unavailable": "server_is_overloaded",
    "stopping": "server_is_overloaded",
    "invalid_value": "invalid_prompt",
}
"""Codes that clients act on: they ask again later, or make the conversation shorter."""


def not_kept(why: str, *, could_not: bool) -> ApiError:
    """Of a response that was to be stored: its reply was made, and the store refused it, or could not."""
    why = for_client(why, "store_unavailable") if could_not else why
    return ApiError(500, f"the reply was made but could not be stored: {why}", code="response_not_kept")


def sent_differs() -> ApiError:
    """Of a stream that is resumed, whose reply came out otherwise than what its client has of it."""
    return ApiError(
        409,
        "the reply was made again and is not the one of which a part was sent, as far as is known: read the "
        "whole by GET, without starting_after",
        code="stream_not_resumable",
    )


def error_detail(error: ApiError) -> dict[str, Any]:
    """What a response that failed says of it."""
    message = str(error)
    code = _CODES.get(error.code or "", error.code or "server_error")
    if error.retry_after is not None and code == "rate_limit_exceeded":
        message = f"{message}; try again in {error.retry_after}s"
    return {"code": code, "message": message}
