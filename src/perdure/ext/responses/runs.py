"""Runs: responses that are being made, for a client that reads them or for one that will ask later."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure.ext.responses.answers import error_detail, sent_differs
from perdure.ext.responses.stored import StoredResponse
from perdure.ext.responses.stream import OPENING, ResponseWriter, SentPart, failed_event
from perdure.spi.server import (
    ApiError,
    AppState,
    Caller,
    EventLog,
    Events,
    ProtocolEvent,
    Sink,
    Visit,
    unauthorised,
)
from perdure.spi.sessions import TurnStream


class Run(EventLog):
    """A response that is made in the background."""

    def __init__(
        self,
        response: StoredResponse,
        stream: TurnStream,
        writer: ResponseWriter,
        app_state: AppState,
        caller: Caller,
        visit: Visit,
    ) -> None:
        self._response = response
        self._app_state = app_state
        self._cancelled = False
        self._response_writer = writer
        super().__init__(stream, writer, app_state, caller, visit)

    async def cancel(self) -> None:
        """End it for good, as its client asked."""
        self._cancelled = True
        self.follower.cancel()
        await asyncio.wait((self.task,))

    async def read(self, after: int, sink: Sink) -> None:
        """A client that has a part of another reply, which was sent before this one was interrupted, gets an
        error."""
        if after > OPENING:
            while self._response_writer.came_again is None and not self.finished:
                await self.wait_news()
            if not self._response_writer.came_again:
                await sink.close([failed_event(self._response.head, sent_differs(), number=after + 1)])
                return
        await super().read(after, sink)

    def number(self, event: ProtocolEvent, number: int) -> ProtocolEvent:
        # Its data have it.
        return event

    async def close(self, events: Events, error: ApiError | None = None) -> None:
        """Its last events. One that the end of the server interrupted has none: it is gone on with later."""
        if self.withdrawn:
            error = unauthorised("the key of this response was withdrawn, or has expired")
            events = [failed_event(self._response.head, error, number=self.count)]
        if error is None:
            await self.send(events)
        elif self._cancelled:
            await self._app_state.call(self._response.end, "cancelled")
        elif self._app_state.server.stopping:
            await self._app_state.call(self._response.note_sent, self._response_writer.sent)
        else:
            await self._app_state.call(self._response.end, "failed", error_detail(error))
            await self.send(events)


class Runs:
    """All that is being made here, by namespace and id: never the same response twice."""

    def __init__(self) -> None:
        self._background: dict[tuple[str, str], Run] = {}
        self._reading: dict[tuple[str, str], tuple[TurnStream, ResponseWriter]] = {}

    def background(self, namespace: str, response_id: str) -> Run | None:
        run = self._background.get((namespace, response_id))
        return run if run is not None and not run.finished else None

    async def start(
        self,
        caller: Caller,
        response: StoredResponse,
        stream: TurnStream,
        notes: dict[str, Any],
        app_state: AppState,
    ) -> Run:
        """Have a response made in the background. `notes` are those of the stream's turn."""
        writer = ResponseWriter(response.head, sent=response.sent, notes=notes)
        visit = Visit()
        # Loaded for its request: it stays so when that is answered.
        await app_state.serving(app_state.name, visit)
        run = Run(response, stream, writer, app_state, caller, visit)
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
