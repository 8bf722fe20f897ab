"""Body limits. Refuses bodies that are too large, too slow, too deep, or of the wrong type."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.server.core.api_error import ApiError, ClientLeft
from perdure.server.core.app_state import InFlight
from perdure.server.core.protocol import protocol_at
from perdure.server.core.settings import Limits

_PIECE = 64 << 10
"""Bytes that are looked at in one go: what a long body costs, it costs in many small parts."""
_STEP = np.zeros(256, np.int32)
_STEP[list(b"{[")] = 1
_STEP[list(b"}]")] = -1

JSON_TYPE = "application/json"
FILE_TYPE = "application/octet-stream"
_OF_BROWSERS = {b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"}
UPLOADS = ("/v1/sessions/import",)
"""Where a body is a file: it is read by its route, and never held in memory."""


class BodyLimits:
    """Hands a request on once its whole body is there. So a sender that is slow, or gone, costs one task
    and what it has sent, and never a place in the queue of the engine.
    """

    def __init__(self, app: ASGIApp, limits: Callable[[], Limits], in_flight: InFlight) -> None:
        """`limits` gives those of this moment: they can change while the server runs."""
        self._app = app
        self._current = limits
        self._in_flight = in_flight
        self._uploads = 0

    @property
    def _limits(self) -> Limits:
        return self._current()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            with self._in_flight.admit(self._limits.requests):
                scope = typed(scope)
                if scope["path"] in UPLOADS:
                    await self._upload(scope, receive, send)
                else:
                    await self._app(scope, await self._whole(scope, receive), send)
        except ApiError as error:
            await error.response()(scope, receive, send)

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._uploads >= self._limits.uploads:
            raise ApiError(
                429,
                f"{self._limits.uploads} files are coming in, which is the limit; ask again later",
                kind="rate_limit_error",
                code="too_many_requests",
                retry_after=5,
            )
        self._uploads += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._uploads -= 1

    async def _whole(self, scope: Scope, receive: Receive) -> Receive:
        check_length(scope, self._limits.body_bytes)
        seconds = self._limits.body_seconds
        try:
            async with asyncio.timeout(seconds):
                body = await self._read(receive)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not come within {seconds:g} seconds", code="slow_request"
            ) from None
        if body and json.detect_encoding(body[:4]) not in ("utf-8", "utf-8-sig"):
            # The scan below counts bytes: in another encoding it would miss what the parser then finds.
            raise ApiError(400, "the body is not UTF-8, the only encoding of JSON here", code="invalid_json")
        return _replay(body, receive)

    async def _read(self, receive: Receive) -> bytes:
        parts, size, more, scan = [], 0, True, JsonScan()
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._limits.body_bytes:
                raise too_large(self._limits.body_bytes)
            more = message.get("more_body", False)
            if more or len(parts) > 1 or not self._is_surely_within(parts[0]):
                scan.push(parts[-1])
                self._check(scan)
        return b"".join(parts)

    def _is_surely_within(self, body: bytes) -> bool:
        """Whether a short body has too few brackets and commas to break a limit, wherever they stand."""
        opened = body.count(b"{") + body.count(b"[")
        values = opened + body.count(b",")
        return len(body) <= _PIECE and opened <= self._limits.depth and values <= self._limits.values

    def _check(self, scan: JsonScan) -> None:
        if scan.depth > self._limits.depth:
            raise ApiError(
                400, f"the JSON is nested deeper than {self._limits.depth} levels", code="nested_too_deeply"
            )
        if scan.values > self._limits.values:
            raise ApiError(
                413,
                f"the JSON has more than {self._limits.values} values, which is the limit",
                code="too_many_values",
            )


def check_length(scope: Scope, limit: int) -> None:
    """Refuse a body that says by itself that it is too long."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise too_large(limit)


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes, which is the limit", code="body_too_large")


def typed(scope: Scope) -> Scope:
    """The request, if its content type is right. A POST of a type that a web page could send to another site
    without asking first is refused.

    Ollama reads every body as JSON, and its documentation's own `curl -d` names another type: so does this
    server where that protocol is spoken, unless a browser sent it, which says so.
    """
    if scope["method"] not in ("POST", "PUT", "PATCH"):
        return scope
    wanted = FILE_TYPE if scope["path"] in UPLOADS else JSON_TYPE
    headers = dict(scope["headers"])
    given = headers.get(b"content-type", b"").decode("latin-1")
    if given.partition(";")[0].strip().lower() == wanted:
        return scope
    if protocol_at(scope).any_content_type and not headers.keys() & _OF_BROWSERS:
        others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        return {**scope, "headers": [*others, (b"content-type", JSON_TYPE.encode())]}
    raise ApiError(
        415,
        f"the content type is {given[:100]!r}; send `content-type: {wanted}` "
        f"(curl: -H 'content-type: {wanted}')",
        code="unsupported_media_type",
    )


class JsonScan:
    """How deeply JSON is nested and how many values it has, found out piece by piece as it comes.

    Nothing is parsed: parsers are what such bodies are meant to hurt. The time is linear, the memory that of
    one piece.
    """

    def __init__(self) -> None:
        self.depth = 0
        """The deepest level so far."""
        self.values = 0
        """Commas and opening brackets outside of texts: no fewer than there are values, less one."""
        self._level = 0
        self._in_text = False
        self._escaping = False
        """Whether the piece before ended in a backslash that is not itself escaped."""

    def push(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE):
            self._push(np.frombuffer(data, np.uint8, min(_PIECE, len(data) - start), start))

    def _push(self, data: NDArray[np.uint8]) -> None:
        quotes = self._unescaped(data, data == ord('"'))
        inside = np.cumsum(quotes) + self._in_text
        outside = inside % 2 == 0
        steps = _STEP[data] * outside
        levels = np.cumsum(steps) + self._level
        self.depth = max(self.depth, int(levels.max()))
        self.values += int(np.count_nonzero(steps > 0) + np.count_nonzero(outside & (data == ord(","))))
        self._level, self._in_text = int(levels[-1]), bool(inside[-1] % 2)

    def _unescaped(self, data: NDArray[np.uint8], quotes: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The quotes that no backslash stands before, unless that is escaped itself."""
        backslashes = data == ord("\\")
        carried, self._escaping = self._escaping, False
        if not carried and not backslashes.any():
            return quotes
        at = np.arange(len(data))
        last_other = np.maximum.accumulate(np.where(backslashes, -1, at))
        # How many backslashes in a row end at each place, those of the piece before included.
        runs = at - last_other + (carried & (last_other < 0))
        self._escaping = bool(runs[-1] % 2)
        before = np.concatenate(([carried], runs[:-1]))
        unescaped: NDArray[np.bool_] = quotes & (before % 2 == 0)
        return unescaped


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replayed() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed
