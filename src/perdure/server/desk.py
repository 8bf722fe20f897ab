"""What every route needs: the runtime, who asks, and work in threads."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ParamSpec, TypeVar
from weakref import WeakSet

import anyio.to_thread
from fastapi import Depends, Request

from perdure.chat.reply import ChatReply
from perdure.decode.request import Reply
from perdure.runtime import Runtime
from perdure.server.figures import Figures
from perdure.server.keys import Keys
from perdure.server.limits import Limits
from perdure.server.refusal import Refused
from perdure.server.visit import Job, Part, Visit

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound=Part)
R = TypeVar("R", bound=Part)

_THREADS = 64
"""Calls that wait for the engine or the disk at once."""


@dataclass(kw_only=True, eq=False)
class Desk:
    """One server's runtime with its settings. A call that may wait is made in a thread, so that the event
    loop never does."""

    runtime: Runtime
    name: str
    """What the model is called in answers."""
    limits: Limits = field(default_factory=Limits)
    keys: Keys = field(default_factory=Keys)
    strict: bool = False
    log_text: bool = False
    started: float = field(default_factory=time.time)
    stopping: bool = False

    def __post_init__(self) -> None:
        self.figures = Figures(self.runtime)
        self.creating = threading.Lock()
        """Held while a session is made, so that two who ask for one name do not both get it."""
        self.fingerprint = f"fp_{self.runtime.model.digest[:16]}"
        self.visits: WeakSet[Visit[Any, Any]] = WeakSet()

    async def call(self, function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
        """What `function` gives, called in a thread."""
        return await anyio.to_thread.run_sync(
            functools.partial(function, *args, **keywords), limiter=self._limiter
        )

    def visit(self, job: Job[D, R], request: Request, timeout: float | None) -> Visit[D, R]:
        """A job for the client of `request`."""
        visit = Visit(job, request, seconds=self.seconds(timeout))
        self.visits.add(visit)
        if self.stopping:
            visit.cancel()
        return visit

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
        """End every reply that is still being written."""
        self.stopping = True
        for visit in list(self.visits):
            visit.cancel()

    @functools.cached_property
    def _limiter(self) -> Any:
        # Belongs to the event loop that it is made in.
        return anyio.CapacityLimiter(_THREADS)


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
