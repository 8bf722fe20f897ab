"""Runs: responses that are being made, for a client that reads them or for one that will ask later."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from perdure.chat.reply import ChatDelta, ChatReply
from perdure.server.core.api_error import ApiError, unauthorised
from perdure.server.core.app_state import AppState, Caller
from perdure.server.core.follow import EventResponse, Follower, Sink
from perdure.server.core.protocol import SSE, Event, Events
from perdure.server.protocols.responses.answers import error_detail, sent_differs
from perdure.server.protocols.responses.stored import StoredResponse
from perdure.server.protocols.responses.stream import OPENING, ResponseWriter, SentPart, failed_event
from perdure.sessions.fold import TurnStream


class Run(Sink):
    """A response that is made in the background: the sink of its follower. Its events stay for readers that
    come and go; event number n is the n-th of them."""

    def __init__(
        self,
        response: StoredResponse,
        stream: TurnStream,
        writer: ResponseWriter,
        app_state: AppState,
        caller: Caller,
    ) -> None:
        super().__init__()
        self.is_open = True
        self.finished = False
        self._response = response
        self._app_state = app_state
        self._writer = writer
        self._events: list[Event] = []
        self._news = asyncio.Event()
        """Set when there are more events, or the end; each is set once."""
        self._cancelled = False
        self._account = caller.account
        self._withdrawn = False
        """Whether its key was withdrawn, or has expired, while it was made."""
        # Its request is answered and logged by now.
        caller = replace(caller, notes={})
        self.follower: Follower[ChatDelta, ChatReply] = Follower(stream, app_state, caller, writer=writer)
        self.task = asyncio.ensure_future(self._make())

    async def cancel(self) -> None:
        """End it for good, as its client asked."""
        self._cancelled = True
        self.follower.cancel()
        await asyncio.wait((self.task,))

    async def read(self, after: int, sink: Sink) -> None:
        """Send its events behind number `after`, as they come. A client that has a part of another reply,
        which was sent before this one was interrupted, gets an error."""
        if after > OPENING:
            while self._writer.came_again is None and not self.finished:
                await self._news.wait()
            if not self._writer.came_again:
                await sink.close([failed_event(self._response.head, sent_differs(), number=after + 1)])
                return
        at = after + 1
        while not self.finished:
            if len(self._events) <= at:
                await self._news.wait()
                continue
            events = self._events[at:]
            at += len(events)
            await sink.send(events)
        await sink.close(self._events[at:])

    def write(self, events: Events) -> bool:
        if self._account is not None and not self._account.is_good:
            self._withdrawn = True
            self.follower.cancel()
        self._events += events
        self._notify()
        return True

    async def close(self, events: Events, error: ApiError | None = None) -> None:
        """Its last events. One that the end of the server interrupted has none: it is gone on with later."""
        if self._withdrawn:
            error = unauthorised("the key of this response was withdrawn, or has expired")
            events = [failed_event(self._response.head, error, number=len(self._events))]
        if error is None:
            await self.send(events)
        elif self._cancelled:
            await self._app_state.call(self._response.end, "cancelled")
        elif self._app_state.stopping:
            await self._app_state.call(self._response.note_sent, self._writer.sent)
        else:
            await self._app_state.call(self._response.end, "failed", error_detail(error))
            await self.send(events)

    async def _send(self, events: Events) -> None:
        self.write(events)

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _make(self) -> None:
        """Make the reply to its end, whoever reads it."""
        try:
            await self.follower.write_to(self)
        finally:
            self.follower.close()
            self.finished = True
            self._notify()


class RunReader:
    """A client that reads a run, from behind event number `after`."""

    def __init__(self, run: Run, after: int) -> None:
        self._run = run
        self._after = after

    async def write_to(self, sink: Sink) -> None:
        await self._run.read(self._after, sink)

    def keep_alive(self) -> Events:
        return self._run.follower.progress()

    def close(self) -> None:
        pass


class Runs:
    """All that is being made here, by namespace and id: never the same response twice."""

    def __init__(self) -> None:
        self._background: dict[tuple[str, str], Run] = {}
        self._reading: dict[tuple[str, str], tuple[TurnStream, ResponseWriter]] = {}

    def background(self, namespace: str, response_id: str) -> Run | None:
        run = self._background.get((namespace, response_id))
        return run if run is not None and not run.finished else None

    def start(
        self,
        caller: Caller,
        response: StoredResponse,
        stream: TurnStream,
        notes: dict[str, Any],
        app_state: AppState,
    ) -> Run:
        """Have a response made in the background. `notes` are those of the stream's turn."""
        writer = ResponseWriter(response.head, sent=response.sent, notes=notes)
        run = Run(response, stream, writer, app_state, caller)
        key = (caller.namespace, response.head.id)
        self._background[key] = run
        run.task.add_done_callback(lambda _: self._background.pop(key, None))
        return run

    def read(self, namespace: str, response_id: str, stream: TurnStream, writer: ResponseWriter) -> None:
        """A response is being made for a client that reads it."""
        ended = [key for key, (each, _) in self._reading.items() if each.done or each.cancelled]
        for key in ended:
            del self._reading[key]
        self._reading[namespace, response_id] = stream, writer

    def is_read(self, namespace: str, response_id: str) -> bool:
        stream, _ = self._reading.get((namespace, response_id), (None, None))
        return stream is not None and not (stream.done or stream.cancelled)

    def take_over(self, namespace: str, response_id: str) -> SentPart | None:
        """End what is made for a client whose connection broke, though nobody has noticed yet: what it was
        sent."""
        stream, writer = self._reading.pop((namespace, response_id), (None, None))
        if stream is None or writer is None:
            return None
        stream.cancel()
        return writer.sent


def followed(run: Run, after: int, app_state: AppState) -> EventResponse:
    return EventResponse(RunReader(run, after), SSE, app_state.limits)
