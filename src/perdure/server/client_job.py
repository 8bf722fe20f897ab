"""Client job: work for one client, which ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def prompt_read(self) -> int: ...
    @property
    def written(self) -> int: ...
    def cancel(self) -> None: ...
    async def areplies(self) -> Sequence[R]: ...
    async def consume(self, push: Callable[[Sequence[D]], bool]) -> bool: ...


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
    """A job that ends when its client leaves, when its time is up, or when the server stops.

    Always holds: what was computed for a client that has left before the end is noted, and paid for.
    """

    def __init__(
        self,
        job: Job[D, R],
        request: Request,
        *,
        seconds: float,
        is_stopping: Callable[[], bool],
        notes: dict[str, Any],
    ) -> None:
        self._job = job
        self._notes = notes
        self._is_told = False
        """Whether its replies, or an error, say what came of it."""
        self._request = request
        self._seconds = seconds
        self._is_stopping = is_stopping
        # The engine minds the time between its steps; this also ends a long one in its middle.
        self._timer = asyncio.get_running_loop().call_later(seconds, job.cancel)

    def cancel(self) -> None:
        self._timer.cancel()
        self._job.cancel()

    def close(self) -> None:
        """Nobody reads it any more."""
        self.cancel()
        if not self._is_told:
            self._is_told = True
            note_tokens(self._notes, *tokens_so_far(self._job))

    @property
    def progress(self) -> PromptProgress | None:
        return PromptProgress.of(self._job)

    async def replies(self) -> Sequence[R]:
        """All replies, for a client who stays."""
        try:
            return await self._told(while_connected(self._request, self._job.areplies()))
        finally:
            self.close()

    async def consume(self, push: Callable[[Sequence[D]], bool]) -> bool:
        """Have `push` called with what is new, as it comes, until it gives False or all was pushed:
        whether it was."""
        try:
            return await self._job.consume(push)
        except Exception:
            self._is_told = True
            raise

    async def ended(self) -> Sequence[R]:
        """The replies, once all deltas were read."""
        return await self._told(self._job.areplies())

    async def _told(self, work: Awaitable[T]) -> T:
        try:
            found = await work
        except ClientLeft:
            raise
        except Exception:
            self._is_told = True
            raise
        self._is_told = True
        return found

    def cut(self, replies: Sequence[Part]) -> ApiError | None:
        """Why replies were cut short, if they were."""
        if all(reply.finish_reason != "cancelled" for reply in replies) or getattr(
            self._job, "stopped", False
        ):
            return None
        # For a client who is still there, nothing else ends one. Which clock was first, the engine's or ours,
        # says nothing: on a busy machine they are far apart.
        return stopping() if self._is_stopping() else deadline(self._seconds)


def tokens_so_far(job: Job[Any, Any]) -> tuple[int, int]:
    """Those of its prompt that were read, and those that were written."""
    # How far a prompt is read is told from time to time; once something is written, all of it was.
    return job.prompt_tokens if job.written else job.prompt_read, job.written


def note_tokens(notes: dict[str, Any], prompt: int, written: int) -> None:
    """Add to what is noted of a request: its key pays for that."""
    for name, count in (("prompt_tokens", prompt), ("completion_tokens", written)):
        notes[name] = notes.get(name, 0) + count


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
