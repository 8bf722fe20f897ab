"""How answers are described in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from perdure.server.schemas.base import ErrorAnswer

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
