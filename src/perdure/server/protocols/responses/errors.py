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


def error_detail(error: ApiError) -> dict[str, Any]:
    """What a response that failed says of it."""
    message = str(error)
    code = _CODES.get(error.code or "", error.code or "server_error")
    if error.retry_after is not None and code == "rate_limit_exceeded":
        message = f"{message}; try again in {error.retry_after}s"
    return {"code": code, "message": message}
