"""Bodies that are too large, too slow or too deep go no further."""

from __future__ import annotations

import asyncio
import re

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.server.limits import Limits
from perdure.server.refusal import ClientLeft, Refused

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKETS = b"{}[]"
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _BRACKETS)
_STEP = np.zeros(256, np.int32)
_STEP[list(b"{[")] = 1
_STEP[list(b"}]")] = -1

UPLOADS = ("/v1/sessions/import",)
"""Where a body is a file: it is read by its route, and never held in memory."""


class Intake:
    """Hands a request on once its whole body is there. So a sender that is slow, or gone, costs one task
    and what it has sent, and never a place in the queue of the engine.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._inside += 1
        try:
            if self._inside > self._limits.requests:
                raise Refused(
                    429,
                    f"{self._limits.requests} requests are in flight, which is the limit; ask again later",
                    kind="rate_limit_error",
                    code="too_many_requests",
                    retry_after=1,
                )
            inner = receive if scope["path"] in UPLOADS else await self._whole(scope, receive)
        except Refused as refused:
            self._inside -= 1
            await refused.response()(scope, receive, send)
            return
        except BaseException:
            self._inside -= 1
            raise
        try:
            await self._app(scope, inner, send)
        finally:
            self._inside -= 1

    async def _whole(self, scope: Scope, receive: Receive) -> Receive:
        check_length(scope, self._limits.body_bytes)
        seconds = self._limits.body_seconds
        try:
            async with asyncio.timeout(seconds):
                body = await self._read(receive)
        except TimeoutError:
            raise Refused(
                408, f"the body did not come within {seconds:g} seconds", code="slow_request"
            ) from None
        if depth(body) > self._limits.depth:
            raise Refused(
                400, f"the JSON is nested deeper than {self._limits.depth} levels", code="nested_too_deeply"
            )
        return _replay(body, receive)

    async def _read(self, receive: Receive) -> bytes:
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._limits.body_bytes:
                raise too_large(self._limits.body_bytes)
            more = message.get("more_body", False)
        return b"".join(parts)


def check_length(scope: Scope, limit: int) -> None:
    """Refuse a body that says by itself that it is too long."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise too_large(limit)


def too_large(limit: int) -> Refused:
    return Refused(413, f"the body has more than {limit} bytes, which is the limit", code="body_too_large")


def depth(body: bytes) -> int:
    """How deeply JSON is nested. Nothing is parsed: parsers are what deep nesting is meant to hurt."""
    if body.count(b"{") + body.count(b"[") <= 1:
        return 1
    brackets = _STRINGS.sub(b"", body).translate(None, _NO_BRACKETS)
    if not brackets:
        return 0
    return int(np.cumsum(_STEP[np.frombuffer(brackets, np.uint8)]).max())


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replayed() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed
