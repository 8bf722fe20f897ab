"""Stream record: what it takes to make a stream again where the server that made it is gone.

    how       chat
    request   {"messages": [...], "stream": true, "perdure": {"resumable": true}}      as it was sent
    seed      4711                                                                     as it was drawn
    prompt    9f2c...                                     a digest of the tokens that the model has read

A record is a session of a kind of its own, under the id of its stream. It is written before anybody hears of
the id, held for as long as the stream can be asked for here, and deleted then. A server that is gone holds
nothing any more: any other one of the same store may take the record, make the reply again, and send what
follows the last event that the client has.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from perdure.errors import PerdureError, SessionNotFoundError
from perdure.server.core.api_error import ApiError
from perdure.sessions.info import SessionInfo
from perdure.sessions.sessions import Sessions
from perdure.sessions.store.base import STREAM
from perdure.sessions.turn import Turn

log = logging.getLogger("perdure.server")

WHY_NOT = "why_not"
"""In a record: why its stream cannot be made again."""
_LATER = 1
"""Seconds after which a stream that another server holds may be asked for again."""


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A record that this server holds. Every call may wait for the store."""

    sessions: Sessions
    info: SessionInfo

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
        start = Turn(kind="start", messages=())
        record = StreamRecord(sessions, store.create(namespace, name, [start], kind=STREAM, origin=about))
        store.take(record.info)
        sessions.expire_responses(seconds, kind=STREAM)
        return record
    except PerdureError as error:
        log.info("stream %s can be resumed at this server alone: %s", name, error)
        return None


def take_record(sessions: Sessions, namespace: str, name: str, *, seconds: float) -> StreamRecord | None:
    """Have the record of a stream whose server is gone. None where there is none, or it is older than
    `seconds`; 409 while another server holds it."""
    store = sessions.store
    try:
        record = StreamRecord(sessions, store.find(namespace, name))
    except SessionNotFoundError:
        return None
    if record.info.kind != STREAM or record.info.updated < time.time() - seconds:
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
    """Of a stream that is known, and cannot be gone on with."""
    return ApiError(409, f"this stream cannot be gone on with: {why}", code="stream_not_resumable")
