"""Runs: responses that are being made, for a client that reads them or for one that will ask later."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from perdure.chat.reply import ChatReply
from perdure.server.api_error import ApiError, to_api_error
from perdure.server.app_state import AppState, Caller
from perdure.server.client_job import PromptProgress
from perdure.server.keys import KeyAccount
from perdure.server.protocols.responses.errors import error_detail
from perdure.server.protocols.responses.stored import StoredResponse
from perdure.server.protocols.responses.stream import ResponseWriter
from perdure.server.sse import EventStream
from perdure.sessions.fold import TurnStream


class Run:
    """A response that is made in the background. Its events stay for readers that come and go."""

    def __init__(
        self,
        response: StoredResponse,
        job: TurnStream,
        writer: ResponseWriter,
        account: KeyAccount | None = None,
    ) -> None:
        """`account` is that of the key which is to pay for it."""
        self._response = response
        self._account = account
        self._job = job
        self._writer = writer
        self._events: list[bytes] = []
        self._changed = asyncio.Condition()
        self.finished = False
        self.cancelled = False
        self.task: asyncio.Task[None] | None = None

    def sign_of_life(self) -> bytes:
        return self._writer.sign_of_life(PromptProgress.of(self._job))

    def cancel(self) -> None:
        """Interrupt it: whoever asks for it later has it gone on with."""
        self._job.cancel()

    def stop(self) -> None:
        """End it for good, as its client asked."""
        self.cancelled = True
        self._job.cancel()

    async def work(self, app_state: AppState) -> None:
        """Make the reply to its end, whoever listens."""
        await self._put(self._writer.opening())
        try:
            async for delta in self._job:
                await self._put(self._writer.piece(delta))
            replies = await self._job.areplies()
            self._pay(replies[0])
            if replies[0].finish_reason == "cancelled":
                await self._end("cancelled" if self.cancelled else "in_progress", None, app_state)
                return
            app_state.metrics.reply(replies[0])
            await self._put(self._writer.ending(replies))
        except Exception as error:
            refused = to_api_error(error)
            await self._end("failed", refused, app_state)
        finally:
            async with self._changed:
                self.finished = True
                self._changed.notify_all()

    def _pay(self, reply: ChatReply) -> None:
        if self._account is not None:
            self._account.spend(reply.usage.prompt_tokens + reply.usage.completion_tokens)

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """Its events behind number `after`, as they come."""
        at = 0
        while True:
            async with self._changed:
                while len(self._events) == at and not self.finished:
                    await self._changed.wait()
                new, over = self._events[at:], self.finished
            at += len(new)
            if shown := _behind(b"".join(new), after):
                yield shown
            if over and at == len(self._events):
                return

    async def _end(self, status: str, error: ApiError | None, app_state: AppState) -> None:
        detail = error_detail(error) if error is not None else None
        if status != "in_progress":
            await app_state.call(self._response.end, status, detail)
        if error is not None:
            await self._put(self._writer.broken(error))

    async def _put(self, events: bytes) -> None:
        if events:
            async with self._changed:
                self._events.append(events)
                self._changed.notify_all()


class Runs:
    """All that is being made here, by namespace and id: never the same response twice."""

    def __init__(self) -> None:
        self._background: dict[tuple[str, str], Run] = {}
        self._reading: dict[tuple[str, str], TurnStream] = {}

    def background(self, namespace: str, response_id: str) -> Run | None:
        run = self._background.get((namespace, response_id))
        return run if run is not None and not run.finished else None

    def start(
        self,
        caller: Caller,
        response: StoredResponse,
        job: TurnStream,
        notes: dict[str, Any],
        app_state: AppState,
    ) -> Run:
        """Have a response made in the background. `notes` are those of the job's turn."""
        run = Run(response, job, ResponseWriter(response.head, notes=notes), caller.account)
        key = (caller.namespace, response.head.id)
        self._background[key] = run
        app_state.client_jobs.add(run)
        run.task = asyncio.ensure_future(run.work(app_state))
        run.task.add_done_callback(lambda _: self._background.pop(key, None))
        return run

    def read(self, namespace: str, response_id: str, job: TurnStream) -> None:
        """A response is being made for a client that reads it."""
        ended = [key for key, each in self._reading.items() if each.done or each.cancelled]
        for key in ended:
            del self._reading[key]
        self._reading[namespace, response_id] = job

    def is_read(self, namespace: str, response_id: str) -> bool:
        job = self._reading.get((namespace, response_id))
        return job is not None and not (job.done or job.cancelled)

    def take_over(self, namespace: str, response_id: str) -> None:
        """End what is made for a client whose connection broke, though nobody has noticed yet."""
        if (before := self._reading.pop((namespace, response_id), None)) is not None:
            before.cancel()


def followed(run: Run, after: int, app_state: AppState) -> EventStream:
    limits = app_state.limits
    return EventStream(
        run.follow(after),
        send_seconds=limits.send_seconds,
        silent_seconds=limits.silent_seconds,
        sign_of_life=run.sign_of_life,
    )


def _behind(events: bytes, after: int) -> bytes:
    """The events whose numbers are behind `after`."""
    if after < 0:
        return events
    found = []
    for event in events.split(b"\n\n"):
        if event and _number(event) > after:
            found.append(event + b"\n\n")
    return b"".join(found)


def _number(event: bytes) -> int:
    return int(json.loads(event.partition(b"data: ")[2])["sequence_number"])
