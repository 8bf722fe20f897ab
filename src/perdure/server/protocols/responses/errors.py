"""Errors inside of a response: over HTTP they have the shape of all of OpenAI's."""

from __future__ import annotations

from typing import Any

from perdure.server.core.api_error import ApiError

_CODES = {
    "queue_full": "rate_limit_exceeded",
    "too_many_requests": "rate_limit_exceeded",
    "engine_unavailable": "server_is_overloaded",
    "store_unavailable": "server_is_overloaded",
    "stopping": "server_is_overloaded",
    "invalid_value": "invalid_prompt",
}
"""Codes that clients act on: they ask again later, or make the conversation shorter."""


def not_kept(why: str) -> ApiError:
    """Of a response that was to be stored: its reply was made, and the store refused it."""
    return ApiError(
        500,
        f"the reply was made but could not be stored: {why}",
        kind="server_error",
        code="response_not_kept",
    )


def sent_differs() -> ApiError:
    """Of a stream that is resumed, whose reply came out otherwise than what its client has of it."""
    return ApiError(
        409,
        "the reply was made again and is not the one of which a part was sent: read the whole by GET, "
        "without starting_after",
        code="stream_not_resumable",
    )


def error_detail(error: ApiError) -> dict[str, Any]:
    """What a response that failed says of it."""
    message = str(error)
    code = _CODES.get(error.code or "", error.code or "server_error")
    if error.retry_after is not None and code == "rate_limit_exceeded":
        message = f"{message}; try again in {error.retry_after}s"
    return {"code": code, "message": message}
