"""A job as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.background import BackgroundTask

from perdure.server.limits import Limits
from perdure.server.refusal import refusal
from perdure.server.visit import Part, Visit

log = logging.getLogger("perdure.server")

# The library would end every stream at once when the server is told to stop; here they may finish.
AppStatus.enable_automatic_graceful_drain = False

D = TypeVar("D", contravariant=True)
R = TypeVar("R", contravariant=True)
A = TypeVar("A", bound=Part)
B = TypeVar("B", bound=Part)

Chunk = dict[str, Any]
_DONE = b"data: [DONE]\n\n"
_PING = 15


class Writer(Protocol[D, R]):
    """Turns what comes of a job into chunks."""

    def opening(self) -> Iterable[Chunk]: ...
    def piece(self, delta: D) -> Iterable[Chunk]: ...
    def ending(self, replies: Sequence[R]) -> Iterable[Chunk]: ...
    def broken(self) -> Iterable[Chunk]:
        """What ends every reply that has not ended, by `error`."""
        ...


def response(
    visit: Visit[A, B],
    writer: Writer[A, B],
    *,
    limits: Limits,
    notes: dict[str, Any],
    settle: Callable[[Sequence[B]], None],
) -> EventSourceResponse:
    """The answer of a job that has begun."""
    return EventSourceResponse(
        _events(visit, writer, notes, settle),
        sep="\n",
        ping=_PING,
        send_timeout=limits.send_seconds,
        # A client that leaves before the first event leaves a job that nobody reads.
        background=BackgroundTask(visit.cancel),
    )


async def _events(
    visit: Visit[A, B],
    writer: Writer[A, B],
    notes: dict[str, Any],
    settle: Callable[[Sequence[B]], None],
) -> AsyncIterator[bytes]:
    try:
        for chunk in writer.opening():
            yield event(chunk)
        try:
            async with aclosing(visit.deltas()) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    for chunk in writer.piece(delta):
                        yield event(chunk)
            replies = await visit.ended()
            settle(replies)
            refused = visit.cut(replies)
            ending = list(writer.ending(replies)) if refused is None else []
        except Exception as error:
            refused, ending = refusal(error), []
        if refused is not None:
            notes["error"] = refused.code or refused.kind
            ending = [refused.body, *writer.broken()]
        for chunk in ending:
            yield event(chunk)
        yield _DONE
    except (GeneratorExit, asyncio.CancelledError):
        notes["left"] = True
        raise
    finally:
        visit.cancel()


def event(chunk: Chunk) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
