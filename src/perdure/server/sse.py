"""Streams: what comes of a job, as server-sent events or as lines.

Kept by hand: looking after a client that has left or has stopped reading is done beside the sending and not
for each event, as a library's response does it; that takes a tenth off what the server spends on a token
(`bench.serve`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perdure.server.api_error import ApiError, to_api_error
from perdure.server.client_job import ClientJob, Part, PromptProgress, disconnected
from perdure.server.limits import Limits

log = logging.getLogger("perdure.server")

D = TypeVar("D", contravariant=True)
R = TypeVar("R", contravariant=True)
A = TypeVar("A", bound=Part)
B = TypeVar("B", bound=Part)

Chunk = dict[str, Any]
_DONE = b"data: [DONE]\n\n"
_PING = b": still there\n\n"
_BLANK = "\0"
WRITE = "perdure.write"
"""The extension of a scope that sends an event past all layers: it gives False where that cannot be."""


class Writer(Protocol[D, R]):
    """Writes what comes of a job, in the shapes of one protocol. Whatever it gives is whole events."""

    @property
    def media_type(self) -> str: ...
    def sign_of_life(self, progress: PromptProgress | None) -> bytes:
        """For a client that waits, or a proxy in between: how far its prompt is read, where that is known."""
        ...

    def opening(self) -> bytes: ...
    def piece(self, delta: D) -> bytes:
        """What a delta brings; every token makes one."""
        ...

    def ending(self, replies: Sequence[R]) -> bytes: ...
    def broken(self, error: ApiError) -> bytes:
        """What ends every reply that has not ended, by an error."""
        ...


class ChunkWriter:
    """Chunks as OpenAI's streams have them: data without names, and `[DONE]` at the end."""

    media_type = "text/event-stream"

    def waiting_chunk(self, told: dict[str, Any]) -> Chunk:
        """A chunk without content."""
        raise NotImplementedError

    def sign_of_life(self, progress: PromptProgress | None) -> bytes:
        return events([self.waiting_chunk(waiting(progress))])

    def opening_chunks(self) -> Iterable[Chunk]:
        return ()

    def ending_chunks(self, replies: Sequence[Any]) -> Iterable[Chunk]:
        raise NotImplementedError

    def broken_chunks(self) -> Iterable[Chunk]:
        raise NotImplementedError

    def opening(self) -> bytes:
        return events(self.opening_chunks())

    def ending(self, replies: Sequence[Any]) -> bytes:
        return events(self.ending_chunks(replies)) + _DONE

    def broken(self, error: ApiError) -> bytes:
        return events([error.body, *self.broken_chunks()]) + _DONE


class EventStream(Response):
    """Events as they come. Whether the client has left, or has stopped reading, is looked after beside the
    sending, so that an event costs little more than its way to the socket.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        send_seconds: float,
        silent_seconds: float = 15.0,
        media_type: str = "text/event-stream",
        sign_of_life: Callable[[], bytes] = lambda: _PING,
        ended: Callable[[], object] = lambda: None,
        leaving: asyncio.Future[None] | None = None,
    ) -> None:
        """`ended` is called in the event loop once nothing more is sent, for whatever reason. `leaving` is
        done when the client has left, where somebody looks after that already."""
        self.status_code = 200
        self.background = None
        self._ended = ended
        self._leaving = leaving
        self.media_type = media_type
        self._silent_seconds = silent_seconds
        self._sign_of_life = sign_of_life
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._events = events
        self._send_seconds = send_seconds
        self._sending = False
        self._stirred = 0.0
        """When an event was last begun to be sent, or was sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write = scope.get("extensions", {}).get(WRITE, lambda data: False)
        sending = asyncio.ensure_future(self._send_all(send, write))
        leaving = self._leaving or asyncio.ensure_future(disconnected(receive))
        try:
            await self._mind(send, sending, leaving)
            if sending.done():
                sending.result()
        finally:
            for each in (sending, leaving):
                each.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            self._ended()

    async def _send_all(self, send: Send, write: Callable[[bytes], bool]) -> None:
        clock = asyncio.get_running_loop().time
        async with aclosing(self._events) as events:
            head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(head)
            async for data in events:
                self._stirred = clock()
                if not write(data):
                    self._sending = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self._sending = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _mind(self, send: Send, sending: asyncio.Future[None], leaving: asyncio.Future[None]) -> None:
        """Return when all is sent, or when nobody takes it any more."""
        clock = asyncio.get_running_loop().time
        self._stirred = clock()
        while not sending.done() and not leaving.done():
            patience = self._send_seconds if self._sending else self._silent_seconds
            left = self._stirred + patience - clock()
            if left > 0:
                # A send that begins meanwhile may have less patience than the silence before it.
                left = min(left, self._send_seconds)
                await asyncio.wait((sending, leaving), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            elif self._sending:
                log.info("a client took nothing for %g seconds and was left", self._send_seconds)
                return
            else:
                # A client that has stopped reading takes no sign of life either.
                try:
                    async with asyncio.timeout(self._send_seconds):
                        await send(
                            {"type": "http.response.body", "body": self._sign_of_life(), "more_body": True}
                        )
                except TimeoutError:
                    log.info("a client took nothing for %g seconds and was left", self._send_seconds)
                    return
                self._stirred = clock()


def response(
    client_job: ClientJob[A, B],
    writer: Writer[A, B],
    *,
    limits: Limits,
    notes: dict[str, Any],
    settle: Callable[[Sequence[B]], None],
) -> EventStream:
    """The answer of a job that has begun."""
    return EventStream(
        _events(client_job, writer, notes, settle),
        send_seconds=limits.send_seconds,
        silent_seconds=limits.silent_seconds,
        media_type=writer.media_type,
        sign_of_life=lambda: writer.sign_of_life(client_job.progress),
        # A client that leaves before the first event leaves a job that nobody reads.
        ended=client_job.drop,
        leaving=client_job.leaving,
    )


async def _events(
    client_job: ClientJob[A, B],
    writer: Writer[A, B],
    notes: dict[str, Any],
    settle: Callable[[Sequence[B]], None],
) -> AsyncGenerator[bytes]:
    try:
        # What is there at the same time is sent at once.
        waiting = writer.opening()
        if not client_job.began:
            yield waiting
            waiting = b""
        try:
            while deltas := await client_job.more():
                if data := waiting + b"".join(map(writer.piece, deltas)):
                    waiting = b""
                    yield data
            replies = await client_job.ended()
            settle(replies)
            refused = client_job.cut(replies)
            ending = writer.ending(replies) if refused is None else b""
        except Exception as error:
            refused, ending = to_api_error(error), b""
        if refused is not None:
            notes["error"] = refused.code or refused.kind
            ending = writer.broken(refused)
        yield waiting + ending
    except (GeneratorExit, asyncio.CancelledError):
        notes["left"] = True
        raise
    finally:
        client_job.cancel()


def waiting(progress: PromptProgress | None) -> dict[str, Any]:
    """What every protocol tells of a prompt that is being read, in llama-server's words."""
    if progress is None:
        return {}
    return {"prompt_progress": {"total": progress.total, "processed": progress.read}}


def events(chunks: Iterable[Chunk]) -> bytes:
    return b"".join(b"data: %b\n\n" % to_json(chunk) for chunk in chunks)


def named_event(chunk: Chunk) -> bytes:
    """An event whose name is the `type` of its data."""
    return b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), to_json(chunk))


def line(chunk: Chunk) -> bytes:
    """A line of JSON."""
    return to_json(chunk) + b"\n"


class Frame:
    """An event of which only one text changes from time to time."""

    def __init__(self, chunk: Callable[[str], Chunk], form: Callable[[Chunk], bytes] | None = None) -> None:
        written = form(chunk(_BLANK)) if form is not None else events([chunk(_BLANK)])
        self._before, self._after = written.split(to_json(_BLANK))

    def __call__(self, text: str) -> bytes:
        return self._before + to_json(text) + self._after
