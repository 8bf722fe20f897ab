"""Errors in the shape of Anthropic's Messages."""

from __future__ import annotations

from typing import Any, Literal

from perdure.server.core.api_error import ApiError
from perdure.server.core.schemas import ResponseSchema

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class MessagesErrorDetail(ResponseSchema):
    type: str
    message: str


class MessagesErrorAnswer(ResponseSchema):
    """What every error of Messages looks like."""

    type: Literal["error"]
    error: MessagesErrorDetail


def error_body(error: ApiError) -> tuple[int, dict[str, Any]]:
    """The status and body of an error.

    Clients know by the words, and by 400, that a conversation has to be made shorter.
    """
    status, message = error.status, str(error)
    if error.code == "context_length_exceeded":
        status = 400
        if error.needed is not None and error.fits is not None:
            message = f"prompt is too long: {error.needed} tokens > {error.fits} maximum"
    elif status == 503:
        status = 529
    return status, {"type": "error", "error": error_detail(error, status, message)}


def error_detail(error: ApiError, status: int, message: str) -> dict[str, Any]:
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": kind, "message": message}
