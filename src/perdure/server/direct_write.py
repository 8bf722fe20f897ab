"""Direct write: the one fast path of a token. An event goes to the socket past ASGI, uvicorn and h11.

It saves the checks of three layers for every token: with 64 streams the server takes 166 µs of CPU for an
event, and 195 µs without (`python -m bench.serve --only direct_write`). It reaches into parts of uvicorn and
h11 that are not public. Without it (`attach` not called) every event takes the server's own way, and nothing
else changes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from h11._writers import ChunkedWriter
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from perdure.server.core.follow import WRITE


def attach(cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
    """Have the events of one answer sent directly. To be called before the application has its request."""
    sender = ChunkSender(cycle, loop)
    cycle.send = sender  # type: ignore[method-assign]
    cycle.scope.setdefault("extensions", {})[WRITE] = sender.write  # type: ignore[assignment]


def released(app: ASGIApp) -> ASGIApp:
    """The application, behind whose answers nothing refers to itself: what a request leaves is freed at once.
    The garbage collector, which would find it later, holds every thread up for 0.1 s and more where there are
    hundreds of requests."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            # Both refer to the request, which has its scope.
            for name in ("state", "extensions"):
                scope.pop(name, None)
            if isinstance(send, ChunkSender):
                send.detach()

    return answer


def flush(cycle: RequestResponseCycle) -> None:
    """Send what waits: the answer is complete, and what is written next is not of it."""
    cycle.transport.flush()  # type: ignore[attr-defined]


class AnswerTransport:
    """The transport of one answer. While it is `corked`, what is written waits, to go out at once with what
    follows. Each write that goes out wakes the client, on cores that have other work."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_closing = transport.is_closing
        self.corked = False
        self.buffer = b""

    def write(self, data: bytes) -> None:
        self.buffer += data
        if not self.corked:
            self.flush()

    def flush(self) -> None:
        if self.buffer:
            self.send(b"")
        self.corked = False

    def send(self, data: bytes) -> None:
        """Write at once, with what waits."""
        self.corked = False
        if self.buffer:
            data, self.buffer = self.buffer + data, b""
        self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()


class ChunkSender:
    """The `send` of one answer: the events of a stream go to the socket as chunks at once, the first with the
    head, the last with the end. Everything else takes the server's own way.
    """

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._chunked: bool | None = None
        self._loop = loop
        self._transport = AnswerTransport(cycle.transport)
        cycle.transport = self._transport  # type: ignore[assignment]

    async def __call__(self, message: Any) -> None:
        if message.get("more_body") and self.write(message["body"]):
            return
        self._transport.corked = True
        try:
            await self._send(message)
        finally:
            if message["type"] == "http.response.start":
                # Its body mostly follows in the same turn of the loop.
                self._loop.call_soon(self._transport.flush)
            else:
                self._transport.flush()

    def detach(self) -> None:
        """Have the server itself send what may still come."""
        del self._cycle.send

    def write(self, data: bytes) -> bool:
        """Send an event at once. False where it has to take the server's own way."""
        cycle = self._cycle
        if (
            # An empty chunk would be the end of all of them.
            not data
            or not cycle.response_started
            or cycle.response_complete
            or cycle.disconnected
            or cycle.flow.write_paused
        ):
            return False
        if self._chunked is None:
            self._chunked = cycle.scope["method"] != "HEAD" and isinstance(cycle.conn._writer, ChunkedWriter)
        if self._chunked:
            self._transport.send(b"%x\r\n%b\r\n" % (len(data), data))
        return self._chunked
