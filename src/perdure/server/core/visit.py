"""Visit: the models that one request uses, and signs of life while it waits for them.

A request takes a lease of its model before anything is computed, and gives it back when its answer is sent: a
model is unloaded only between requests. Where the model has to be loaded first, a client that wants a stream
hears after a while that its answer has begun: comments in server-sent events, lines without text in Ollama's.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.errors import PerdureError
from perdure.server.core.api_error import ClientLeft, deadline
from perdure.server.core.keys import METRICS, KeyAccount
from perdure.server.core.protocol import SSE, Events, ProtocolEvent, protocol_at
from perdure.server.core.settings import Limits
from perdure.server.pool import ModelPool, PooledModel
from perdure.sessions.pending_turn import TurnExtra

VISIT = "visit"
"""Where it is in the state of a request."""
SESSION = "session"
"""Where the session that a request is a turn of stands in the notes of the request."""
CANCELLED, LEFT = "cancelled", "left"
"""How a reply `ended` that is not whole, in the same notes: as its client asked, or as the client left."""
STOPPED = "its server was stopped"
"""Why a reply is interrupted when the server ends."""
NO_SESSION = "no_session"
"""Why a conversation that the request names gets no turn, in the same notes."""
log = logging.getLogger("perdure.server")
_COMMENT = b": the model is being loaded\n\n"

Sign = Callable[[], Events]
"""What a stream that is no server-sent events says while its client waits."""


class Visit:
    """What one request holds."""

    def __init__(
        self, scope: Scope | None = None, receive: Receive | None = None, send: Send | None = None
    ) -> None:
        """Without `receive` and `send`, for a request that is no separate HTTP request."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._held = ExitStack()
        self._is_open = False
        """Whether the answer was begun while its client waited."""
        self._error: bytearray | None = None
        self._early: list[Message] = []
        """Parts of the body that came while the request waited."""
        self._last: list[Callable[[], Awaitable[object]]] = []
        self.model_name = ""
        """The model that was asked for last, as its client names it."""

    def at_end(self, work: Callable[[], Awaitable[object]]) -> None:
        """Have something done when the answer is sent, while the models are still there."""
        self._last.append(work)

    async def finish(self) -> None:
        """Do what was left for the end, and give all leases back."""
        try:
            if self._last:
                # Also where the client has left, which cancels the rest of its request.
                await asyncio.shield(self._do_last())
        finally:
            self.close()

    async def _do_last(self) -> None:
        for work in self._last:
            try:
                await work()
            except PerdureError as error:
                log.info("at the end of a request: %s", error)

    def close(self) -> None:
        """Give all leases back."""
        self._held.close()

    async def enter(
        self,
        pool: ModelPool,
        model: PooledModel,
        limits: Limits,
        *,
        sign: Sign | bool = False,
    ) -> None:
        """Have a model until the end of the visit. With `sign`, a waiting client gets keep-alives."""
        if not pool.try_acquire(model):
            await self._wait(pool, model, limits, sign)
        self._held.callback(pool.release, model)

    async def receive(self) -> Message:
        """The next part of what the client sends."""
        assert self._receive is not None
        return self._early.pop(0) if self._early else await self._receive()

    async def _left(self) -> None:
        """Return when the client has left."""
        if self._receive is None:
            await asyncio.Event().wait()
            return
        while (message := await self._receive())["type"] != "http.disconnect":
            self._early.append(message)

    async def send(self, message: Message) -> None:
        """Send a part of the answer, of which the head may be out."""
        assert self._send is not None
        if not self._is_open:
            await self._send(message)
        elif message["type"] == "http.response.start":
            # Its status was sent: the error becomes an event.
            self._error = None if message["status"] == 200 else bytearray()
        elif self._error is None:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send({**message, "body": self._framed_error(bytes(self._error))})

    async def _wait(self, pool: ModelPool, model: PooledModel, limits: Limits, sign: Sign | bool) -> None:
        coming = asyncio.ensure_future(pool.acquire(model))
        leaving = asyncio.ensure_future(self._left())
        loop = asyncio.get_running_loop()
        end = loop.time() + limits.request_seconds
        silence = limits.silent_seconds
        try:
            while not coming.done():
                left = end - loop.time()
                await asyncio.wait(
                    (coming, leaving), timeout=min(silence, left), return_when=asyncio.FIRST_COMPLETED
                )
                if coming.done():
                    break
                if leaving.done():
                    raise ClientLeft
                if loop.time() >= end:
                    raise deadline(limits.request_seconds)
                if sign is not False and self._send is not None:
                    await self._show_life(sign, limits.send_seconds)
                    silence = limits.progress_seconds
        except BaseException:
            coming.cancel()
            with suppress(BaseException):
                await coming
                # It was granted at the last moment.
                pool.release(model)
            raise
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        coming.result()

    async def _show_life(self, sign: Sign | bool, seconds: float) -> None:
        assert self._send is not None
        assert self._scope is not None
        framing = protocol_at(self._scope).framing
        body = _COMMENT if framing is SSE else b""
        if callable(sign):
            body = b"".join(map(framing.frame, sign()))
        async with asyncio.timeout(seconds):
            if not self._is_open:
                self._is_open = True
                headers = [
                    (b"content-type", f"{framing.media_type}; charset=utf-8".encode()),
                    (b"cache-control", b"no-store"),
                    (b"x-accel-buffering", b"no"),
                ]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def _framed_error(self, body: bytes) -> bytes:
        assert self._scope is not None
        named = b""
        with suppress(ValueError, AttributeError):
            named = str(json.loads(body).get("type", "")).encode()
        return protocol_at(self._scope).framing.frame(ProtocolEvent(named, body))


class Visits:
    """Gives each HTTP request a visit, which ends with its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = Visit(scope, receive, send)
        scope.setdefault("state", {})[VISIT] = visit
        try:
            await self._app(scope, visit.receive, visit.send)
        finally:
            await visit.finish()


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, and the fields of its log line."""

    namespace: str
    notes: dict[str, Any]
    agent: str = ""
    """The program that asks, by the first word of its User-Agent."""
    account: KeyAccount | None = None
    """What its key may still use, where it has one."""
    request_id: str = ""
    """Of its request, as the header `x-request-id` has it."""
    headers: Mapping[str, str] | None = None
    """Of its request, in which it may name its conversation; None where conversations are not kept."""
    visit: Visit = field(default_factory=Visit)
    """The models that its request uses."""
    idempotency_key: str | None = None
    """What its request is known by, so that a turn that is asked for twice is made once."""

    @property
    def session(self) -> str | None:
        """The session that its request is a turn of, as far as that is known by now."""
        return self.notes.get(SESSION)

    @property
    def ignored(self) -> list[str]:
        """The fields of its request that nobody knows, as far as it was read by now."""
        ignored: list[str] = self.notes.get("ignored", [])
        return ignored

    @property
    def turn_extra(self) -> TurnExtra:
        """What a turn of a session that it asks for has besides messages and settings."""
        return TurnExtra(idempotency_key=self.idempotency_key)

    def in_session(self, name: str) -> None:
        """Have the answer, and the list of requests, say which session it is a turn of."""
        self.notes[SESSION] = name

    def charge(self, prompt_tokens: int, completion_tokens: int = 0) -> None:
        """Have its key pay for what was computed, and note it for the log."""
        notes = self.notes
        notes["prompt_tokens"] = notes.get("prompt_tokens", 0) + prompt_tokens
        notes["completion_tokens"] = notes.get("completion_tokens", 0) + completion_tokens
        if self.account is not None:
            self.account.spend(prompt_tokens, completion_tokens)


def is_operator(caller: Caller) -> bool:
    return caller.namespace == METRICS
