"""App state: what every route needs: the runtime, the caller, and work in threads."""

from __future__ import annotations

import copy
import functools
import logging
import re
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import anyio
import anyio.from_thread
import anyio.to_thread
from fastapi import Depends, Request

from perdure.chat.beginnings import Beginnings
from perdure.chat.reply import ChatReply
from perdure.decode.request import Reply
from perdure.errors import PerdureError, TemplateError
from perdure.models.catalogue import names_of
from perdure.models.puller import Puller
from perdure.pool import ModelPool, PooledModel
from perdure.pool.backend import PooledBackend
from perdure.runtime import Runtime
from perdure.server.core.api_error import ApiError, invalid
from perdure.server.core.keys import KeyAccount, Keys
from perdure.server.core.metrics import REPORT, DailyReports, Metrics, RecentRequests, written_bytes
from perdure.server.core.reasoning_cipher import ReasoningCipher
from perdure.server.core.settings import AllowedHosts, Limits, LiveSettings, ReplyDefaults
from perdure.server.core.shared_keys import share
from perdure.server.core.visit import SESSION, VISIT, Sign, Visit
from perdure.sessions.pending_turn import TurnExtra
from perdure.sessions.store.registry import encryption_of

log = logging.getLogger("perdure.server")

P = ParamSpec("P")
T = TypeVar("T")

_KEY_CHARACTERS = 255
"""Of an idempotency key."""
_PRODUCT = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_AGENT = 64
"""Characters of a program's name that are kept."""
_QUICK, _SLOW, _READING = 64, 8, 1
"""Calls that are made at once: those that only ask something, those that compute or move state, those that
read a large body."""


class Cancellable(Protocol):
    """Something that is being computed for somebody."""

    def cancel(self) -> object: ...


class Stoppable(Protocol):
    """A reply that is being made for a request."""

    def stop(self, namespace: str, request_id: str) -> bool:
        """End it as its client asked, if it is of that request: whether it is."""
        ...


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
                code="too_many_requests",
                retry_after=1,
            )
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


class Drain:
    """How long a server that was told to stop goes on answering: until routers know.

    Who asks `/ready` is taken for a router. It has to be asked as often as in as many seconds before it was
    told to stop: a busy server answers late, and whoever waits for an answer sends requests still.
    """

    _MOST = 2
    """Times the seconds: who does not ask any more is not waited for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: deque[float] = deque(maxlen=1000)
        self._began: float | None = None
        self._to_tell = 0

    def asked(self) -> None:
        if self._began is None:
            self._asked.append(self._clock())
        else:
            self._to_tell -= 1

    def begin(self, seconds: float) -> None:
        self._began = self._clock()
        self._to_tell = sum(each >= self._began - seconds for each in self._asked)

    def is_over(self, seconds: float) -> bool:
        if self._began is None:
            return False
        passed = self._clock() - self._began
        return passed >= self._MOST * seconds or (passed >= seconds and self._to_tell <= 0)


@dataclass(slots=True, eq=False)
class ServerLife:
    """What changes while a server runs, for all its models together."""

    stopping: bool = False
    draining: bool = False
    """Whether it was told to stop, and still answers until routers have noticed."""
    drain: Drain = field(default_factory=Drain)
    warming: WeakKeyDictionary[Runtime, threading.Thread] = field(default_factory=WeakKeyDictionary)
    """The threads that read what prompts begin with, or have read it, by model."""
    puller: Puller = field(default_factory=Puller)
    """What the operator has it fetch."""
    analysis: Cancellable | None = None
    """The one that is being made: no second one is begun meanwhile."""
    not_kept: int = 0
    """Turns that the store refused, since the server started."""


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
    adapters: Mapping[str, float] = field(default_factory=dict)
    """The adapters that clients may name, each with the scale that it has where a client names none."""
    short_names: tuple[str, ...] = ()
    """The catalogue's names for it."""
    model_bytes: int = 0
    """Of the model's file, where there is one."""
    origins: tuple[str, ...] = ()
    """Pages of other sites that may use it."""
    strict: bool = False
    conversations: bool = True
    """Whether conversations that clients name by their headers are kept as sessions."""
    warm: int = 0
    """Tokens of known clients' prompts that are computed again after a start (`chat/beginnings.py`)."""
    log_text: bool = False
    defaults: ReplyDefaults = field(default_factory=ReplyDefaults)
    debug: bool = field(default_factory=lambda: sys.flags.dev_mode)
    """Whether the event loop is watched (`LoopWatch`)."""
    page: bool = True
    """Whether the page is served at `/`."""
    started: float = field(default_factory=time.time)
    pool: ModelPool | None = None
    """The models, of which `runtime` and `name` are the one that is meant where nobody names one; None where
    it is the only one, and stays loaded."""
    own_aliases: tuple[str, ...] = ()
    """Aliases that stand with the models, and not among the settings that can change."""
    life: ServerLife = field(default_factory=lambda: ServerLife())

    def __post_init__(self) -> None:
        if not isinstance(self.runtime.backend, PooledBackend):
            # Now, rather than while the first client waits. Without a template there are still completions.
            with suppress(TemplateError):
                _ = self.runtime.chat_format
        self.metrics = Metrics(self.loaded_runtimes)
        folder = self.runtime.sessions.store.own_folder()
        path = None if folder is None else folder / REPORT
        daily = DailyReports(path, written=lambda: written_bytes(self.loaded_runtimes()))
        self.recent = RecentRequests(daily)
        self._limiters: dict[int, anyio.CapacityLimiter] = {}
        # Where sessions are kept, so is the key: signatures are known again after a restart.
        key = self.runtime.sessions.store.key or secrets.token_bytes(32)
        self.reasoning_cipher = ReasoningCipher(key, limit=self.limits.body_bytes)
        if (accounts := getattr(self.runtime.sessions.store, "accounts", None)) is not None:
            share(self.keys, accounts, self.limit_namespaces)
        self.limit_namespaces()
        self.names: dict[str, dict[str, str]] = {}
        """Names that clients gave models, each with the model's own, by namespace."""
        self.in_flight = InFlight()
        self.running: WeakSet[Cancellable] = WeakSet()
        """What is being computed for clients."""
        self.replies: WeakSet[Stoppable] = WeakSet()
        """Those of them that are replies."""

    @property
    def stopping(self) -> bool:
        return self.life.stopping

    @property
    def fingerprint(self) -> str:
        return f"fp_{self.runtime.model.digest[:16]}"

    @property
    def is_loaded(self) -> bool:
        """Whether the engine can be asked without being loaded for that."""
        return self.engine()[0] not in ("starting", "unloading", "unloaded") or self.pool is None

    @property
    def models(self) -> list[PooledModel]:
        """All models, the one that is meant where nobody names one first; none where there is no pool."""
        return [] if self.pool is None else list(self.pool.models.values())

    def loaded_runtimes(self) -> list[Runtime]:
        """Of the models that are loaded, or were and are known."""
        runtimes = [each.runtime for each in self.models] or [self.runtime]
        return [
            each
            for each in runtimes
            if not isinstance(each.backend, PooledBackend) or each.backend.remote is not None
        ]

    async def serving(
        self,
        model_name: str,
        visit: Visit,
        namespace: str = "",
        *,
        sign: Sign | bool = False,
        keep_alive: float | None = None,
    ) -> AppState:
        """The app state with the model that a request asks for, loaded and kept so until the end of `visit`.
        404 where there is no such model. With `sign`, a client that waits is told that its answer comes."""
        model = self.check_model(model_name, namespace)
        if self.pool is None or model is None:
            return self
        await visit.enter(self.pool, model, self.limits, sign=sign, keep_alive=keep_alive)
        view = self.of_model(model)
        view.warm_up()
        return view

    def of_model(self, model: PooledModel) -> AppState:
        """The same server, with another model as its own."""
        if model.runtime is self.runtime:
            return self
        view = copy.copy(self)
        view.runtime, view.name = model.runtime, model.name
        view.adapters, view.short_names = model.adapters, names_of(model.source)
        view.model_bytes = model.facts().nbytes
        return view

    def warm_up(self) -> None:
        """Have what the prompts of known clients begin with remembered, and after a start read in a thread of
        its own. Only the first time for each model does something."""
        if self.warm and self.runtime not in self.life.warming:
            thread = threading.Thread(target=self._warm, name="perdure-warm", daemon=True)
            self.life.warming[self.runtime] = thread
            thread.start()

    def _warm(self) -> None:
        runtime, folder = self.runtime, self.runtime.sessions.store.own_folder()
        if folder is None:
            return
        # A model without a template has no prompts that begin alike; one that is closed, none at all.
        with suppress(PerdureError):
            encryption = encryption_of(folder)
            seal = None if encryption is None else encryption.seal()
            beginnings = Beginnings(folder, runtime.model.digest, seal=seal)
            runtime.chat_format.remember_beginnings(beginnings)
            beginnings.warm(
                runtime.backend,
                self.warm,
                go_on=lambda: self.is_loaded and not self.stopping,
                warmed=self.metrics.warmed,
            )

    def save(self) -> None:
        """Write down what is remembered over a restart."""
        self.recent.daily.save()
        for runtime in list(self.life.warming):
            with suppress(PerdureError):
                if (beginnings := runtime.chat_format.beginnings) is not None:
                    beginnings.save()

    def forget_beginnings(self, namespace: str) -> None:
        """Forget what the prompts of a namespace begin with; without one, all."""
        with suppress(TemplateError):
            if (beginnings := self.runtime.chat_format.beginnings) is not None:
                beginnings.clear(namespace)

    def by_model(self) -> list[AppState]:
        """The same server once for each model."""
        return [self.of_model(model) for model in self.models] or [self]

    async def call(self, function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
        """What `function` gives, called in a thread."""
        return await self._in_thread(_QUICK, functools.partial(function, *args, **keywords))

    async def work(self, function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
        """The same for what takes long by its nature, so that it never keeps quick calls waiting."""
        return await self._in_thread(_SLOW, functools.partial(function, *args, **keywords))

    async def read(self, function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
        """The same for what reads a large body, one at a time: the event loop waits for one thread's turn,
        and not for many."""
        return await self._in_thread(_READING, functools.partial(function, *args, **keywords))

    def seconds(self, timeout: float | None) -> float:
        """How long a request may take."""
        return self.limits.request_seconds if timeout is None else min(timeout, self.limits.request_seconds)

    def change(self, settings: LiveSettings) -> None:
        """Have these from now on. Requests that are running go on with what they began with."""
        for each in fields(settings):
            setattr(self, each.name, getattr(settings, each.name))
        self.reasoning_cipher.limit = self.limits.body_bytes

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
            self.metrics.reply(reply, caller.namespace)
            if isinstance(reply, ChatReply) and reply.could_not_be_kept:
                self.life.not_kept += 1
                log.warning(
                    "a turn of session %r in namespace %r could not be kept: %s",
                    session,
                    caller.namespace,
                    reply.not_kept,
                )
        if listed:
            self.recent.add(caller.namespace, replies, session or caller.session, caller.agent)
        notes = caller.notes
        notes["reuse"] = _reuse_text(replies[0])
        cached = sum(reply.usage.cached_tokens for reply in replies if reply.index == 0)
        notes["cached_tokens"] = notes.get("cached_tokens", 0) + cached
        notes["finish_reason"] = replies[0].finish_reason
        if caller.account is not None:
            caller.account.reply(cached)

    def check_message_count(self, count: int) -> None:
        if count > self.limits.messages:
            raise invalid(
                "messages", f"{count} messages, {self.limits.messages} are allowed", code="too_many_messages"
            )

    def check_model(self, model_name: str, namespace: str = "") -> PooledModel | None:
        """The model of a name. One that is neither a model's nor an alias is refused: no client takes another
        model for its own. None where there is one model, and no pool.

        `name` and Ollama's `name:latest` are one. `namespace` may have given models further names. Each of
        them may be followed by an adapter: `name:adapter`.
        """
        base, _, adapter = model_name.rpartition(":")
        name = self._find_model(base, namespace) if base else None
        if name is None or adapter not in self._adapters_of(name):
            name = self._find_model(model_name, namespace)
        if name is None:
            names = [model.name for model in self.models] or [self.name]
            has = repr(names[0]) if len(names) == 1 else ", ".join(map(repr, names[:20]))
            target = "" if len(names) == 1 else f"={names[0]}"
            raise ApiError(
                404,
                f"model {model_name[:100]!r} not found: this server has {has}. Ask for that name, or have "
                f"it answer to yours: `perdure serve --alias {model_name[:100] + target!r}`",
                code="model_not_found",
                param="model",
            )
        return None if self.pool is None else self.pool.models[name]

    def _adapters_of(self, name: str) -> Mapping[str, float]:
        """The adapters that clients may name with the model of that name."""
        several = self.pool is not None and len(self.pool.models) > 1
        return self.pool.models[name].adapters if several and self.pool is not None else self.adapters

    def _find_model(self, model_name: str, namespace: str) -> str | None:
        """The own name of the model that is meant, if there is one."""
        plain = model_name.removesuffix(":latest")
        first = self.pool.default.name if self.pool is not None else self.name
        names = {self.name: self.short_names}
        if self.pool is not None and len(self.pool.models) > 1:
            names = {model.name: names_of(model.source) for model in self.models}
        if plain in ("", "default"):
            return first
        for name, short in names.items():
            if plain == name.removesuffix(":latest") or plain in short:
                return first if len(names) == 1 else name
        for copy_name, name in self.names.get(namespace, {}).items():
            if plain == copy_name.removesuffix(":latest"):
                return name
        for alias in (*self.aliases, *self.own_aliases):
            pattern, equals, name = alias.rpartition("=")
            if equals and name not in names:
                pattern, equals = alias, ""
            if any(fnmatchcase(each, pattern if equals else alias) for each in (model_name, plain)):
                return name if equals and len(names) > 1 else first
        return None

    def model_options(self, model_name: str) -> dict[str, Any]:
        """What a model's name says of a reply: `name:adapter` is computed with that adapter."""
        _, colon, adapter = model_name.rpartition(":")
        return {"adapters": {adapter: self.adapters[adapter]}} if colon and adapter in self.adapters else {}

    def engine(self) -> tuple[str, int]:
        """How the engine is, and how often it was started anew."""
        read_health = getattr(self.runtime.backend, "health", None)
        if read_health is None:
            return "ready", 0
        health = read_health()
        return health.state, health.restarts

    def end(self) -> None:
        """End everything that is still being computed for somebody."""
        self.life.stopping = True
        self.life.puller.cancel()
        for work in list(self.running):
            work.cancel()

    def cancel(self, namespace: str, request_id: str) -> int:
        """End what is being computed for a request of a namespace. How many replies that were."""
        return sum(work.stop(namespace, request_id) for work in list(self.replies))

    async def _in_thread(self, threads: int, function: Callable[[], T]) -> T:
        # A limiter belongs to the event loop that it is made in.
        limiter = self._limiters.setdefault(threads, anyio.CapacityLimiter(threads))
        return await anyio.to_thread.run_sync(function, limiter=limiter)


def _reuse_text(reply: Reply | ChatReply) -> str:
    """What was reused, for a header: `slot=812, computed=33; tools: read_file is new`. No text of a
    conversation is in it."""
    counts = [f"{tier}={count}" for tier, count in reply.reuse.tiers.items()]
    text = ", ".join([*counts, f"computed={reply.reuse.computed}"])
    miss = reply.miss if isinstance(reply, ChatReply) else None
    return f"{text}; {miss.why}" if miss is not None else text


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what the log is told about it."""

    namespace: str
    notes: dict[str, Any]
    agent: str = ""
    """The program that asks, by the first word of its User-Agent."""
    account: KeyAccount | None = None
    """What its key may still use, where it has one."""
    request_id: str = ""
    """Of its request, as the header `x-request-id` has it."""
    headers: Mapping[str, str] | None = None
    """Of its request, in which it may name its conversation; None where conversations are not kept."""
    visit: Visit = field(default_factory=Visit)
    """The models that its request uses."""
    idempotency_key: str | None = None
    """What its request is known by, so that a turn that is asked for twice is made once."""

    @property
    def session(self) -> str | None:
        """The session that its request is a turn of, as far as that is known by now."""
        return self.notes.get(SESSION)

    @property
    def turn_extra(self) -> TurnExtra:
        """What a turn of a session that it asks for has besides messages and settings."""
        return TurnExtra(idempotency_key=self.idempotency_key)

    def in_session(self, name: str) -> None:
        """Have the answer, and the list of requests, say which session it is a turn of."""
        self.notes[SESSION] = name

    def charge(self, prompt_tokens: int, completion_tokens: int = 0) -> None:
        """Have its key pay for what was computed, and note it for the log."""
        notes = self.notes
        notes["prompt_tokens"] = notes.get("prompt_tokens", 0) + prompt_tokens
        notes["completion_tokens"] = notes.get("completion_tokens", 0) + completion_tokens
        if self.account is not None:
            self.account.spend(prompt_tokens, completion_tokens)


# Not plain functions, which FastAPI would call in a thread each.


async def _app_state(request: Request) -> AppState:
    app_state: AppState = request.app.state.app_state
    return app_state


async def _caller(request: Request) -> Caller:
    state = request.state
    agent = _agent(request.headers.get("user-agent", ""))
    account, request_id = getattr(state, "account", None), getattr(state, "request_id", "")
    keeps = request.app.state.app_state.conversations
    visit = getattr(state, VISIT, None) or Visit()
    headers = request.headers if keeps else None
    key = _idempotency_key(request.headers.get("idempotency-key"))
    return Caller(state.namespace, state.notes, agent, account, request_id, headers, visit, key)


def _idempotency_key(value: str | None) -> str | None:
    if value is not None and (not 0 < len(value) <= _KEY_CHARACTERS or not value.isprintable()):
        raise ApiError(
            400,
            f"Idempotency-Key: a text of 1 to {_KEY_CHARACTERS} printable characters, got {len(value)}",
            code="invalid_value",
        )
    return value


async def _looked_at(request: Request) -> AppState:
    app_state = await _app_state(request)
    model = app_state.check_model(request.query_params.get("model", ""), request.state.namespace)
    return app_state if model is None else app_state.of_model(model)


async def _served(request: Request) -> AppState:
    app_state = await _app_state(request)
    visit = getattr(request.state, VISIT, None) or Visit()
    return await app_state.serving(request.query_params.get("model", ""), visit, request.state.namespace)


def _agent(header: str) -> str:
    """The product that a User-Agent names first, without its version. Browsers all name the same one."""
    product = _PRODUCT.match(header.strip())
    if product is None:
        return ""
    return "browser" if product[0] == "Mozilla" else product[0][:_AGENT]


AppStateDep = Annotated[AppState, Depends(_app_state)]
LoadedDep = Annotated[AppState, Depends(_looked_at)]
"""The app state with the model that the query names, as it is: looking loads nothing, and keeps nothing
loaded."""
ServedDep = Annotated[AppState, Depends(_served)]
"""The app state with the model that the query names as `model`, loaded: for routes that need an engine and
have no body that names one."""
CallerDep = Annotated[Caller, Depends(_caller)]
