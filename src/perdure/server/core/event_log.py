"""Event log: a stream that is made to its end, with or without readers, and whose events stay for a while.

    POST /v1/chat/completions {"stream": true, "perdure": {"resumable": true}}
        id: 0
        data: {"id": "chatcmpl-7f…", …}
        id: 1                                    the connection breaks
    GET /v1/chat/completions/chatcmpl-7f…?starting_after=1
        id: 2
        …

A log is the sink of its follower. Readers come and go; event number n is the n-th of them. Responses that are
made in the background are logs too (`ext/responses/runs.py`). A log may have a record in the store, by
which another server makes the same events again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from perdure.chat.message import Message
from perdure.errors import PerdureError, SessionNotFoundError
from perdure.server.core.api_error import ApiError, invalid
from perdure.server.core.app_state import AppState
from perdure.server.core.follow import EventResponse, Follower, ReplyStream, Sink
from perdure.server.core.protocol import SSE, Events, ProtocolEvent, Writer
from perdure.server.core.visit import Caller, Visit
from perdure.sessions.info import STREAM, Record
from perdure.sessions.sessions import Sessions

logger = logging.getLogger("perdure.server")

_LOG_BYTES = 16 << 20
"""Of the events of one log; the first ones go when there are more."""
_ALL_BYTES = 64 << 20
_ALL_LOGS = 256
"""Of all logs together that have ended; the oldest go first, of the namespace that has the most."""
SECONDS = 300.0
"""That a log stays after its end."""


# Stream records: what it takes to make a stream again where the server that made it is gone.
#
#     how       chat
#     request   {"messages": [...], "stream": true, "perdure": {"resumable": true}}      as it was sent
#     seed      4711                                                                     as it was drawn
#     prompt    9f2c...                                     a digest of the tokens that the model has read
#
# A record stands in the session store, under the id of its stream. It is written before anybody hears
# of the id, held for as long as the stream can be asked for here, and deleted then. A server that is gone
# holds nothing any more: any other one of the same store may take the record, make the reply again, and send
# what follows the last event that the client has.

WHY_NOT = "why_not"
"""In a record: why its stream cannot be made again."""
_LATER = 1
"""Seconds after which a stream that another server holds may be asked for again."""


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A record that this server holds. Every call may wait for the store."""

    sessions: Sessions
    info: Record

    @property
    def about(self) -> Mapping[str, Any]:
        return self.info.origin

    @property
    def outlives(self) -> bool:
        """Whether another server can go on with the stream if this one ends."""
        return WHY_NOT not in self.about

    def release(self) -> None:
        """Let another server have it."""
        with suppress(PerdureError):
            self.sessions.store.release(self.info)

    def delete(self) -> None:
        """Forget it. One that cannot be deleted now expires."""
        with suppress(PerdureError):
            self.sessions.store.delete(self.info)
        self.release()


def write_record(
    sessions: Sessions, namespace: str, name: str, about: Mapping[str, Any], *, seconds: float
) -> StreamRecord | None:
    """Write a record down, and hold it. None where sessions are in memory alone, or the store takes no more:
    the stream is then resumed here, or nowhere. Those that are older than `seconds` go."""
    store = sessions.store
    if store.own_folder() is None:
        return None
    try:
        # First: whatever fails here leaves nothing behind that is held.
        sessions.expire(STREAM, seconds)
        record = StreamRecord(sessions, store.put(namespace, STREAM, name, about))
        store.take(record.info)
        return record
    except PerdureError as error:
        logger.info("stream %s can be resumed at this server alone: %s", name, error)
        return None


def take_record(sessions: Sessions, namespace: str, name: str, *, seconds: float) -> StreamRecord | None:
    """Have the record of a stream whose server is gone. None where there is none, or it is older than
    `seconds`; 409 while another server holds it."""
    store = sessions.store
    try:
        record = StreamRecord(sessions, store.record(namespace, STREAM, name))
    except SessionNotFoundError:
        return None
    if record.info.updated < time.time() - seconds:
        return None
    if not store.take(record.info):
        raise ApiError(
            409,
            "another server has this stream: ask that one, to which the x-session-id of the request leads; "
            "or ask again once it is gone",
            code="stream_busy",
            retry_after=_LATER,
        )
    return record


def prompt_digest(tokens: Sequence[int]) -> str:
    """What a record says of a prompt."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()


def not_resumable(why: str) -> ApiError:
    """Of a stream that is known, and cannot be resumed."""
    return ApiError(409, f"this stream cannot be resumed: {why}", code="stream_not_resumable")


# Event logs.


class EventLog(Sink):
    """A stream that is being made, with the events that it has so far.

    Always holds: the model stays loaded until its end, and its key pays for it once, as for any other.
    """

    def __init__(
        self,
        stream: ReplyStream[Any, Any],
        writer: Writer[Any, Any],
        app_state: AppState,
        caller: Caller,
        visit: Visit,
        *,
        timeout: float | None = None,
        session: str | None = None,
        messages: Sequence[Message] = (),
        record: StreamRecord | None = None,
        again: bool = False,
    ) -> None:
        """`visit` has the lease of its model, and ends with it. With `again`, its reply is one that another
        server has begun to send: readers may have more of it than this log. The rest is for its follower."""
        super().__init__()
        self._app_state = app_state
        self._record = record
        self._again = again
        self._error: ApiError | None = None
        self.is_open = True
        self.finished = False
        self.nbytes = 0
        self._events: deque[ProtocolEvent] = deque()
        self._first = 0
        """The number of the first event that is there."""
        self._news = asyncio.Event()
        """Set when there are more events, or the end; each is set once."""
        self._visit = visit
        self._writer = writer
        self._account = caller.account
        self.withdrawn = False
        """Whether its key was withdrawn, or has expired, while it was made."""
        # Its request is answered and logged by now, or by another reader.
        caller = replace(caller, notes={})
        self.follower: Follower[Any, Any] = Follower(
            stream,
            app_state,
            caller,
            writer=writer,
            timeout=timeout,
            session=session,
            messages=messages,
        )
        self.task = asyncio.ensure_future(self._make())
        app_state.server.keep(self.task)

    @property
    def count(self) -> int:
        """How many events it had so far."""
        return self._first + len(self._events)

    def has(self, after: int) -> bool:
        """Whether all events behind number `after` are there, or will be."""
        if self._again and not self.finished and after + 1 > self.count:
            return True
        return self._first <= after + 1 <= self.count or (after < 0 and not self._first)

    async def read(self, after: int, sink: Sink) -> None:
        """Send its events behind number `after`, as they come."""
        at = after + 1
        while True:
            if at < self._first:
                # It was read more slowly than it is made, by more than is kept of it.
                if not sink.is_open:
                    raise gone()
                await sink.close(self._writer.error(gone()))
                return
            ended, events = self.finished, list(islice(self._events, at - self._first, None))
            numbered = [self.number(event, number) for number, event in enumerate(events, at)]
            at += len(events)
            if ended and self._again and at > self.count:
                # It was made again, and did not come as far as its reader had it.
                error = self._error or _ended_early()
                if not sink.is_open:
                    raise error
                await sink.close(self._writer.error(error))
                return
            if ended:
                await sink.close(numbered)
                return
            if events:
                await sink.send(numbered)
            else:
                await self._news.wait()

    def number(self, event: ProtocolEvent, number: int) -> ProtocolEvent:
        """An event as it is sent to a reader."""
        return event._replace(id=b"%d" % number)

    def write(self, events: Events) -> bool:
        if self._account is not None and not self._account.is_good:
            self.withdrawn = True
            self.follower.interrupt("its key was withdrawn")
        self._events += events
        self.nbytes += sum(map(_size, events))
        while self.nbytes > _LOG_BYTES and len(self._events) > 1:
            self.nbytes -= _size(self._events.popleft())
            self._first += 1
        self.notify()
        return True

    async def close(self, events: Events, error: ApiError | None = None) -> None:
        """Its last events. One that the end of the server interrupts, and another server can go on with, has
        none: its readers come back."""
        self._error, record = error, self._record
        if record is not None and error is not None and self._app_state.server.stopping and record.outlives:
            await self._app_state.call(record.release)
            return
        cut = any(reply.finish_reason in ("cancelled", "error") for reply in self.follower.replies)
        if record is not None and (error is not None or cut):
            # Before anybody hears of the end: made again, it would end otherwise.
            await self._app_state.call(record.delete)
        await self.send(events)

    def drop(self) -> None:
        """Called when nobody can ask for it any more."""
        if self._record is not None:
            call = self._app_state.call(self._record.delete)
            self._app_state.server.keep(asyncio.ensure_future(call))

    async def _send(self, events: Events) -> None:
        self.write(events)

    def notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def wait_news(self) -> None:
        await self._news.wait()

    async def _make(self) -> None:
        """Make the reply to its end, with or without readers."""
        try:
            await self.follower.write_to(self)
        finally:
            self.follower.close()
            self.finished = True
            self.notify()
            await self._visit.finish()


class LogReader:
    """A client that reads a log, from behind event number `after`."""

    def __init__(self, log: EventLog, after: int) -> None:
        self._log = log
        self._after = after

    async def write_to(self, sink: Sink) -> None:
        await self._log.read(self._after, sink)

    def keep_alive(self) -> Events:
        return self._log.follower.progress()

    def close(self) -> None:
        pass


def followed(log: EventLog, after: int, app_state: AppState) -> EventResponse:
    return EventResponse(LogReader(log, after), SSE, app_state.server.limits)


class EventLogs:
    """The logs of a server, by namespace and id. Those that have ended go after a while, or to make room."""

    def __init__(self) -> None:
        self._logs: dict[tuple[str, str], EventLog] = {}

    def add(self, namespace: str, name: str, log: EventLog) -> None:
        key = (namespace, name)
        self._logs[key] = log
        log.task.add_done_callback(lambda _: self._ended(key))

    def get(self, namespace: str, name: str, after: int) -> EventLog | None:
        """The log of that name, if it is here. It must have all that follows event number `after`."""
        log = self._logs.get((namespace, name))
        if log is not None and not log.has(after):
            raise gone() if after + 1 < log.count else _not_yet(after, log.count)
        return log

    def _drop(self, key: tuple[str, str]) -> None:
        if (log := self._logs.pop(key, None)) is not None:
            log.drop()

    def _ended(self, key: tuple[str, str]) -> None:
        asyncio.get_running_loop().call_later(SECONDS, self._drop, key)
        while True:
            ended = {each: log for each, log in self._logs.items() if log.finished}
            if len(ended) <= _ALL_LOGS and sum(log.nbytes for log in ended.values()) <= _ALL_BYTES:
                return
            taken: dict[str, int] = {}
            for (namespace, _), log in ended.items():
                taken[namespace] = taken.get(namespace, 0) + log.nbytes + _ALL_BYTES // _ALL_LOGS
            most = max(taken, key=lambda each: taken[each])
            self._drop(next(each for each in ended if each[0] == most))


def missing(name: str) -> ApiError:
    return ApiError(
        404,
        f"there is no stream {name[:100]!r} to go on with: it was not asked for with perdure.resumable, or "
        f"ended more than {SECONDS:g} seconds ago",
        code="stream_not_found",
    )


def gone() -> ApiError:
    return ApiError(
        409,
        f"the events behind that one are not there any more: {_LOG_BYTES >> 20} MiB of a stream are kept",
        code="stream_not_resumable",
    )


def _not_yet(after: int, count: int) -> ApiError:
    return invalid("starting_after", f"{after} was not sent yet, the stream has {count} events")


def _ended_early() -> ApiError:
    return not_resumable("its reply was made again, and ended before the event that was named")


def _size(event: ProtocolEvent) -> int:
    return len(event.data) + len(event.name) + 100
