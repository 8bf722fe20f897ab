"""Middleware: what a request passes before it reaches a route.

access_log    one log line and one count for every request
host_check    requests that a page of another site makes
auth          API keys
body_limits   bodies that are too large, too slow, too deep, or of the wrong type
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

import numpy as np
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.chat.prefetch import PAYER
from perdure.extension import extensions
from perdure.server.core.api_error import (
    PROTOCOL,
    ApiError,
    ClientLeft,
    rate_limited,
    refuse,
    to_api_error,
    unauthorised,
)
from perdure.server.core.keys import METRICS, Key, KeyAccount, Keys
from perdure.server.core.metrics import Metrics
from perdure.server.core.protocol import OPENAI, Protocol, protocol_at
from perdure.server.core.server_state import ServerState
from perdure.server.core.settings import AllowedHosts, Limits, host_name
from perdure.server.core.visit import LEFT, NO_SESSION, SESSION

# Access log. One line and one count for every request, whatever happens to it.

log = logging.getLogger("perdure.server")

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_CHECKS = frozenset({"/health", "/ready"})
STARTS = 4
"""Requests that begin in one turn of the event loop; each takes about a millisecond."""
CUT = 499
"""The status, in logs and metrics only, of a request whose client went away, or had its reply cancelled."""


def _header_text(name: str) -> str:
    """A name that comes from a client, as a header may have it: escaped as JSON does, and in quotes where it
    is empty, or begins or ends with a space."""
    escaped = json.dumps(name)[1:-1]
    return escaped if escaped and escaped == escaped.strip() else f'"{escaped}"'


def _given_id(scope: Scope) -> str | None:
    """The id that a client gave its request, so that it can cancel it by that."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return str(value.decode("ascii"))
    return None


_SESSION_HEADERS = (
    b"x-dynamo-session-id",
    b"x-session-id",
    b"x-claude-code-session-id",
    b"x-session-affinity",
    b"thread-id",
    b"session-id",
    b"x-openwebui-chat-id",
)
"""How clients name a conversation, for routers: what has the same name goes to one server."""
_SESSION_ID = re.compile(rb"[A-Za-z0-9._:-]{1,100}")


def session_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """What a client calls its conversation, for routers: what has the same name goes to one server."""
    known = {name: value for name, value in headers if name in _SESSION_HEADERS}
    header = next((known[name] for name in _SESSION_HEADERS if name in known), None)
    return header if header is not None and _SESSION_ID.fullmatch(header) else None


class JsonLinesHandler(logging.Handler):
    """Log records as lines of JSON. A line never has a message of a conversation in it unless asked to."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        try:
            shown: dict[str, Any] = {
                "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
                "level": record.levelname.lower(),
                "event": record.getMessage(),
                **getattr(record, "fields", {}),
            }
            if record.exc_info:
                shown["error"] = logging.Formatter().formatException(record.exc_info)
            self._out.write(json.dumps(shown) + "\n")
            self._out.flush()
        except Exception:
            self.handleError(record)


class AccessLog:
    """The outermost layer: whatever happens inside, the request is answered, counted and logged once."""

    def __init__(self, app: ASGIApp, metrics: Metrics, protocols: Sequence[Protocol]) -> None:
        self._app = app
        self._metrics = metrics
        self._protocols = protocols

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        protocol = next((each for each in self._protocols if path.startswith(each.prefix)), OPENAI)
        state = scope.setdefault("state", {})
        state[PROTOCOL] = protocol
        # A request that the server makes of itself may bring some.
        notes: dict[str, Any] = state.setdefault("notes", {})
        observer = self._metrics.observer
        request = None if observer is None else observer.began(scope)
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _given_id(scope) or uuid.uuid4().hex
        scope["state"]["request_id"] = request_id
        session = session_id(scope["headers"])
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    # As Anthropic's clients look for it.
                    (b"request-id", request_id.encode()),
                ]
                if session is not None:
                    message["headers"].append((b"x-session-id", session))
                if session_name := notes.get(SESSION):
                    message["headers"].append(
                        (b"x-perdure-session", _header_text(session_name).encode("ascii"))
                    )
                if why := notes.get(NO_SESSION):
                    message["headers"].append((b"x-perdure-no-session", _header_text(why).encode("ascii")))
                if ignored := notes.get("ignored"):
                    names = ", ".join(map(_header_text, ignored))
                    message["headers"].append((b"x-perdure-ignored", names.encode("ascii")))
                if reuse := notes.get("reuse"):
                    message["headers"].append((b"x-perdure-reuse", _header_text(reuse).encode("ascii")))
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except ClientLeft:
            notes["ended"] = LEFT
        except Exception as error:
            # The application has answered where it could, and logged the error.
            if not status:
                await to_api_error(error).response()(scope, receive, noted)
        finally:
            notes.pop(SESSION, None)
            # A stream has sent its head before anybody knew how it ends.
            if status == CUT:
                notes.setdefault("ended", LEFT)
            status = CUT if "ended" in notes else notes.pop("status", status)
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.request(scope["method"], route, status, seconds)
            fields = {
                "id": request_id,
                "method": scope["method"],
                "route": route,
                "status": status,
                "seconds": round(seconds, 6),
                **notes,
            }
            # Routers ask these every second: success is logged at debug level.
            level = logging.DEBUG if route in _CHECKS and status < 400 else logging.INFO
            log.log(level, "request", extra={"fields": fields})
            if observer is not None:
                observer.ended(request, fields)


class Starts:
    """Of hundreds of requests that come at once, a few begin in each turn of the event loop: streams go on in
    between, and who asks how the server is waits for a few of them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._begun = 0
        """In this turn."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") not in _CHECKS:
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._begun:
            loop.call_soon(self._next, loop)
        if self._begun < STARTS:
            self._begun += 1
            return
        waiting = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begun = 0
        while self._waiting and self._begun < STARTS:
            if not (waiting := self._waiting.popleft()).done():
                waiting.set_result(None)
                self._begun += 1
        if self._begun:
            loop.call_soon(self._next, loop)


# Host and origin check. Refuses requests that a web page of another site makes.
#
# A server without keys trusts any client, and a browser on this machine reaches it for any page it
# shows: by a name that the page's owner points at 127.0.0.1 (DNS rebinding), or by a cross-site request.

_OWN = (b"same-origin", b"none")


class HostCheck:
    """Lets a request pass if its Host is one of the server's, and no foreign page of a browser makes it."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        """Its hosts are those of this moment: they can change while the server runs. None lets all pass."""
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        checked = scope["type"] in ("http", "websocket") and not _is_local_socket(scope)
        hosts = self._state.hosts if checked else None
        if hosts is not None and (refused := _refused(hosts, scope)) is not None:
            await refuse(refused, scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_local_socket(scope: Scope) -> bool:
    """Whether it came by a Unix socket, which has no port: no page of a browser does."""
    server = scope.get("server")
    return server is not None and server[1] is None


def _refused(hosts: AllowedHosts, scope: Scope) -> ApiError | None:
    headers = dict(scope["headers"])
    # HTTP/1.0 has no Host; every browser sends one.
    host = headers.get(b"host", b"localhost").decode("latin-1")
    if host_name(host) not in hosts:
        return _forbidden(
            f"this server is not called {host[:100]!r}; `perdure serve --allow-host NAME` lets a name in",
            code="host_not_allowed",
        )
    origin = headers.get(b"origin")
    if origin is not None:
        if hosts.trusts_page(origin.decode("latin-1"), host):
            return None
        return _forbidden(
            f"pages of {origin.decode('latin-1')[:100]!r} may not use this server; "
            "`perdure serve --allow-host NAME` lets those of a host in",
            code="origin_not_allowed",
        )
    if headers.get(b"sec-fetch-site", b"none").lower() not in _OWN:
        return _forbidden("a page of another site may not use this server", code="origin_not_allowed")
    return None


def _forbidden(message: str, *, code: str) -> ApiError:
    return ApiError(403, message, code=code)


class Cors:
    """Adds the headers of CORS for the origins of this moment: they can change while the server runs."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._answered: tuple[tuple[str, ...], ASGIApp] = ((), app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = self._state.origins
        if origins != self._answered[0]:
            self._answered = origins, self._with(origins)
        await self._answered[1](scope, receive, send)

    def _with(self, origins: tuple[str, ...]) -> ASGIApp:
        if not origins:
            return self._app
        return CORSMiddleware(
            self._app,
            allow_origins=origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=(
                "x-request-id",
                "x-session-id",
                "x-perdure-session",
                "x-perdure-no-session",
                "retry-after",
            ),
        )


# API-key middleware. Rejects requests without a key, before their bodies are read.

OPEN = frozenset({"/", "/health", "/ready", "/openapi.json"})
"""What anybody may ask for: whether the server lives, and how to speak to it."""
OPERATOR = frozenset({"/metrics", "/v1/usage", "/v1/catalogue", "/v1/events", "/v1/models/pull", "/api/pull"})
"""What the operator's keys open, besides `/v1/models/NAME/load` and `unload`."""
_LOADING = re.compile(r"/v1/models/.+/(un)?load")
_OPERATOR_ONLY = frozenset({"/metrics", "/v1/events", "/v1/models/pull"})
"""What no other key opens: it shows everybody's requests, or has the server fetch something."""
_READING = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
"""Methods that no quota limits: a client over its daily limit still reads, exports and deletes its data."""
_STOP = "/stop"
ASSETS = "/page/"
"""Where the files of the page lie, each under a name with its digest. Anybody may load the page itself: what
it asks for then needs a key."""


class Auth:
    """Lets requests with a key pass, and puts the key's namespace into them."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] not in ("http", "websocket") or path in OPEN or path.startswith(ASSETS):
            await self._app(scope, receive, send)
            return
        secret = _secret(scope)
        key = self._keys.find(secret) if secret else None
        notes = scope["state"]["notes"]
        generates = scope["type"] == "websocket" or not (scope["method"] in _READING or path.endswith(_STOP))
        if (refused := await self._refused(path, secret, key, generates=generates)) is not None:
            if key is not None:
                notes["namespace"] = key.namespace
            await refuse(refused, scope, receive, send)
            return
        account = KeyAccount(key, self._keys) if key is not None else None
        scope["state"].update(namespace=key.namespace if key is not None else "", account=account)
        if key is not None:
            notes["namespace"] = key.namespace
        # Also for what is read ahead once the answer is out, in whichever thread that is asked for.
        PAYER.set(account)
        await self._app(scope, receive, send)

    async def _refused(
        self, path: str, secret: str | None, key: Key | None, *, generates: bool
    ) -> ApiError | None:
        if not self._keys.required:
            return None
        if key is None:
            return unauthorised(
                "this server does not know that key: check it, or ask the operator of the server for another"
                if secret
                else "this server needs a key: send it as `Authorization: Bearer KEY`"
            )
        if key.is_expired(time.time()):
            return unauthorised(f"this key expired on {key.expires}: ask for a new one")
        if generates and (over := await self._keys.admit(key)) is not None:
            return rate_limited(over.why, over.retry_after)
        is_operator = key.namespace == METRICS
        opens = path in OPERATOR or _LOADING.fullmatch(path) is not None
        if (path in _OPERATOR_ONLY and not is_operator) or (is_operator and not opens):
            return ApiError(
                403,
                f"metrics, events and pulls are for keys of the namespace {METRICS}, and those open only "
                f"{', '.join(sorted(OPERATOR))}, /v1/models/NAME/load and unload",
                code="forbidden",
            )
        return None


def _secret(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            return str(value.decode("latin-1")).strip()
        if name == b"authorization":
            scheme, _, secret = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer":
                return str(secret).strip()
    return None


# Body limits. Refuses bodies that are too large, too slow, too deep, or of the wrong type.

_PIECE = 64 << 10
"""Bytes that are looked at in one go: what a long body costs, it costs in many small parts."""
_STEP = np.zeros(256, np.int32)
_STEP[list(b"{[")] = 1
_STEP[list(b"}]")] = -1

JSON_TYPE = "application/json"
FILE_TYPE, FORM_TYPE = "application/octet-stream", "multipart/form-data"
_OF_BROWSERS = {b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"}


@functools.cache
def uploads() -> frozenset[str]:
    """The paths where a body is a file: it is read by its route, and never held in memory."""
    brought = (each.uploads for each in extensions().values())
    return forms().union({"/v1/sessions/import"}, *brought)


@functools.cache
def forms() -> frozenset[str]:
    """Those where it is a form with a file."""
    return frozenset().union(*(each.forms for each in extensions().values()))


class BodyLimits:
    """Hands a request on once its whole body is there. So a sender that is slow, or gone, costs one task
    and what it has sent, and never a place in the queue of the engine.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._uploads = 0

    @property
    def _limits(self) -> Limits:
        """Those of this moment: they can change while the server runs."""
        return self._state.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            with self._state.in_flight.admit(self._limits.requests):
                scope = typed(scope)
                if scope["method"] == "POST" and scope["path"] in uploads():
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
                scan.check(self._limits)
        return b"".join(parts)

    def _is_surely_within(self, body: bytes) -> bool:
        """Whether a short body has too few brackets and commas to break a limit, wherever they stand."""
        opened = body.count(b"{") + body.count(b"[")
        values, members = opened + body.count(b","), opened + body.count(b":")
        limits = self._limits
        few = opened <= limits.depth and values <= limits.values and members <= limits.members
        return few and len(body) <= _PIECE


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
    path = scope["path"]
    expected_type = FORM_TYPE if path in forms() else FILE_TYPE if path in uploads() else JSON_TYPE
    headers = dict(scope["headers"])
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    if content_type.partition(";")[0].strip().lower() == expected_type:
        return scope
    if protocol_at(scope).any_content_type and not headers.keys() & _OF_BROWSERS:
        others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        return {**scope, "headers": [*others, (b"content-type", JSON_TYPE.encode())]}
    raise ApiError(
        415,
        f"the content type is {content_type[:100]!r}; send `content-type: {expected_type}` "
        f"(curl: -H 'content-type: {expected_type}')",
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
        self.members = 0
        """Colons and opening brackets outside of texts: as many as lists, objects and their fields."""
        self._level = 0
        self._in_text = False
        self._escaping = False
        """Whether the piece before ended in a backslash that is not itself escaped."""

    def check(self, limits: Limits) -> None:
        """Refuse what is deeper or has more than it may."""
        if self.depth > limits.depth:
            raise ApiError(
                400, f"the JSON is nested deeper than {limits.depth} levels", code="nested_too_deeply"
            )
        if self.values > limits.values:
            many = f"{limits.values} values"
        elif self.members > limits.members:
            many = f"{limits.members} lists, objects and fields"
        else:
            return
        raise ApiError(
            413, f"the JSON has more than {many}, which is the limit: send less", code="too_many_values"
        )

    def push(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE):
            self._push(data[start : start + _PIECE])

    def _push(self, data: bytes) -> None:
        # What is long is mostly text, which this cuts out at the speed of memory.
        parts = self._without_escapes(data).split(b'"')
        outside = b"".join(parts[self._in_text :: 2])
        self._in_text ^= len(parts) % 2 == 0
        opened = outside.count(b"{") + outside.count(b"[")
        self.values += opened + outside.count(b",")
        self.members += opened + outside.count(b":")
        if outside:
            levels = np.cumsum(_STEP[np.frombuffer(outside, np.uint8)]) + self._level
            self.depth, self._level = max(self.depth, int(levels.max())), int(levels[-1])

    def _without_escapes(self, data: bytes) -> bytes:
        """The same, with no quote left that a backslash stands before, unless that is escaped itself."""
        if self._escaping and data.startswith((b'"', b"\\")):
            data = data[1:]
        # A run of backslashes is pairs, and one more or not.
        data = data.replace(b"\\\\", b"")
        self._escaping = data.endswith(b"\\")
        return data.replace(b'\\"', b"")


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed
