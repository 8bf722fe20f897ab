"""`/v1/responses` as a WebSocket: one connection for many responses, each event a message."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, WebSocket
from pydantic import ValidationError
from starlette.websockets import WebSocketDisconnect

from perdure.chat.reply import ChatReply
from perdure.errors import PerdureError
from perdure.server.api_error import ApiError, rate_limited, to_api_error, validation
from perdure.server.app_state import AppState
from perdure.server.client_job import PromptProgress, tokens_so_far
from perdure.server.keys import KeyAccount
from perdure.server.middleware.body_limits import JsonScan
from perdure.server.protocols.responses.items import Item
from perdure.server.protocols.responses.requests import ResponseRequest, input_items
from perdure.server.protocols.responses.stored import Responses
from perdure.server.protocols.responses.stream import ResponseWriter
from perdure.sessions.fold import TurnStream

router = APIRouter(tags=["Responses"])

_SECONDS = 3600.0
"""That a connection may last."""
_REMEMBERED = 8
"""Responses that are not stored and can be gone on from, for as long as the connection lasts."""


@router.websocket("/v1/responses")
async def responses(socket: WebSocket) -> None:
    """Responses one after another. Those that are not stored can be gone on from here, and nowhere else."""
    await socket.accept()
    account = getattr(socket.state, "account", None)
    connection = Connection(socket, socket.app.state.app_state, socket.state.namespace, account)
    with suppress(WebSocketDisconnect):
        await connection.serve()


class Connection:
    """One client's connection. What is being made for it ends when it does."""

    def __init__(
        self, socket: WebSocket, app_state: AppState, namespace: str, account: KeyAccount | None
    ) -> None:
        self._socket = socket
        self._account = account
        self._app_state = app_state
        self._responses = Responses(app_state, namespace)
        self._kept: OrderedDict[str, list[Item]] = OrderedDict()
        """All items of the latest responses that are not stored, by id."""
        self._asked: asyncio.Queue[str | None] = asyncio.Queue(maxsize=4)
        self._job: TurnStream | None = None
        self._stirred = 0.0
        """When something was last sent."""

    async def serve(self) -> None:
        reading = asyncio.ensure_future(self._read())
        try:
            async with asyncio.timeout(_SECONDS):
                while (text := await self._asked.get()) is not None:
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
            self._stop()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self) -> None:
        """Take what the client sends, and notice when it leaves."""
        try:
            while True:
                await self._asked.put(await self._socket.receive_text())
        except (WebSocketDisconnect, RuntimeError, KeyError):
            self._stop()
            await self._asked.put(None)

    def _stop(self) -> None:
        if self._job is not None:
            self._job.cancel()

    async def _answer(self, text: str) -> None:
        try:
            asked, generates = self._parsed(text)
            if self._account is not None and (over := self._account.admit()) is not None:
                raise rate_limited(over.why, over.retry_after)
            await self._respond(asked, generates)
        except ValidationError as error:
            await self._refuse(validation(error.errors()))
        except (PerdureError, ApiError, UnicodeError) as error:
            await self._refuse(to_api_error(error))

    def _parsed(self, text: str) -> tuple[ResponseRequest, bool]:
        limits = self._app_state.limits
        scan = JsonScan()
        scan.push(text.encode("utf-8", "surrogatepass"))
        if scan.depth > limits.depth or scan.values > limits.values:
            raise ApiError(400, "the JSON is too deep, or has too many values", code="nested_too_deeply")
        try:
            event = json.loads(text)
        except ValueError as error:
            raise ApiError(400, f"the message is no JSON: {error}", code="invalid_json") from None
        if not isinstance(event, dict) or event.get("type") != "response.create":
            raise ApiError(400, "type: send response.create", param="type", code="invalid_value")
        # Older clients put the request one level deeper.
        inner = event.get("response")
        fields = dict(inner) if isinstance(inner, dict) else dict(event)
        generates = fields.pop("generate", True) is not False
        fields.pop("type", None)
        asked = ResponseRequest.model_validate({**fields, "stream": True})
        self._app_state.check_model(asked.model or "")
        return asked, generates

    async def _respond(self, asked: ResponseRequest, generates: bool) -> None:
        app_state, responses = self._app_state, self._responses
        items = input_items(asked)
        previous = asked.previous_response_id
        if previous is not None and previous in self._kept:
            items = [*self._kept[previous], *items]
            asked = asked.model_copy(update={"input": items, "previous_response_id": None})
        if not generates:
            asked = asked.model_copy(update={"store": False, "max_output_tokens": 1})
        notes: dict[str, Any] = {}
        if asked.stores:
            response = await app_state.call(responses.begin, asked)
            head = response.head
            self._job = await app_state.call(responses.submit, response, notes)
        else:
            head = responses.unstored_head(asked)
            self._job = await app_state.call(responses.submit_unstored, asked)
        writer = ResponseWriter(head, notes=notes)
        await self._send(writer.opening())
        waiting = asyncio.ensure_future(self._give_signs_of_life(writer, self._job))
        try:
            if generates:
                async for delta in self._job:
                    await self._send(writer.piece(delta))
            replies = await self._job.areplies()
            self._count(replies[0])
        except PerdureError as error:
            await self._send(writer.broken(to_api_error(error)))
            return
        except BaseException:
            # The client has left, and nobody takes what is sent.
            if self._account is not None:
                self._account.spend(sum(tokens_so_far(self._job)))
            raise
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            self._job.cancel()
            self._job = None
        if not generates:
            # The prompt was read, and that is all that was wanted.
            shown = {**head.whole(replies), "output": [], "status": "completed", "incomplete_details": None}
            await self._send(writer.completed(shown))
        else:
            shown = head.whole(replies)
            await self._send(writer.ending(replies))
        if not asked.stores:
            self._kept[head.id] = [*items, *shown["output"]]
            while len(self._kept) > _REMEMBERED:
                self._kept.popitem(last=False)

    async def _give_signs_of_life(self, writer: ResponseWriter, job: TurnStream) -> None:
        """While a prompt is read, or nothing comes for another reason."""
        clock, silent = asyncio.get_running_loop().time, self._app_state.limits.silent_seconds
        while True:
            await asyncio.sleep(max(0.0, self._stirred + silent - clock()))
            if clock() >= self._stirred + silent:
                await self._send(writer.sign_of_life(PromptProgress.of(job)))

    def _count(self, reply: ChatReply) -> None:
        """Each response by itself: a connection may last for an hour."""
        self._app_state.metrics.reply(reply)
        if self._account is not None:
            self._account.spend(reply.usage.prompt_tokens + reply.usage.completion_tokens)

    async def _send(self, events: bytes) -> None:
        self._stirred = asyncio.get_running_loop().time()
        for event in events.split(b"\n\n"):
            if event:
                await self._socket.send_text(event.partition(b"data: ")[2].decode())

    async def _refuse(self, error: ApiError) -> None:
        shown = {**error.body, "type": "error", "status": error.status}
        await self._socket.send_text(json.dumps(shown))
