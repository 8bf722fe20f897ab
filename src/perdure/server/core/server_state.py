"""Server state: what all routes and models of a server share, and what of it changes while it runs."""

from __future__ import annotations

import asyncio
import functools
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import InitVar, dataclass, field, fields
from fnmatch import fnmatchcase
from typing import ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import anyio
import anyio.to_thread
from starlette.types import ASGIApp

from perdure.errors import InvalidInputError, PerdureError, TemplateError
from perdure.events.background import BackgroundThread
from perdure.extension import brought
from perdure.models.finder import finder
from perdure.runtime import Runtime
from perdure.server.core.api_error import ApiError, invalid
from perdure.server.core.keys import METRICS, Keys, KeyStore
from perdure.server.core.metrics import UsageLedger
from perdure.server.core.reasoning_cipher import ReasoningCipher
from perdure.server.core.settings import AllowedHosts, Limits, LiveSettings, ReplyDefaults
from perdure.server.core.visit import STOPPED, Sign, Visit
from perdure.server.pool import ModelPool, ModelSpec, PooledModel, label_of

P = ParamSpec("P")
T = TypeVar("T")

_QUICK, _SLOW, _READING = 64, 8, 1
"""Calls that are made at once: those that only ask something, those that compute or move state, those that
read a large body."""


class Cancellable(Protocol):
    """Something that is being computed for somebody."""

    def cancel(self) -> object: ...


class ReplyInTheMaking(Protocol):
    """A reply that is being made for a request."""

    @property
    def runtime(self) -> Runtime:
        """Of its model."""
        ...

    @property
    def number(self) -> int:
        """A later one has a higher number."""
        ...

    @property
    def is_begun(self) -> bool:
        """Whether something was read or written for it."""
        ...

    def interrupt(self, why: str) -> None:
        """End it though its client did not ask for that."""
        ...

    def stop(self, namespace: str, request_id: str) -> bool:
        """End it as its client asked, if it is of that request: whether it is."""
        ...


class ServerService(Protocol):
    """What an extension does beside a server, for each of its models. No call may raise but for `start`, with
    a `PerdureError`."""

    def start(self, server: ServerState, model: ServedModel) -> None:
        """The model is loaded. Called once, in a thread that nobody waits for."""
        ...

    def save(self, runtime: Runtime) -> None:
        """Write down what is to be known after a restart."""
        ...

    def forget(self, runtime: Runtime, namespace: str) -> None:
        """Forget what is known of a namespace; without one, all."""
        ...


@functools.cache
def services() -> tuple[ServerService, ...]:
    """Of all extensions."""
    return tuple(brought("services"))


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
    """How long a server that is stopping still answers: until routers know.

    A client that asks `/ready` is taken for a router. It has to be asked as often as in as many seconds
    before the stop: a busy server answers late, and a router that waits for an answer still sends requests.
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


@dataclass(kw_only=True, eq=False)
class ServerState:
    """One server. A call that may wait is made in a thread, so that the event loop never does.

    Always holds: a server has one, whatever models it has, so that what `change` sets is seen by every
    request that asks from then on.
    """

    runtime: InitVar[Runtime]
    name: InitVar[str]
    """The first model, and what it is called in answers."""
    adapters: InitVar[Mapping[str, float] | None] = None
    """The adapters that clients may name, each with the scale that it has where a client names none."""
    short_names: InitVar[tuple[str, ...]] = ()
    """The catalogue's names for the model."""
    model_bytes: InitVar[int] = 0
    """Of the model's file, where there is one."""
    pool: InitVar[ModelPool | None] = None
    """The models, of which the first is meant where nobody names one; None where it is the only one, and
    stays loaded."""
    own_aliases: InitVar[tuple[str, ...]] = ()
    """Aliases that stand with the models, and not among the settings that can change."""
    limits: Limits = field(default_factory=Limits)
    keys: Keys = field(default_factory=Keys)
    hosts: AllowedHosts | None = field(default_factory=AllowedHosts)
    """The names under which it may be asked; None for any."""
    aliases: tuple[str, ...] = ()
    """Patterns of further names for the model."""
    origins: tuple[str, ...] = ()
    """Pages of other sites that may use it."""
    image_hosts: tuple[str, ...] = ()
    """Where images of requests are fetched from."""
    strict: bool = False
    conversations: bool = True
    """Whether conversations that clients name by their headers are kept as sessions."""
    warm: int = 0
    """Tokens of known clients' prompts that services compute again after a start."""
    log_text: bool = False
    defaults: ReplyDefaults = field(default_factory=ReplyDefaults)
    debug: bool = field(default_factory=lambda: sys.flags.dev_mode)
    """Whether the event loop is watched (`LoopWatch`)."""
    page: bool = True
    """Whether the page is served at `/`."""
    started: float = field(default_factory=time.time)
    stopping: bool = False
    draining: bool = False
    """Whether it is stopping, and still answers until routers have noticed."""
    drain: Drain = field(default_factory=Drain)
    analysis: Cancellable | None = None
    """The one that is being made: no second one is begun meanwhile."""
    routes: ASGIApp = field(init=False)
    """What answers requests that the server makes of itself: `state` of their scopes has `namespace` and
    `account`."""

    def __post_init__(
        self,
        runtime: Runtime,
        name: str,
        adapters: Mapping[str, float] | None,
        short_names: tuple[str, ...],
        model_bytes: int,
        pool: ModelPool | None,
        own_aliases: tuple[str, ...],
    ) -> None:
        if runtime.backend.is_known:
            # Now, rather than while the first client waits. Without a template there are still completions.
            with suppress(TemplateError):
                _ = runtime.chat_format
        first = ServedModel(
            runtime=runtime,
            name=name,
            adapters=adapters or {},
            short_names=short_names,
            nbytes=model_bytes,
        )
        self.models = ModelDirectory(self, first, pool=pool, own_aliases=own_aliases)
        self.sessions = runtime.sessions
        """Those of all models."""
        self.ledger = UsageLedger(self.models.loaded_runtimes, folder=self.sessions.store.own_folder())
        self._limiters: dict[int, anyio.CapacityLimiter] = {}
        # Where sessions are kept, so is the key: signatures are known again after a restart.
        key = self.sessions.store.key or secrets.token_bytes(32)
        self.reasoning_cipher = ReasoningCipher(key, limit=self.limits.body_bytes)
        if isinstance(key_store := self.sessions.store.key_store, KeyStore):
            key_store.share(self.keys, self.limit_namespaces)
        self._limited: list[str] = []
        self.limit_namespaces()
        self.in_flight = InFlight()
        self.running: WeakSet[Cancellable] = WeakSet()
        """What is being computed for clients, besides replies."""
        self.replies: WeakSet[ReplyInTheMaking] = WeakSet()
        """What is being answered."""
        self._unattended: set[asyncio.Future[None]] = set()

    def keep(self, task: asyncio.Future[None]) -> None:
        """Have the end of the server wait for a task that goes on without a client."""
        self._unattended.add(task)
        task.add_done_callback(self._unattended.discard)

    async def finish(self, seconds: float) -> None:
        """Wait for tasks that go on without a client, and for those that they begin, up to `seconds`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._unattended and loop.time() < end:
            await asyncio.wait(self._unattended, timeout=end - loop.time())

    def save(self) -> None:
        """Write down what is remembered over a restart."""
        self.ledger.daily.save()
        self.models.save()

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
        """Have each namespace store no more than its keys say, as they are now, and have its share."""
        self.models.weigh()
        for namespace in {*self.keys.namespaces, *self._limited}:
            self.sessions.store.limit(namespace, self.keys.quota(namespace))
        self._limited = self.keys.namespaces

    def check_message_count(self, count: int) -> None:
        if count > self.limits.messages:
            raise invalid(
                "messages", f"{count} messages, {self.limits.messages} are allowed", code="too_many_messages"
            )

    def end_waiting(self) -> None:
        """End replies that wait for an engine behind others: a stopping server has time for those that it has
        begun. What is asked of a session stays there, to be answered later."""
        for runtime in self.models.loaded_runtimes():
            waiting = [each for each in self.replies if each.runtime is runtime and not each.is_begun]
            # Whether the prompt of one is being read shows late: no more of them than the engine has waiting.
            waiting.sort(key=lambda each: each.number)
            for each in waiting[len(waiting) - min(len(waiting), runtime.load[0]) :]:
                each.interrupt(STOPPED)

    def end(self) -> None:
        """End everything that is still being computed for somebody."""
        self.stopping = True
        for reply in list(self.replies):
            reply.interrupt(STOPPED)
        for work in list(self.running):
            work.cancel()

    def cancel(self, namespace: str, request_id: str) -> int:
        """End what is being computed for a request of a namespace. How many replies that were."""
        return sum(work.stop(namespace, request_id) for work in list(self.replies))

    async def _in_thread(self, threads: int, function: Callable[[], T]) -> T:
        # A limiter belongs to the event loop that it is made in.
        limiter = self._limiters.setdefault(threads, anyio.CapacityLimiter(threads))
        return await anyio.to_thread.run_sync(function, limiter=limiter)


# The models of a server: which there are, by what names, and a request's lease of one.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as clients know it. Whether its engine is loaded is for the runtime to say."""

    runtime: Runtime
    name: str
    """What it is called in answers."""
    adapters: Mapping[str, float] = field(default_factory=dict)
    """The adapters that clients may name, each with the scale that it has where a client names none."""
    short_names: Sequence[str] = ()
    """The catalogue's names for it."""
    nbytes: int = 0
    """Of its file, where there is one."""

    @classmethod
    def of(cls, model: PooledModel) -> ServedModel:
        return cls(
            runtime=model.runtime,
            name=model.name,
            adapters=model.adapters,
            short_names=finder().short_names(model.source),
            nbytes=model.facts().nbytes,
        )

    def engine(self) -> tuple[str, int]:
        """How the engine is, and how often it was started anew."""
        health = self.runtime.backend.health()
        return health.state, health.restarts


class ModelDirectory:
    """The models of one server, the one that is meant where nobody names one first."""

    def __init__(
        self, server: ServerState, first: ServedModel, *, pool: ModelPool | None, own_aliases: Sequence[str]
    ) -> None:
        self._server = server
        self.first = first
        self.pool = pool
        self._own_aliases = tuple(own_aliases)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.names: dict[str, dict[str, str]] = {}
        """Names that clients gave models, each with the model's own, by namespace."""
        self.warming: WeakKeyDictionary[Runtime, threading.Thread] = WeakKeyDictionary()
        """The threads that start services, or have started them, by model."""

    def add(self, spec: ModelSpec) -> PooledModel:
        """Serve one more model from now on; a copy of one that is here is that one."""
        if self.pool is None:
            raise InvalidInputError("this server has no pool of models: its next start can serve it")
        model = self.pool.add(spec)
        model.backend.attach_loop(self._loop)
        self.weigh()
        return model

    def add_pulled(self, name: str, source: str) -> str:
        """Serve a model that was fetched under `name` from now on, and return its own name. Both mean it, and
        so do those of the catalogue."""
        label = label_of(source)
        free = all(each.name != label or each.source == source for each in self.pooled)
        model = self.add(ModelSpec(name=label if free else name, source=source))
        if name not in (model.name, *finder().short_names(source)):
            self._own_aliases = (*self._own_aliases, f"{name}={model.name}")
        return model.name

    def attach_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Have the tokens of engines in other processes come straight to the loop that sends them on, also
        those of models that are added."""
        self._loop = loop
        for runtime in self.runtimes:
            runtime.backend.attach_loop(loop)

    def weigh(self) -> None:
        """Have the engines shared between namespaces by the weights of their keys."""
        for runtime in self.runtimes:
            runtime.backend.weights = self._server.keys.weights

    @property
    def pooled(self) -> list[PooledModel]:
        """All models; none where there is no pool."""
        return [] if self.pool is None else list(self.pool.models.values())

    def served(self, model: PooledModel | None) -> ServedModel:
        """A model as clients know it; without one, the first."""
        if model is None or model.runtime is self.first.runtime:
            return self.first
        return ServedModel.of(model)

    def all(self) -> list[ServedModel]:
        return [self.served(model) for model in self.pooled] or [self.first]

    @property
    def runtimes(self) -> list[Runtime]:
        """Of all models. Nothing is read for it, as facts of a model that is not loaded would be."""
        return [each.runtime for each in self.pooled] or [self.first.runtime]

    def loaded_runtimes(self) -> list[Runtime]:
        """Of the models that are loaded, or were and are known."""
        return [each for each in self.runtimes if each.backend.is_known]

    def is_loaded(self, model: ServedModel) -> bool:
        """Whether its engine can be asked without being loaded for that."""
        return self.pool is None or model.engine()[0] not in ("starting", "unloading", "unloaded")

    async def lease(
        self,
        model_name: str,
        visit: Visit,
        namespace: str = "",
        *,
        sign: Sign | bool = False,
        keep_alive: float | None = None,
    ) -> ServedModel:
        """The model that a request asks for, loaded and kept so until the end of `visit`. 404 where there is
        no such model. With `sign`, a waiting client gets keep-alives. `keep_alive` is how long the model
        stays from then on; of a key it only adds time."""
        visit.model_name = model_name
        model = self.check(model_name, namespace)
        if self.pool is None or model is None:
            return self.first
        await visit.enter(self.pool, model, self._server.limits, sign=sign)
        if keep_alive is not None:
            self.pool.keep(model, keep_alive, only_longer=not self._server.keys.manages(namespace))
        served = self.served(model)
        self.warm_up(served)
        return served

    async def unload(self, model: PooledModel, namespace: str) -> None:
        """Let a model go, for a caller who may. 409 where it is pinned, in this process, or in use."""
        if not self._server.keys.manages(namespace):
            raise ApiError(
                403,
                f"only a key of the namespace {METRICS} unloads a model: all keys share it",
                code="forbidden",
            )
        assert self.pool is not None
        try:
            if await self.pool.unload(model):
                return
        except InvalidInputError as error:
            raise ApiError(409, str(error), code="cannot_unload") from None
        raise ApiError(
            409,
            f"model {model.name} is in use by {model.leases} requests: ask again when they are answered",
            code="model_in_use",
        )

    def check(self, model_name: str, namespace: str = "") -> PooledModel | None:
        """The model of a name. One that is neither a model's nor an alias is refused: no client takes another
        model for its own. None where there is one model, and no pool.

        `name` and Ollama's `name:latest` are one. `namespace` may have given models further names. Each of
        them may be followed by an adapter: `name:adapter`.
        """
        base, _, adapter = model_name.rpartition(":")
        name = self._find_model(base, namespace) if base else None
        if name is None or adapter not in self._adapters_of(name):
            name = self._find_model(model_name, namespace)
        model = self.pool.models.get(name) if self.pool is not None and name is not None else None
        if name is None or (model is None and self.pool is not None):
            names = [model.name for model in self.pooled] or [self.first.name]
            has = repr(names[0]) if len(names) == 1 else ", ".join(map(repr, names[:20]))
            target = "" if len(names) == 1 else f"={names[0]}"
            raise ApiError(
                404,
                f"model {model_name[:100]!r} not found: this server has {has}. Ask for that name, or have "
                f"it answer to yours: `perdure serve --alias {model_name[:100] + target!r}`",
                code="model_not_found",
                param="model",
            )
        return model

    def _adapters_of(self, name: str) -> Mapping[str, float]:
        """The adapters that clients may name with the model of that name."""
        model = None if self.pool is None else self.pool.models.get(name)
        if model is not None and model.adapters:
            return model.adapters
        return self.first.adapters if name == self.first.name else {}

    def _find_model(self, model_name: str, namespace: str) -> str | None:
        """The own name of the model that is meant, if there is one."""
        plain = model_name.removesuffix(":latest")
        first = self.pool.default.name if self.pool is not None else self.first.name
        names = {self.first.name: self.first.short_names}
        for model in self.pooled:
            names.setdefault(model.name, finder().short_names(model.source))
        if plain in ("", "default"):
            return first
        for name, short in names.items():
            if plain == name.removesuffix(":latest") or plain in short:
                return first if len(names) == 1 else name
        for copy_name, name in self.names.get(namespace, {}).items():
            if plain == copy_name.removesuffix(":latest"):
                return name
        for alias in (*self._server.aliases, *self._own_aliases):
            pattern, equals, name = alias.rpartition("=")
            if equals and name not in names:
                pattern, equals = alias, ""
            if any(fnmatchcase(each, pattern if equals else alias) for each in (model_name, plain)):
                return name if equals and len(names) > 1 else first
        return None

    def warm_up(self, model: ServedModel | None = None) -> None:
        """Start the services of extensions for a model, without one for the first, in a separate thread. Only
        the first time for each model does something."""
        model = model or self.first
        if self._server.warm and model.runtime not in self.warming:
            thread = BackgroundThread(lambda: self._start_services(model), name="perdure-warm")
            self.warming[model.runtime] = thread
            thread.start()

    def _start_services(self, model: ServedModel) -> None:
        for service in services():
            # A model without a template has no prompts that begin alike; one that is closed, none at all.
            with suppress(PerdureError):
                service.start(self._server, model)

    def save(self) -> None:
        """Have services write down what is remembered over a restart."""
        for runtime in list(self.warming):
            for service in services():
                service.save(runtime)
