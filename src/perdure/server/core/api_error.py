"""API errors: every exception as a status and a body in OpenAI's format."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perdure.chat.prefetch import PAYER
from perdure.errors import (
    BusyError,
    CannotRewindError,
    ClosedError,
    ContextOverflow,
    DeadlyFileError,
    EngineError,
    InvalidInputError,
    ModelNotFoundError,
    OutOfMemoryError,
    PerdureError,
    QuotaError,
    SessionBusyError,
    SessionError,
    SessionExistsError,
    SessionNotFoundError,
    StateError,
    StoreError,
    StoreFullError,
    TooLargeError,
    TurnKeptError,
)

log = logging.getLogger("perdure.server")

_CROWDED = "too_many_connections"
_KEPT = "turn_kept"
PROTOCOL = "protocol"
"""In the state of a request: the protocol that is spoken at its path."""


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer other than the one that was asked for, with all that HTTP says about it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        needed: int | None = None,
        fits: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.needed, self.fits = needed, fits
        """Tokens, where a context is too small."""

    @property
    def body(self) -> dict[str, Any]:
        shape = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": shape}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"retry-after": str(self.retry_after)} if self.retry_after is not None else {}
        if self.code == _KEPT:
            # Libraries of clients try a 409 again: here that leads nowhere.
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (408, 413) or self.code == _CROWDED:
            # What is left of the body is not worth reading.
            headers["connection"] = "close"
        return headers

    def response(self) -> Response:
        """Its answer, in the shape of the protocol that is spoken where it is sent."""
        return ErrorResponse(self)


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error, or close a WebSocket before it opens."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": str(error)[:100]})
    else:
        await error.response()(scope, receive, send)


class ErrorResponse(Response):
    """An error, whose shape is known once its request is: middleware and routes alike give these."""

    media_type = "application/json"

    def __init__(self, error: ApiError) -> None:
        super().__init__(b"", status_code=error.status, headers=error.headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shape: dict[str, Any] = self._error.body
        if (protocol := scope.get("state", {}).get(PROTOCOL)) is not None:
            self.status_code, shape = protocol.error_body(self._error)
        # Escaped: whatever text an error quotes, its answer can be sent.
        self.body = json.dumps(shape).encode()
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


class ClientLeft(Exception):
    """Nobody is there to be answered. It is logged as 499."""


def invalid(where: str, problem: str, *, code: str = "invalid_value") -> ApiError:
    """Of a field of a request, by its path."""
    return ApiError(400, f"{where}: {problem}", param=where, code=code)


def unreadable(where: str, what: str) -> ApiError:
    """Of a part of a message that is no text."""
    return invalid(where, f"{what} cannot be read here; send text", code="unsupported_content")


def deadline(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"not finished within {seconds:g} seconds, which is the limit for this request; "
        "ask for fewer tokens, or for more time",
        kind="timeout_error",
        code="deadline_exceeded",
    )


def too_many_connections(limit: int) -> ApiError:
    return ApiError(
        503,
        f"{limit} connections are open, which is the limit; ask again later",
        code=_CROWDED,
        retry_after=2,
    )


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping; ask again once it is back", code="stopping", retry_after=5)


def unauthorised(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


def rate_limited(why: str, retry_after: int) -> ApiError:
    return ApiError(429, why, code="rate_limit_exceeded", retry_after=retry_after)


_SERVER_WORDS = {
    "open the model with a larger n_ctx": "have the server started with a larger --ctx",
    "take a larger n_ctx": "have the server started with a larger --ctx",
    "Open the context with a larger n_ctx": "Have the server started with a larger --ctx",
}
"""What the library advises, in the words of a server's client."""


def _in_server_words(text: str) -> str:
    for phrase, instead in _SERVER_WORDS.items():
        text = text.replace(phrase, instead)
    return text


_PLAIN = {
    "store_full": "the server has no room to store this: ask again later, or tell the operator",
    "store_unavailable": "the server cannot use its store now, and nothing was stored: ask again later",
    "out_of_memory": "the server has no memory for this: ask again later, or ask for less",
    "engine_unavailable": "the engine cannot answer now: ask again later",
    "model_unusable": "this model cannot be used here: name another one, or tell the operator",
    "stopping": "the server is stopping: ask again once it is back",
}
_FAILED = "the server failed; its log says more"


def for_client(message: str, code: str | None = None) -> str:
    """What a client hears of a failure of the server: where keys tell clients apart, a plain sentence without
    paths, hosts and names of the machine. The log has the whole."""
    if PAYER.get() is None:
        return message
    log.error("%s: %s", code or "a failure that a client hears less of", message)
    return _PLAIN.get(code or "", _FAILED)


def to_api_error(error: BaseException) -> ApiError:
    """What HTTP says about an error."""
    if isinstance(error, ApiError):
        return error
    for known, status, kind, code in BY_CLASS:
        # An error class that a layer adds later is reported like its parent.
        if isinstance(error, known):
            tokens = (error.needed, error.fits) if isinstance(error, ContextOverflow) else (None, None)
            message = _in_server_words(str(error)) if isinstance(error, ContextOverflow) else str(error)
            if status >= 500 and not isinstance(error, QuotaError):
                message = for_client(message, code)
            return ApiError(
                status,
                message,
                kind=kind,
                code=code,
                retry_after=_RETRY.get(status),
                needed=tokens[0],
                fits=tokens[1],
            )
    if isinstance(error, UnicodeError):
        return ApiError(400, "a text in the request is not valid Unicode", code="invalid_unicode")
    log.error("a request failed", exc_info=error)
    return ApiError(500, _FAILED, code="internal_error")


def validation(problems: Sequence[Any]) -> ApiError:
    """What is wrong with a body, by the path of the first field that is."""
    first: dict[str, Any] = problems[0] if problems else {"loc": (), "msg": "not valid"}
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    # The names of variants that were tried are not part of the path.
    path = ".".join(part for part in where if not _is_variant(part))
    message = first["msg"]
    if first.get("type") == "string_pattern_mismatch":
        # The pattern is for machines, and in /openapi.json.
        message = "it does not look like one of this server's: take it from an answer as it is"
    if first.get("type") == "json_invalid":
        return ApiError(
            400, f"the body is no JSON: {first.get('ctx', {}).get('error', message)}", code="invalid_json"
        )
    return ApiError(400, f"{path}: {message}" if path else message, param=path or None, code="invalid_value")


def install(app: FastAPI) -> None:
    """Have every error of `app` reported this way."""

    async def known(request: Request, error: Exception) -> Response:
        return to_api_error(error).response()

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation(error.errors()).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        codes = {404: "unknown_url", 405: "method_not_allowed"}
        response = ApiError(
            error.status_code, str(error.detail), code=codes.get(error.status_code)
        ).response()
        response.headers.update(error.headers or {})
        return response

    async def left(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    for kind in (PerdureError, ApiError, UnicodeError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(ClientLeft, left)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, known)


def _is_variant(part: str) -> bool:
    return part[:1].isupper() or "[" in part or part in ("str", "int", "float", "bool")


_RETRY = {429: 1, 503: 2}

BY_CLASS: tuple[tuple[type[PerdureError], int, str, str], ...] = (
    # The most particular first.
    (ContextOverflow, 400, "invalid_request_error", "context_length_exceeded"),
    (SessionNotFoundError, 404, "not_found_error", "session_not_found"),
    (SessionExistsError, 409, "invalid_request_error", "session_exists"),
    (SessionBusyError, 409, "invalid_request_error", "session_busy"),
    (TurnKeptError, 409, "invalid_request_error", _KEPT),
    (SessionError, 409, "invalid_request_error", "session_error"),
    (ModelNotFoundError, 404, "not_found_error", "model_not_found"),
    (InvalidInputError, 400, "invalid_request_error", "invalid_value"),
    (TooLargeError, 400, "invalid_request_error", "too_large"),
    (CannotRewindError, 409, "invalid_request_error", "cannot_rewind"),
    (BusyError, 429, "rate_limit_error", "queue_full"),
    (StateError, 422, "invalid_request_error", "unusable_state"),
    (QuotaError, 507, "server_error", "quota_exceeded"),
    (StoreFullError, 507, "server_error", "store_full"),
    (StoreError, 503, "server_error", "store_unavailable"),
    (OutOfMemoryError, 503, "server_error", "out_of_memory"),
    (EngineError, 503, "server_error", "engine_unavailable"),
    (ClosedError, 503, "server_error", "stopping"),
    (DeadlyFileError, 500, "server_error", "model_unusable"),
    (PerdureError, 500, "server_error", "internal_error"),
)
