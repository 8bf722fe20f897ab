"""`/v1/responses` as a WebSocket: one connection for many responses, each event a message."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from fastapi import APIRouter, WebSocket
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.websockets import WebSocketDisconnect

from perdure import PerdureError
from perdure.ext.responses.items import Item
from perdure.ext.responses.requests import ResponseRequest, input_items
from perdure.ext.responses.stored import Responses, StoredResponse
from perdure.ext.responses.stream import ResponseWriter, WarmUpWriter
from perdure.spi.server import (
    LARGE,
    ApiError,
    AppState,
    Caller,
    Events,
    Follower,
    JsonScan,
    Sink,
    Visit,
    deliver,
    invalid,
    rate_limited,
    read_json,
    to_api_error,
    too_large,
    unauthorised,
    validation,
    with_linked_images,
)
from perdure.spi.sessions import TurnStream

router = APIRouter(tags=["Responses"])

_UNSUPPORTED = 1003
"""The code of WebSocket with which a connection is ended that sent a binary message."""
_POLICY = 1008
"""The code of WebSocket with which a connection is ended whose key is not good any more."""
_SECONDS = 3600.0
"""That a connection may last."""
_REMEMBERED = 8
"""Responses that are not stored and can be continued, for as long as the connection lasts."""


@router.websocket("/v1/responses")
async def responses(socket: WebSocket) -> None:
    """Responses one after another. Those that are not stored can be continued here, and nowhere else."""
    await socket.accept()
    state = socket.state
    app_state = AppState.of(socket.app.state.server)
    headers = socket.headers if app_state.server.conversations else None
    caller = Caller(state.namespace, state.notes, account=getattr(state, "account", None), headers=headers)
    connection = WebSocketConnection(socket, app_state, caller)
    with suppress(WebSocketDisconnect):
        await connection.serve()


class WebSocketSink(Sink):
    """Sends each event as a message. An error of a response is one of its events."""

    def __init__(self, socket: WebSocket) -> None:
        super().__init__()
        self.is_open = True
        self._socket = socket

    async def _send(self, events: Events) -> None:
        for event in events:
            await self._socket.send_text(event.data.decode())


class RememberedItems(NamedTuple):
    """All items of a response that is not stored."""

    items: list[Item]
    size: int
    """As JSON, in characters."""


class Remembered:
    """The latest responses of a connection that are not stored, by id: a few, and of a few bytes."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, RememberedItems] = OrderedDict()

    def get(self, response_id: str | None) -> RememberedItems | None:
        return self._by_id.get(response_id or "")

    def add(self, response_id: str, remembered: RememberedItems, limit: int) -> None:
        """Remember one more, and forget the oldest while all have more than `limit` characters together."""
        self._by_id[response_id] = remembered
        while len(self._by_id) > _REMEMBERED or sum(each.size for each in self._by_id.values()) > limit:
            self._by_id.popitem(last=False)


class WebSocketConnection:
    """One client's connection. What is being made for it ends when it does."""

    def __init__(self, socket: WebSocket, app_state: AppState, caller: Caller) -> None:
        self._socket = socket
        self._caller = caller
        self._app_state = app_state
        self._remembered = Remembered()
        self._received: asyncio.Queue[str | bytes | None] = asyncio.Queue(maxsize=1)
        self._left = asyncio.Event()
        """Set when the client has left."""

    async def serve(self) -> None:
        reading = asyncio.ensure_future(self._read())
        try:
            async with asyncio.timeout(_SECONDS):
                while (text := await self._received.get()) is not None and not self._left.is_set():
                    await self._answer(text)
        except TimeoutError:
            limit = ApiError(
                400,
                f"a connection lasts {_SECONDS / 60:g} minutes",
                code="websocket_connection_limit_reached",
            )
            await self._refuse(limit)
            await self._socket.close()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self) -> None:
        """Take what the client sends, and notice when it leaves."""
        with suppress(RuntimeError):
            while (message := await self._socket.receive())["type"] == "websocket.receive":
                text = message.get("text")
                await self._received.put(message.get("bytes") if text is None else text)
        self._left.set()
        await self._received.put(None)

    async def _answer(self, text: str | bytes) -> None:
        account = self._caller.account
        try:
            if isinstance(text, bytes):
                await self._refuse(invalid("type", "send text: binary messages are not read"))
                self._left.set()
                await self._socket.close(_UNSUPPORTED)
                return
            if account is not None and not account.is_good:
                await self._refuse(unauthorised("this key was withdrawn, or has expired: ask for a new one"))
                self._left.set()
                await self._socket.close(_POLICY)
                return
            if account is not None and (over := await account.admit()) is not None:
                raise rate_limited(over.why, over.retry_after)
            with self._app_state.server.in_flight.admit(self._app_state.server.limits.requests):
                sent = text.encode("utf-8", "surrogatepass")
                fetched = await with_linked_images(sent, self._app_state.server, self._caller.namespace)
                text = text if fetched is sent else fetched.decode()
                # In a thread: a long message takes long to read, and every client waits for the event loop.
                in_thread = self._app_state.server.read if len(text) > LARGE else self._app_state.server.call
                body, generates = await in_thread(self._parsed, text)
                await self._respond(body, generates, len(text))
        except ValidationError as error:
            await self._refuse(validation(error.errors()))
        except (PerdureError, ApiError, UnicodeError) as error:
            await self._refuse(to_api_error(error))

    def _parsed(self, text: str) -> tuple[ResponseRequest, bool]:
        limits = self._app_state.server.limits
        scan = JsonScan()
        scan.push(text.encode("utf-8", "surrogatepass"))
        scan.check(limits)
        try:
            event = read_json(text)
        except ValueError as error:
            raise ApiError(400, f"the message is no JSON: {error}", code="invalid_json") from None
        if not isinstance(event, dict) or event.get("type") != "response.create":
            raise invalid("type", "send response.create")
        # Older clients put the request one level deeper.
        inner = event.get("response")
        fields = dict(inner) if isinstance(inner, dict) else dict(event)
        generates = fields.pop("generate", True) is not False
        fields.pop("type", None)
        body = ResponseRequest.model_validate({**fields, "stream": True})
        self._app_state.server.models.check(body.model or "")
        return body, generates

    async def _respond(self, body: ResponseRequest, generates: bool, size: int) -> None:
        """`size` is that of the message, in characters."""
        # Each response is counted by itself: a connection may last for an hour.
        caller = replace(self._caller, notes={}, visit=Visit())
        try:
            app_state = await self._app_state.serving(body.model or "", caller.visit)
            await self._respond_with(app_state, caller, body, generates, size)
        finally:
            await caller.visit.finish()

    async def _respond_with(
        self, app_state: AppState, caller: Caller, body: ResponseRequest, generates: bool, size: int
    ) -> None:
        responses = Responses(app_state, self._caller.namespace)
        items = input_items(body)
        previous = self._remembered.get(body.previous_response_id)
        if previous is not None:
            size += previous.size
            if size > app_state.server.limits.body_bytes:
                raise too_large(app_state.server.limits.body_bytes)
            items = [*previous.items, *items]
            body = body.model_copy(update={"input": items, "previous_response_id": None})
        if not generates:
            body = body.model_copy(update={"store": False, "max_output_tokens": 1})
        notes: dict[str, Any] = {}
        stored: StoredResponse | None = None
        stream: TurnStream | ApiError
        if body.stores:
            response, stream = await app_state.call(responses.start, body, notes)
            stored, head = response, response.head
        else:
            head = await app_state.call(responses.unstored_head, body)
            stream = await app_state.call(responses.submit_unstored, body)
        writer = (ResponseWriter if generates else WarmUpWriter)(head, notes=notes)
        if isinstance(stream, ApiError):
            await WebSocketSink(self._socket).close([*writer.start(), *writer.error(stream)])
            return
        follower = Follower(stream, app_state, caller, writer=writer)
        try:
            await deliver(follower, WebSocketSink(self._socket), self._left.wait(), app_state.server.limits)
        finally:
            if stored is not None and not writer.ended:
                await asyncio.shield(app_state.call(stored.note_sent, writer.sent))
        if follower.replies and not body.stores:
            output = head.whole(follower.replies)["output"] if generates else []
            size += sum(len(to_json(item)) for item in output)
            self._remembered.add(
                head.id, RememberedItems([*items, *output], size), app_state.server.limits.body_bytes
            )

    async def _refuse(self, error: ApiError) -> None:
        shown = {**error.body, "type": "error", "status": error.status}
        await self._socket.send_text(json.dumps(shown))
