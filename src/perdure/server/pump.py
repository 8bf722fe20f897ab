"""A job whose end waits for the disk, read in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

from perdure.chat.job import ChatJob
from perdure.chat.reply import ChatDelta, ChatReply


class Pump:
    """A turn of a session for asyncio. The turn is committed in the thread, never in the event loop."""

    def __init__(self, job: ChatJob) -> None:
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[ChatDelta | None] = asyncio.Queue()
        self._ended: asyncio.Future[list[ChatReply]] = self._loop.create_future()
        # An error that nobody asks for is no news: whoever wanted it has left.
        self._ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        threading.Thread(target=self._run, name="perdure-turn", daemon=True).start()

    def cancel(self) -> None:
        self._job.cancel()

    async def areplies(self) -> list[ChatReply]:
        try:
            return await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def __aiter__(self) -> AsyncIterator[ChatDelta]:
        while (delta := await self._queue.get()) is not None:
            yield delta
        await self.areplies()

    def _run(self) -> None:
        try:
            for delta in self._job:
                self._tell(self._queue.put_nowait, delta)
            replies = self._job.replies()
        except BaseException as error:
            self._tell(self._fail, error)
        else:
            self._tell(self._finish, replies)

    def _finish(self, replies: list[ChatReply]) -> None:
        if not self._ended.done():
            self._ended.set_result(replies)
        self._queue.put_nowait(None)

    def _fail(self, error: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
        self._queue.put_nowait(None)

    def _tell(self, function: Any, *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop is closed, and with it everybody who could listen.
            self._job.cancel()
