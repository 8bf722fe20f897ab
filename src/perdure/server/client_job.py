"""Client job: work for one client, which ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
    async def amore(self) -> Sequence[D]: ...
    def __aiter__(self) -> AsyncIterator[D]: ...


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
        self._deltas: AsyncIterator[D] | None = None
        self._first: asyncio.Future[D | None] | None = None
        self._read = False
        """Whether the first was read."""
        self.leaving: asyncio.Future[None] | None = None
        """Done when the client has left; there from `begin` on."""

    def cancel(self) -> None:
        self._timer.cancel()
        self._job.cancel()

    @property
    def progress(self) -> PromptProgress | None:
        return PromptProgress.of(self._job)

    @property
    def began(self) -> bool:
        """Whether something of the reply is there, or its end."""
        return self._first is not None and self._first.done()

    async def replies(self) -> Sequence[R]:
        """All replies, for a client who stays."""
        try:
            return await while_connected(self._request, self._job.areplies())
        finally:
            self.cancel()

    async def begin(self, seconds: float) -> None:
        """Wait for the first delta, or so long: what goes wrong until then can still have a status of its
        own, and a client whose prompt takes longer to be read is not left in silence."""
        self._deltas = aiter(self._job)
        self._first = asyncio.ensure_future(_next(self._deltas))
        self.leaving = asyncio.ensure_future(disconnected(self._request.receive))
        try:
            # Between the first token and its event, every task more is a turn of the event loop more.
            first_or_leaving = (self._first, self.leaving)
            await asyncio.wait(first_or_leaving, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not self._first.done():
                if self.leaving.done():
                    raise ClientLeft
                return
            delta = self._first.result()
            if delta is None or delta.finish_reason in ("error", "cancelled"):
                refused = self.cut(await self._job.areplies())
                if refused is not None:
                    raise refused
        except BaseException:
            self.drop()
            raise

    async def more(self) -> Sequence[D]:
        """The deltas that came since the last ones, from the first on, once there are some; none at the end.

        Every token is waited for here: not by iterating, which goes through a generator for each layer.
        """
        assert self._deltas is not None
        assert self._first is not None
        if not self._read:
            self._read = True
            delta = await self._first
        elif deltas := await self._job.amore():
            return deltas
        else:
            delta = await _next(self._deltas)
        return () if delta is None else (delta,)

    def drop(self) -> None:
        """End the job, for nobody reads it any more."""
        self.cancel()
        for each in (self._first, self.leaving):
            if each is not None:
                each.cancel()

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


async def _next(deltas: AsyncIterator[T]) -> T | None:
    return await anext(deltas, None)
