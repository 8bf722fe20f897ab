"""The caller's end of a request: iterate it, wait for it, cancel it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from perdure.decode.output_queue import NAP, OutputQueue
from perdure.decode.request import Delta, Reply

T = TypeVar("T")


class Job:
    """The caller's end of a request: iterate it for deltas, ask it for the reply, or cancel it.

    Dropping it cancels what is left of the request. An error of the request is raised where its result
    is asked for, or at the end of the iteration.
    """

    def __init__(self, output: OutputQueue, cancel: Callable[[], None], *, prompt_tokens: int) -> None:
        self.output = output
        self.prompt_tokens = prompt_tokens
        self._cancel = cancel

    @property
    def done(self) -> bool:
        return self.output.finished

    @property
    def prompt_read(self) -> int:
        """Tokens of the prompt whose state is there."""
        return self.output.read

    def cancel(self) -> None:
        """End the request within one step; its reply says `cancelled`."""
        self._cancel()

    def replies(self, timeout: float | None = None) -> list[Reply]:
        """All samples, once all are finished."""
        if not self.output.wait(finish=True, timeout=timeout):
            raise TimeoutError(f"no reply within {timeout} seconds")
        return self._result()

    def reply(self, timeout: float | None = None) -> Reply:
        """The only, or first, sample."""
        return self.replies(timeout)[0]

    async def areplies(self) -> list[Reply]:
        """Like `replies`, for asyncio."""
        if (waiter := self.output.async_wait(finish=True)) is not None:
            try:
                await waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._result()

    async def areply(self) -> Reply:
        """Like `reply`, for asyncio."""
        return (await self.areplies())[0]

    def unread(self) -> list[Delta]:
        """The deltas that nobody has read yet. They are taken, and not waited for."""
        with self.output.lock:
            deltas = list(self.output.deltas)
            self.output.deltas.clear()
        return deltas

    def __iter__(self) -> Iterator[Delta]:
        output = self.output
        while True:
            output.wait()
            with output.lock:
                # Another reader of the same job may have been faster.
                delta = output.deltas.popleft() if output.deltas else None
                over = output.finished
            if delta is not None:
                yield delta
            elif over:
                break
        self._result()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        output = self.output
        while True:
            # At every token: nothing is called that need not be.
            if (waiter := output.async_wait()) is not None:
                try:
                    await waiter
                except asyncio.CancelledError:
                    self.cancel()
                    raise
            with output.lock:
                delta = output.deltas.popleft() if output.deltas else None
                over = output.finished
            if delta is not None:
                yield delta
            elif over:
                break
        self._result()

    def _result(self) -> list[Reply]:
        for reply in self.output.replies:
            if reply.error is not None:
                raise reply.error
        return self.output.replies

    def __del__(self) -> None:
        if (output := getattr(self, "output", None)) and not output.finished:
            self._cancel()


def result_of(answer: Future[T]) -> T:
    """What `answer` gives or raises, waited for in short naps so that no Ctrl-C is missed."""
    while not answer.done():
        try:
            answer.exception(NAP)
        except TimeoutError:
            continue
    return answer.result()
