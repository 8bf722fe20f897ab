"""Follower: the one consumer of a stream. It writes the stream's events to a client, whatever the protocol.

    stream    a reply being made: deltas, progress, replies
    writer    a protocol's words for it, as events (core/protocol.py)
    sink      where events go: an HTTP answer, a WebSocket, a log that readers come back to
    follower  reads the stream to its end, counts what it used, and has its key pay: once, however it ends

Everything here runs in the event loop, and nothing here waits but for a client or a stream. Before the first
event is sent, an error is raised and becomes a status; afterwards it is an event.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perdure.chat.message import Message
from perdure.chat.reply import ChatReply
from perdure.decode.request import Reply, Usage
from perdure.runtime import Runtime
from perdure.server.core.api_error import ApiError, ClientLeft, deadline, stopping, to_api_error
from perdure.server.core.app_state import AppState
from perdure.server.core.metrics import StreamEnd
from perdure.server.core.protocol import Ending, Events, Framing, ProtocolEvent, Writer, protocol_at
from perdure.server.core.settings import Limits
from perdure.server.core.visit import CANCELLED, LEFT, STOPPED, Caller

log = logging.getLogger("perdure.server")

T = TypeVar("T")

WRITE = "perdure.write"
"""The extension of a scope that sends an event past all layers. It gives False where that cannot be."""


_numbers = itertools.count()

# What is followed.


D = TypeVar("D", bound=Ending)
R = TypeVar("R", bound=Ending)
D_co = TypeVar("D_co", bound=Ending, covariant=True)
R_co = TypeVar("R_co", bound=Ending, covariant=True)


class ReplyStream(Protocol[D_co, R_co]):
    """What a follower asks of a reply being made, of a prompt or of a conversation."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def prompt_read(self) -> int: ...
    @property
    def usage(self) -> Usage:
        """What was read and written so far, in all its requests: summaries come before some replies."""
        ...

    def cancel(self) -> None: ...
    def interrupt(self, why: str) -> None:
        """Cancel it though its client did not ask for that: a turn of a session stays pending."""
        ...

    def stop(self) -> None:
        """Cancel it because no more is wanted."""
        ...

    async def areplies(self) -> Sequence[R_co]: ...
    async def consume(self, push: Callable[[Sequence[D_co]], bool]) -> bool: ...


# Where events go.


class Sink:
    """Where events go. One task sends to it; `write` is for code that has a token in hand."""

    def __init__(self) -> None:
        self.is_open = False
        """Whether something was sent: from then on an error is an event, and no status."""
        self.is_sending = False
        """Whether a send waits for its client to read."""
        self._clock = asyncio.get_running_loop().time
        self.last_activity = self._clock()
        """When a send began or ended."""

    def write(self, events: Events) -> bool:
        """Send at once, without waiting. False where that cannot be: then nothing was sent."""
        return False

    async def send(self, events: Events) -> None:
        """Send, and wait while the client reads too slowly."""
        self.is_sending, self.last_activity = True, self._clock()
        await self._send(events)
        self.is_sending, self.last_activity = False, self._clock()

    async def close(self, events: Events, error: ApiError | None = None) -> None:
        """Send the last events. `error` says why a stream failed."""
        await self.send(events)

    async def _send(self, events: Events) -> None:
        raise NotImplementedError


class HttpSink(Sink):
    """An HTTP answer. Its head goes out with the first events, its end with the last."""

    def __init__(
        self, framing: Framing, headers: list[tuple[bytes, bytes]], scope: Scope, send: Send
    ) -> None:
        super().__init__()
        self._frame = framing.frame
        self._headers = headers
        self._asgi_send = send
        self._direct: Callable[[bytes], bool] | None = scope.get("extensions", {}).get(WRITE)

    def write(self, events: Events) -> bool:
        if self._direct is None or not self.is_open:
            return False
        self.last_activity = self._clock()
        # A step mostly brings one.
        data = self._frame(events[0]) if len(events) == 1 else b"".join(map(self._frame, events))
        return self._direct(data)

    async def close(self, events: Events, error: ApiError | None = None) -> None:
        self.is_sending, self.last_activity = True, self._clock()
        await self._body(events, more=False)

    async def _send(self, events: Events) -> None:
        await self._body(events, more=True)

    async def _body(self, events: Events, *, more: bool) -> None:
        if not self.is_open:
            self.is_open = True
            await self._asgi_send({"type": "http.response.start", "status": 200, "headers": self._headers})
        body = b"".join(map(self._frame, events))
        await self._asgi_send({"type": "http.response.body", "body": body, "more_body": more})


class EventSource(Protocol):
    """Something that writes events to a sink until it ends: a follower, or a log of events."""

    async def write_to(self, sink: Sink) -> None: ...
    def keep_alive(self) -> Events: ...
    def close(self) -> None:
        """Called once, after the last write."""
        ...


async def deliver(source: EventSource, sink: Sink, leaving: Awaitable[object], limits: Limits) -> None:
    """Have a source write to its client until it ends, the client leaves, or the client stops reading.

    Looking after the client is done beside the sending and not for each event: that takes a tenth off what
    the server spends on a token (`bench.serve`).
    """
    sending = asyncio.ensure_future(source.write_to(sink))
    left = asyncio.ensure_future(leaving)
    try:
        await _watch(source, sink, sending, left, limits)
        if sending.done():
            sending.result()
    finally:
        for each in (sending, left):
            each.cancel()
        await asyncio.gather(sending, left, return_exceptions=True)
        source.close()


async def _watch(
    source: EventSource, sink: Sink, sending: asyncio.Future[Any], left: asyncio.Future[Any], limits: Limits
) -> None:
    """Send keep-alives; return when all is sent, or when nobody reads it any more."""
    clock = asyncio.get_running_loop().time
    while not sending.done() and not left.done():
        silence = limits.silent_seconds
        if sink.is_open:
            silence = min(silence, limits.progress_seconds)
        patience = limits.send_seconds if sink.is_sending else silence
        remaining = sink.last_activity + patience - clock()
        if remaining > 0:
            # A send that begins meanwhile may have less patience than the silence before it.
            remaining = min(remaining, limits.send_seconds)
            await asyncio.wait((sending, left), timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            continue
        if not sink.is_sending:
            # A client that has stopped reading takes no keep-alive either.
            try:
                async with asyncio.timeout(limits.send_seconds):
                    await sink.send(source.keep_alive())
                continue
            except TimeoutError:
                pass
        log.info("closing stream: client read nothing for %g s", limits.send_seconds)
        return


class EventResponse(Response):
    """What a source writes, as an answer. An error before its first event has its HTTP status."""

    def __init__(self, source: EventSource, framing: Framing, limits: Limits) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = framing.media_type
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._source, self._framing, self._limits = source, framing, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sink = HttpSink(self._framing, self.raw_headers, scope, send)
        await deliver(self._source, sink, disconnected(receive), self._limits)


class Recorded:
    """Events that are all there."""

    def __init__(self, events: Events) -> None:
        self._events = events

    async def write_to(self, sink: Sink) -> None:
        await sink.close(self._events)

    def keep_alive(self) -> Events:
        return ()

    def close(self) -> None:
        pass


# The follower.


class Follower(Generic[D, R]):
    """Follows one stream for one client, until its end, its deadline, or the end of the server.

    Always holds: what was computed is counted and paid for exactly once, when the stream ends or the follower
    is closed, whichever comes first; it does not matter who ended it.
    """

    def __init__(
        self,
        stream: ReplyStream[D, R],
        app_state: AppState,
        caller: Caller,
        *,
        writer: Writer[D, R] | None = None,
        timeout: float | None = None,
        session: str | None = None,
        messages: Sequence[Message] = (),
        listed: bool = True,
    ) -> None:
        """`session` and `messages` are for the log, and for the list of requests if it is `listed` there."""
        self._stream = stream
        self._listed = listed
        self._app_state = app_state
        self._caller = caller
        self._writer = writer
        self._session = session
        self._messages = messages
        self._seconds = app_state.server.seconds(timeout)
        self._is_counted = False
        self._began = time.time()
        self._pending: list[ProtocolEvent] = []
        """Events that come before all others, or could not be sent at once."""
        self.number = next(_numbers)
        self.replies: Sequence[R] = ()
        """Once the stream has ended: its replies, as far as it has some."""
        # The engine minds the time between its steps; this also ends a long one in its middle.
        self._timer = asyncio.get_running_loop().call_later(
            self._seconds, stream.interrupt, "its time was up"
        )
        app_state.server.replies.add(self)
        if app_state.server.stopping:
            self.interrupt(STOPPED)

    def cancel(self) -> None:
        """End it for good, as its client asked."""
        self._timer.cancel()
        self._stream.cancel()

    def interrupt(self, why: str) -> None:
        """End it though its client did not ask for that."""
        self._timer.cancel()
        self._stream.interrupt(why)

    @property
    def runtime(self) -> Runtime:
        return self._app_state.runtime

    @property
    def is_begun(self) -> bool:
        """Whether something was read or written for it. Progress is reported now and then."""
        return self._stream.prompt_read > 0 or self._stream.usage.completion_tokens > 0

    def stop(self, namespace: str, request_id: str) -> bool:
        """End the stream as its client asked, if it is of that request. What there is of it is sent."""
        caller = self._caller
        if (caller.namespace, caller.request_id) != (namespace, request_id):
            return False
        self._timer.cancel()
        self._stream.stop()
        return True

    def close(self) -> None:
        """Nothing more is sent: the tokens computed until now count against the client's limit."""
        self._timer.cancel()
        if not self._is_counted:
            self._is_counted = True
            self.interrupt(STOPPED if self._app_state.server.stopping else "its client left")
            usage = self._stream.usage
            self._caller.charge(usage.prompt_tokens, usage.completion_tokens)
            self._notify((), usage)

    async def whole(self, request: Request) -> Sequence[R]:
        """All replies, for a client that stays. Whether they were cut short, `cut` says."""
        try:
            return await while_connected(request, self._ended())
        finally:
            self.close()

    def cut(self, replies: Sequence[R]) -> ApiError | None:
        """Why replies were cut short, if they were."""
        cancelled = any(reply.finish_reason == "cancelled" for reply in replies)
        if not cancelled or getattr(self._stream, "stopped", False):
            return None
        # For a client who is still there, nothing else ends one. Which clock was first, the engine's or ours,
        # says nothing: on a busy machine they are far apart.
        ending = self._app_state.server.stopping or getattr(self._stream, "interrupted", "") == STOPPED
        return stopping() if ending else deadline(self._seconds)

    # As the source of a stream of events.

    def keep_alive(self) -> Events:
        return self._take_pending() or self.progress()

    def progress(self) -> Events:
        """How much of the prompt is read, in llama-server's words."""
        assert self._writer is not None
        total, read = self._stream.prompt_tokens, self._stream.prompt_read
        return self._writer.keep_alive({"prompt_progress": {"total": total, "processed": read}})

    async def write_to(self, sink: Sink) -> None:
        writer, notes = self._writer, self._caller.notes
        assert writer is not None
        self._pending = list(writer.start())
        error: ApiError | None
        last: Events = ()
        try:
            if sink.is_open:
                await sink.send(self._take_pending())
            while not await self._stream.consume(lambda deltas: self._take(deltas, sink)):
                await sink.send(self._take_pending())
            replies = await self._ended()
            error = self.cut(replies)
            if error is None:
                last = writer.end(replies)
        except asyncio.CancelledError:
            notes["ended"] = LEFT
            raise
        except Exception as failure:
            if not sink.is_open:
                raise
            error = to_api_error(failure)
        if error is not None and not sink.is_open:
            raise error
        if error is not None:
            notes.update(error=error.code or error.kind, status=error.status)
            last = writer.error(error)
        try:
            await sink.close([*self._take_pending(), *last], error)
        except asyncio.CancelledError:
            notes["ended"] = LEFT
            raise

    def _take(self, deltas: Sequence[D], sink: Sink) -> bool:
        """Send what is new: every token comes here, straight from the engine's reader."""
        assert self._writer is not None
        write = self._writer.delta
        events = write(deltas[0]) if len(deltas) == 1 else [each for delta in deltas for each in write(delta)]
        # Written last of all: the client that it wakes may get this core at once.
        if not events or (not self._pending and sink.write(events)):
            return True
        self._pending += events
        # A reply that ends by an error before anything was sent has its HTTP status.
        return not sink.is_open and deltas[0].finish_reason in ("error", "cancelled")

    def _take_pending(self) -> Events:
        pending, self._pending = self._pending, []
        return pending

    async def _ended(self) -> Sequence[R]:
        self.replies = await self._stream.areplies()
        if not self._is_counted:
            self._is_counted = True
            self._count(self.replies)  # type: ignore[arg-type]
        return self.replies

    def _count(self, replies: Sequence[Reply] | Sequence[ChatReply]) -> None:
        if getattr(self._stream, "stopped", False):
            self._caller.notes["ended"] = CANCELLED
        # The samples of a prompt share it.
        prompt = sum(reply.usage.prompt_tokens for reply in replies if reply.index == 0)
        written = sum(reply.usage.completion_tokens for reply in replies)
        if len(replies) == 1:
            # With the summary that may have been written first.
            usage = self._stream.usage
            prompt, written = max(prompt, usage.prompt_tokens), max(written, usage.completion_tokens)
        self._caller.charge(prompt, written)
        self._app_state.server.ledger.record(replies, self._caller, self._session, listed=self._listed)
        self._notify(replies, Usage(prompt_tokens=prompt, completion_tokens=written))
        if self._app_state.server.log_text:
            notes = self._caller.notes
            if self._messages:
                notes["messages"] = [message.to_dict() for message in self._messages]
            notes.setdefault("replies", []).extend(reply.text for reply in replies)

    def _notify(self, replies: Sequence[Reply] | Sequence[ChatReply], usage: Usage) -> None:
        if (observer := self._app_state.server.ledger.metrics.observer) is not None:
            observer.replied(
                StreamEnd(
                    caller=self._caller,
                    model=self._app_state.name,
                    session=self._session or self._caller.session,
                    replies=replies,
                    usage=usage,
                    began=self._began,
                    streamed=self._writer is not None,
                )
            )


async def answer(
    stream: ReplyStream[D, R],
    request: Request,
    app_state: AppState,
    caller: Caller,
    *,
    whole: Callable[[Sequence[R]], T],
    writer: Writer[D, R] | None = None,
    timeout: float | None = None,
    session: str | None = None,
    messages: Sequence[Message] = (),
) -> T | Response:
    """With a `writer` a stream of events, else what `whole` makes of the replies."""
    follower = Follower(
        stream, app_state, caller, writer=writer, timeout=timeout, session=session, messages=messages
    )
    if writer is not None:
        return EventResponse(follower, protocol_at(request.scope).framing, app_state.server.limits)
    replies = await follower.whole(request)
    if (error := follower.cut(replies)) is not None:
        caller.notes["error"] = error.code or error.kind
        raise error
    return whole(replies)


# Clients that leave.


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
