"""Streams: what comes of a job, as server-sent events or as lines.

Kept by hand: looking after a client that has left or has stopped reading is done beside the sending and not
for each event, as a library's response does it; that takes a tenth off what the server spends on a token
(`bench.serve`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from json.encoder import encode_basestring
from typing import Any, Generic, Protocol, TypeVar

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

    The head goes out with the first event, or with the first sign of life: what goes wrong until then can
    still have a status of its own.
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
    ) -> None:
        """`ended` is called in the event loop once nothing more is sent, for whatever reason."""
        self.status_code = 200
        self.background = None
        self._ended = ended
        self.media_type = media_type
        self._silent_seconds = silent_seconds
        self._sign_of_life = sign_of_life
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._events = events
        self._send_seconds = send_seconds
        self._sending = False
        self._stirred = 0.0
        """When an event was last begun to be sent, or was sent."""
        self.begun = False
        """Whether its head was sent."""
        self.last = b""
        """Events that go out with the end."""
        self._write: Callable[[bytes], bool] = lambda data: False
        """Sends events straight to the socket. False where they have to be waited for, or a head before."""
        self._clock: Callable[[], float] = time.monotonic
        """The event loop's, once it is answered in one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._write = scope.get("extensions", {}).get(WRITE, self._write)
        self._clock = asyncio.get_running_loop().time
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await self._mind(send, sending, leaving)
            if sending.done():
                sending.result()
        finally:
            for each in (sending, leaving):
                each.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            self._ended()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for data in events:
                self._stirred = self._clock()
                await self._begin(send)
                if not self._write(data):
                    self._sending = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self._sending = False
        await self._begin(send)
        await send({"type": "http.response.body", "body": self.last, "more_body": False})

    async def _begin(self, send: Send) -> None:
        if not self.begun:
            self.begun = True
            head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(head)

    async def _mind(self, send: Send, sending: asyncio.Future[None], leaving: asyncio.Future[None]) -> None:
        """Return when all is sent, or when nobody takes it any more."""
        self._stirred = self._clock()
        while not sending.done() and not leaving.done():
            patience = self._send_seconds if self._sending else self._silent_seconds
            left = self._stirred + patience - self._clock()
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
                        await self._begin(send)
                        await send(
                            {"type": "http.response.body", "body": self._sign_of_life(), "more_body": True}
                        )
                except TimeoutError:
                    log.info("a client took nothing for %g seconds and was left", self._send_seconds)
                    return
                self._stirred = self._clock()


class JobStream(EventStream, Generic[A, B]):
    """What comes of a job, in the shapes of one protocol."""

    def __init__(
        self,
        client_job: ClientJob[A, B],
        writer: Writer[A, B],
        *,
        limits: Limits,
        notes: dict[str, Any],
        settle: Callable[[Sequence[B]], None],
    ) -> None:
        super().__init__(
            self._follow(),
            send_seconds=limits.send_seconds,
            silent_seconds=limits.silent_seconds,
            media_type=writer.media_type,
            sign_of_life=self._opening_or_sign,
            # A client that leaves before the first event leaves a job that nobody reads.
            ended=client_job.close,
        )
        self._client_job = client_job
        self._writer = writer
        self._notes = notes
        self._settle = settle
        self._waiting = writer.opening()
        """What is to be sent before all else, or could not be sent at once."""

    def _opening_or_sign(self) -> bytes:
        return self._waited_for() or self._writer.sign_of_life(self._client_job.progress)

    def _waited_for(self) -> bytes:
        waiting, self._waiting = self._waiting, b""
        return waiting

    def _push(self, deltas: Sequence[A]) -> bool:
        """Send what is new: every token comes here, straight from who reads what the engine says."""
        piece = self._writer.piece
        # A step mostly brings one.
        data = piece(deltas[0]) if len(deltas) == 1 else b"".join(map(piece, deltas))
        if not data:
            return True
        if not self._waiting:
            self._stirred = self._clock()
            # Last of all: the client that it wakes may get this core at once.
            if self._write(data):
                return True
        self._waiting += data
        # A reply that ends by an error before anything was sent has a status of its own.
        return not self.begun and deltas[0].finish_reason in ("error", "cancelled")

    async def _follow(self) -> AsyncGenerator[bytes]:
        try:
            try:
                while not await self._client_job.consume(self._push):
                    yield self._waited_for()
                replies = await self._client_job.ended()
                refused = self._client_job.cut(replies)
                self._settle(replies)
                ending = self._writer.ending(replies) if refused is None else b""
            except Exception as error:
                if not self.begun:
                    raise
                refused, ending = to_api_error(error), b""
            if refused is not None:
                if not self.begun:
                    raise refused
                self._notes["error"] = refused.code or refused.kind
                ending = self._writer.broken(refused)
            self.last = self._waited_for() + ending
        except (GeneratorExit, asyncio.CancelledError):
            self._notes["left"] = True
            raise
        finally:
            self._client_job.cancel()


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
        return self._before + encode_basestring(text).encode() + self._after
