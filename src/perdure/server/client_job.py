"""Client job: work for one client, which ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from perdure.server.api_error import ApiError, ClientLeft, deadline, stopping


class Part(Protocol):
    """Something of a reply that has, or may have, a reason for its end."""

    @property
    def finish_reason(self) -> str | None: ...


D = TypeVar("D", bound=Part, covariant=True)
R = TypeVar("R", bound=Part, covariant=True)
T = TypeVar("T")


class Job(Protocol[D, R]):
    """What is common to jobs of prompts and of conversations."""

    def cancel(self) -> None: ...
    async def areplies(self) -> Sequence[R]: ...
    async def drain(self, take: Callable[[Sequence[D]], bool]) -> bool: ...


class PromptProgress(NamedTuple):
    """How much of a prompt is read."""

    read: int
    total: int

    @classmethod
    def of(cls, job: object) -> PromptProgress | None:
        """Of a job that tells how long its prompt is."""
        total = getattr(job, "prompt_tokens", None)
        return cls(getattr(job, "prompt_read", 0), total) if isinstance(total, int) else None


class ClientJob(Generic[D, R]):
    """A job that ends when its client leaves, when its time is up, or when the server stops."""

    def __init__(
        self, job: Job[D, R], request: Request, *, seconds: float, is_stopping: Callable[[], bool]
    ) -> None:
        self._job = job
        self._request = request
        self._seconds = seconds
        self._is_stopping = is_stopping
        # The engine minds the time between its steps; this also ends a long one in its middle.
        self._timer = asyncio.get_running_loop().call_later(seconds, job.cancel)

    def cancel(self) -> None:
        self._timer.cancel()
        self._job.cancel()

    @property
    def progress(self) -> PromptProgress | None:
        return PromptProgress.of(self._job)

    async def replies(self) -> Sequence[R]:
        """All replies, for a client who stays."""
        try:
            return await while_connected(self._request, self._job.areplies())
        finally:
            self.cancel()

    async def drain(self, take: Callable[[Sequence[D]], bool]) -> bool:
        """Have `take` called with what is new, as it comes, until it gives False or all was taken: whether it
        was."""
        return await self._job.drain(take)

    async def ended(self) -> Sequence[R]:
        """The replies, once all deltas were read."""
        return await self._job.areplies()

    def cut(self, replies: Sequence[Part]) -> ApiError | None:
        """Why replies were cut short, if they were."""
        if all(reply.finish_reason != "cancelled" for reply in replies) or getattr(
            self._job, "stopped", False
        ):
            return None
        # For a client who is still there, nothing else ends one. Which clock was first, the engine's or ours,
        # says nothing: on a busy machine they are far apart.
        return stopping() if self._is_stopping() else deadline(self._seconds)


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
