"""App state: what every route needs: the runtime, the caller, and work in threads."""

from __future__ import annotations

import functools
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

import anyio
import anyio.to_thread
from fastapi import Depends, Request

from perdure.chat.reply import ChatReply
from perdure.decode.request import Reply
from perdure.errors import TemplateError
from perdure.runtime import Runtime
from perdure.server.core.api_error import ApiError
from perdure.server.core.cipher import Seal
from perdure.server.core.keys import KeyAccount, Keys
from perdure.server.core.metrics import Metrics
from perdure.server.core.middleware.host_check import AllowedHosts
from perdure.server.core.recent_requests import RecentRequests
from perdure.server.core.settings import Limits, LiveSettings, ReplyDefaults

P = ParamSpec("P")
T = TypeVar("T")

_PRODUCT = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_AGENT = 64
"""Characters of a program's name that are kept."""
_QUICK, _SLOW = 64, 8
"""Calls that are made at once: those that only ask something, and those that compute or move state."""


class Cancellable(Protocol):
    """Something that is being computed for somebody."""

    def cancel(self) -> object: ...


class InFlight:
    """How many requests are being answered, those over WebSockets included."""

    def __init__(self) -> None:
        self._count = 0

    @contextmanager
    def admit(self, limit: int) -> Iterator[None]:
        """Count one for as long as it takes, or refuse it."""
        if self._count >= limit:
            raise ApiError(
                429,
                f"{limit} requests are in flight, which is the limit; ask again later",
                kind="rate_limit_error",
                code="too_many_requests",
                retry_after=1,
            )
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


@dataclass(kw_only=True, eq=False)
class AppState:
    """One server's runtime with its settings. A call that may wait is made in a thread, so that the event
    loop never does."""

    runtime: Runtime
    name: str
    """What the model is called in answers."""
    limits: Limits = field(default_factory=Limits)
    keys: Keys = field(default_factory=Keys)
    hosts: AllowedHosts | None = field(default_factory=AllowedHosts)
    """The names under which it may be asked; None for any."""
    aliases: tuple[str, ...] = ()
    """Patterns of further names for the model."""
    model_bytes: int = 0
    """Of the model's file, where there is one."""
    origins: tuple[str, ...] = ()
    """Pages of other sites that may use it."""
    strict: bool = False
    log_text: bool = False
    defaults: ReplyDefaults = field(default_factory=ReplyDefaults)
    debug: bool = field(default_factory=lambda: sys.flags.dev_mode)
    """Whether the event loop is watched (`LoopWatch`)."""
    page: bool = True
    """Whether the page is served at `/`."""
    started: float = field(default_factory=time.time)
    stopping: bool = False

    def __post_init__(self) -> None:
        # Now, rather than while the first client waits. Without a template there are still completions.
        with suppress(TemplateError):
            _ = self.runtime.chat_format
        self.metrics = Metrics(self.runtime)
        self.recent = RecentRequests()
        self._limiters: dict[int, anyio.CapacityLimiter] = {}
        self.fingerprint = f"fp_{self.runtime.model.digest[:16]}"
        # Where sessions are kept, so is what seals: signatures are known again after a restart.
        key = self.runtime.sessions.store.key or secrets.token_bytes(32)
        self.seal = Seal(key, limit=self.limits.body_bytes)
        self.limit_namespaces()
        self.names: dict[str, dict[str, None]] = {}
        """Names that clients gave the model, by namespace."""
        self.in_flight = InFlight()
        self.running: WeakSet[Cancellable] = WeakSet()
        """What is being computed for clients."""

    async def call(self, function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
        """What `function` gives, called in a thread."""
        return await self._in_thread(_QUICK, functools.partial(function, *args, **keywords))

    async def work(self, function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
        """The same for what takes long by its nature, so that it never keeps quick calls waiting."""
        return await self._in_thread(_SLOW, functools.partial(function, *args, **keywords))

    def seconds(self, asked: float | None) -> float:
        """How long a request may take."""
        return self.limits.request_seconds if asked is None else min(asked, self.limits.request_seconds)

    def change(self, settings: LiveSettings) -> None:
        """Have these from now on. Requests that are running go on with what they began with."""
        for each in fields(settings):
            setattr(self, each.name, getattr(settings, each.name))
        self.seal.limit = self.limits.body_bytes

    def limit_namespaces(self) -> None:
        """Have each namespace store no more than its keys say, as they are now."""
        for namespace in {*self.keys.namespaces, *getattr(self, "_limited", ())}:
            self.runtime.sessions.store.limit(namespace, self.keys.quota(namespace))
        self._limited = self.keys.namespaces

    def record(
        self,
        replies: Sequence[Reply] | Sequence[ChatReply],
        caller: Caller,
        session: str | None = None,
        *,
        listed: bool = True,
    ) -> None:
        """Count what came of a stream. Of several in one request, one is `listed` in the latest requests."""
        for reply in replies:
            self.metrics.reply(reply)
        if listed:
            self.recent.add(caller.namespace, replies, session)
        notes = caller.notes
        cached = sum(reply.usage.cached_tokens for reply in replies if reply.index == 0)
        notes["cached_tokens"] = notes.get("cached_tokens", 0) + cached
        notes["finish_reason"] = replies[0].finish_reason

    def check_message_count(self, count: int) -> None:
        if count > self.limits.messages:
            raise ApiError(
                400,
                f"messages: {count} messages, {self.limits.messages} are allowed",
                param="messages",
                code="too_many_messages",
            )

    def check_model(self, asked: str) -> None:
        known = asked in ("", "default", self.name)
        if not known and not any(fnmatchcase(asked, pattern) for pattern in self.aliases):
            raise ApiError(
                404,
                f"there is no model {asked[:100]!r} here, only {self.name!r}; "
                "`perdure serve --alias` gives it another name",
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
        for work in list(self.running):
            work.cancel()

    async def _in_thread(self, threads: int, function: Callable[[], T]) -> T:
        # A limiter belongs to the event loop that it is made in.
        limiter = self._limiters.setdefault(threads, anyio.CapacityLimiter(threads))
        return await anyio.to_thread.run_sync(function, limiter=limiter)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what the log is told about it."""

    namespace: str
    notes: dict[str, Any]
    agent: str = ""
    """The program that asks, by the first word of its User-Agent."""
    account: KeyAccount | None = None
    """What its key may still use, where it has one."""

    def charge(self, prompt_tokens: int, completion_tokens: int = 0) -> None:
        """Have its key pay for what was computed, and note it for the log."""
        notes = self.notes
        notes["prompt_tokens"] = notes.get("prompt_tokens", 0) + prompt_tokens
        notes["completion_tokens"] = notes.get("completion_tokens", 0) + completion_tokens
        if self.account is not None:
            self.account.spend(prompt_tokens + completion_tokens)


# Not plain functions, which FastAPI would call in a thread each.


async def _app_state(request: Request) -> AppState:
    app_state: AppState = request.app.state.app_state
    return app_state


async def _caller(request: Request) -> Caller:
    state = request.state
    agent = _agent(request.headers.get("user-agent", ""))
    return Caller(state.namespace, state.notes, agent, getattr(state, "account", None))


def _agent(header: str) -> str:
    """The product that a User-Agent names first, without its version. Browsers all name the same one."""
    found = _PRODUCT.match(header.strip())
    if found is None:
        return ""
    return "browser" if found[0] == "Mozilla" else found[0][:_AGENT]


AppStateDep = Annotated[AppState, Depends(_app_state)]
CallerDep = Annotated[Caller, Depends(_caller)]
