"""What every route needs: the runtime, who asks, and work in threads."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, ParamSpec, TypeVar
from weakref import WeakSet

import anyio
import anyio.to_thread
from fastapi import Depends, Request

from perdure.chat.reply import ChatReply
from perdure.decode.request import Reply
from perdure.errors import TemplateError
from perdure.runtime import Runtime
from perdure.server.figures import Figures
from perdure.server.keys import Keys
from perdure.server.limits import Limits
from perdure.server.middleware.host_check import AllowedHosts
from perdure.server.refusal import Refused, deadline, stopping
from perdure.server.visit import Job, Part, Visit, while_connected

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound=Part)
R = TypeVar("R", bound=Part)

_QUICK, _SLOW = 64, 8
"""Calls that are made at once: those that only ask something, and those that compute or move state."""


@dataclass(kw_only=True, eq=False)
class Desk:
    """One server's runtime with its settings. A call that may wait is made in a thread, so that the event
    loop never does."""

    runtime: Runtime
    name: str
    """What the model is called in answers."""
    limits: Limits = field(default_factory=Limits)
    keys: Keys = field(default_factory=Keys)
    hosts: AllowedHosts | None = field(default_factory=AllowedHosts)
    """The names under which it may be asked; None for any."""
    strict: bool = False
    log_text: bool = False
    started: float = field(default_factory=time.time)
    stopping: bool = False

    def __post_init__(self) -> None:
        # Now, rather than while the first client waits. Without a template there are still completions.
        with suppress(TemplateError):
            _ = self.runtime.chat_format
        self.figures = Figures(self.runtime)
        self._limiters: dict[int, anyio.CapacityLimiter] = {}
        self.fingerprint = f"fp_{self.runtime.model.digest[:16]}"
        self.visits: WeakSet[Visit[Any, Any] | Future[Any]] = WeakSet()

    async def call(self, function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
        """What `function` gives, called in a thread."""
        return await self._in_thread(_QUICK, functools.partial(function, *args, **keywords))

    async def work(self, function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
        """The same for what takes long by its nature, so that it never keeps quick calls waiting."""
        return await self._in_thread(_SLOW, functools.partial(function, *args, **keywords))

    def visit(self, job: Job[D, R], request: Request, timeout: float | None) -> Visit[D, R]:
        """A job for the client of `request`."""
        visit = Visit(job, request, seconds=self.seconds(timeout))
        self.visits.add(visit)
        if self.stopping:
            visit.cancel()
        return visit

    async def outcome(self, work: Future[T], request: Request) -> T:
        """What comes of work for the client of `request`, unless that leaves or takes too long."""
        self.visits.add(work)
        if self.stopping:
            work.cancel()
        seconds = self.limits.request_seconds
        try:
            async with asyncio.timeout(seconds):
                return await while_connected(request, asyncio.wrap_future(work))
        except TimeoutError:
            raise deadline(seconds) from None
        except asyncio.CancelledError:
            if self.stopping:
                raise stopping() from None
            raise
        finally:
            work.cancel()

    def seconds(self, asked: float | None) -> float:
        """How long a request may take."""
        return self.limits.request_seconds if asked is None else min(asked, self.limits.request_seconds)

    def settle(self, replies: Sequence[Reply] | Sequence[ChatReply], caller: Caller) -> None:
        """Count and note what came of a request."""
        for reply in replies:
            self.figures.reply(reply)
        usage = replies[0].usage
        caller.notes.update(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=sum(reply.usage.completion_tokens for reply in replies),
            finish_reason=replies[0].finish_reason,
        )

    def check_model(self, asked: str) -> None:
        if asked not in ("", "default", self.name):
            raise Refused(
                404,
                f"there is no model {asked!r} here, only {self.name!r}",
                kind="not_found_error",
                code="model_not_found",
                param="model",
            )

    def engine(self) -> tuple[str, int]:
        """How the engine is, and how often it was started anew."""
        health = getattr(self.runtime.backend, "health", None)
        if health is None:
            return "ready", 0
        told = health()
        return told.state, told.restarts

    def end(self) -> None:
        """End everything that is still being computed for somebody."""
        self.stopping = True
        for visit in list(self.visits):
            visit.cancel()

    async def _in_thread(self, threads: int, function: Callable[[], T]) -> T:
        # A limiter belongs to the event loop that it is made in.
        limiter = self._limiters.setdefault(threads, anyio.CapacityLimiter(threads))
        return await anyio.to_thread.run_sync(function, limiter=limiter)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what the log is told about it."""

    namespace: str
    notes: dict[str, Any]


def _desk(request: Request) -> Desk:
    desk: Desk = request.app.state.desk
    return desk


def _caller(request: Request) -> Caller:
    return Caller(request.state.namespace, request.state.notes)


ADesk = Annotated[Desk, Depends(_desk)]
ACaller = Annotated[Caller, Depends(_caller)]
