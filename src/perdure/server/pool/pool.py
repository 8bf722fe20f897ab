"""Which models there are, which are loaded within one memory budget, and how long they stay."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

from perdure.backend import Backend, BlockStorage, Residence
from perdure.engine import registry
from perdure.engine.adapters import absolute_names
from perdure.engine_config import N_CTX, EngineConfig
from perdure.errors import ClosedError, InvalidInputError, ModelNotFoundError, PerdureError
from perdure.events.background import BackgroundThread
from perdure.extension import part
from perdure.models.ways_to_open import Room, memory_needed
from perdure.restart_policy import RestartPolicy
from perdure.runtime import Runtime
from perdure.server.pool.spec import ModelSpec, check_copies, is_copy
from perdure.sessions.listener import Listener
from perdure.sessions.store.base import SessionStore
from perdure.sessions.store.registry import open_store
from perdure.store.owner import StoreLock

log = logging.getLogger("perdure.pool")

_RETRY = 0.05
"""Seconds after which a model that could not be let go just now is tried again."""
_DRAIN = 1.0
"""Seconds that an unload keeps new requests waiting: a model in use for longer stays."""
_FOR_EVER = -1.0

Loading = Literal["unloaded", "loading", "ready", "unloading"]
Fit = Literal["fits", "in_turn", "not"]


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for its model."""

    loop: asyncio.AbstractEventLoop
    granted: asyncio.Future[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model says of itself; of one that was never loaded, what its file's head says."""

    n_ctx: int
    n_vocab: int = 0
    architecture: str = ""
    size: str = ""
    nbytes: int = 0
    digest: str = ""
    quantisation: str = ""


def facts_of(backend: Backend) -> ModelFacts:
    """What a model that is open says of itself."""
    info = backend.model.info
    return ModelFacts(
        n_ctx=backend.n_ctx,
        n_vocab=backend.model.n_vocab,
        architecture=info.architecture,
        size=info.size_label,
        nbytes=info.nbytes,
        digest=backend.model.digest,
        quantisation=info.quantisation,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharing:
    """What the models of a pool have in common."""

    sessions: SessionStore
    storage: BlockStorage
    config: EngineConfig
    restart_policy: RestartPolicy | None = None


class PooledModel(Residence):
    """One model of a pool: its users, and whether it is loaded.

    Always holds: it is let go only while no lease is held and nothing is asked of its engine. Everything here
    changes under the lock of the pool.
    """

    def __init__(self, pool: ModelPool, name: str, runtime: Runtime, *, source: str = "") -> None:
        self.name = name
        self.source = source
        self.runtime = runtime
        self.spec: ModelSpec | None = None
        self.pinned = False
        self.keep_alive = _FOR_EVER
        """Seconds without a request after which it is let go; below 0, never."""
        self.machine = self.device = 0
        """Bytes that it is predicted to take."""
        self.resident = False
        """Whether it has its memory, or may take it."""
        self.is_ready = False
        self.draining = False
        """Whether new requests wait because it is about to go."""
        self.removed = False
        """Whether the pool does not have it any more."""
        self.leases = 0
        self.waiters: list[_Waiter] = []
        self.idle_since = time.monotonic()
        self.ready_at = self.load_began = 0.0
        self.load_seconds = 0.0
        self.loads = 0
        self.error: Exception | None = None
        self._pool = pool
        self._facts: ModelFacts | None = None

    @property
    def adapters(self) -> dict[str, float]:
        """The adapters that clients may name with it, each with its scale where they name none."""
        adapters = self.spec.adapters if self.spec is not None else {}
        return {name: scale for name, (_, scale) in adapters.items()}

    @property
    def backend(self) -> Backend:
        return self.runtime.backend

    @property
    def is_known(self) -> bool:
        """Whether it was loaded at some time, so that its runtime describes it without waiting."""
        return self.backend.is_known

    @property
    def can_unload(self) -> bool:
        """Whether its engine is in a process that can be ended, and is not pinned."""
        return not self.pinned and self.backend.can_unload

    @property
    def loading(self) -> Loading:
        if self.is_ready:
            return "unloading" if self.draining else "ready"
        return "loading" if self.resident else "unloaded"

    @property
    def fit(self) -> Fit:
        """Whether it can be loaded beside what is loaded, in turn with others, or not at all."""
        if self.resident or self._pool.fits(self, lambda other: other.resident):
            return "fits"
        return "in_turn" if self._pool.fits(self, lambda other: not other.can_unload) else "not"

    def facts(self) -> ModelFacts:
        """What is known of it without loading it. It may have to read the head of its file."""
        if self.backend.is_known:
            return facts_of(self.backend)
        if self._facts is None:
            self._facts = self._read_facts()
        return self._facts

    def _read_facts(self) -> ModelFacts:
        n_ctx = self.spec.config.n_ctx if self.spec is not None else None
        engine = registry.engine_for(self.source)
        if type(engine).card is registry.Engine.card:
            # It would load the model to answer.
            return ModelFacts(n_ctx=n_ctx if isinstance(n_ctx, int) else N_CTX)
        try:
            card, _ = engine.card(self.source)
        except PerdureError:
            return ModelFacts(n_ctx=n_ctx if isinstance(n_ctx, int) else N_CTX)
        if n_ctx == "auto":
            n_ctx = card.context_length
        return ModelFacts(
            n_ctx=n_ctx or N_CTX,
            n_vocab=card.vocabulary or 0,
            architecture=card.architecture or "",
            nbytes=card.file_bytes,
            quantisation=card.quantisation or "",
        )

    @property
    def used(self) -> bool:
        return bool(self.leases or self.waiters)

    @property
    def expires_in(self) -> float | None:
        """Seconds until it is let go if nobody asks; None for never."""
        if self.keep_alive < 0 or not self.can_unload:
            return None
        return (
            self.keep_alive if self.used else max(0.0, self.idle_since + self.keep_alive - time.monotonic())
        )

    def unload_if_idle(self) -> bool:
        """Have its process end, if nothing is asked of it."""
        if self.leases or not self.is_ready or not self.can_unload:
            return False
        if not self.backend.unload():
            return False
        self.is_ready = False
        log.info("model %s is unloaded", self.name)
        return True

    def start(self) -> None:
        self.backend.start()

    # For its supervisor.

    def enter(self) -> bool:
        return self._pool.admit(self)

    def ready(self) -> None:
        self._pool.loaded(self)

    def left(self) -> None:
        self._pool.gone(self)

    def failed(self, error: Exception) -> None:
        self._pool.gone(self, error)


class ModelPool:
    """The models of one server. Safe from any thread.

    Always holds: what is loaded fits into `room` by prediction, or is one model alone; models that wait for
    room get it in the order in which they asked; a model that others wait for is not taken from those it
    serves before it served for as long as its loading took, so at most half of the time is spent loading.
    `models` is replaced, never changed, when one is added or removed.
    """

    def __init__(self, room: Room | None = None, *, keep_alive: float = _FOR_EVER) -> None:
        """Without `room` there is no budget. `keep_alive` is for models that do not say."""
        self.room = room
        self.keep_alive = keep_alive
        self.models: dict[str, PooledModel] = {}
        self._changed = threading.Condition(threading.RLock())
        self._queue: list[PooledModel] = []
        """Those that wait for room, the first that asked first."""
        self._closing = False
        self._held = ExitStack()
        self._sharing: _Sharing | None = None
        self._thread = BackgroundThread(self._tidy, name="perdure-pool", restart=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        specs: Sequence[ModelSpec],
        config: EngineConfig | None = None,
        *,
        storage: BlockStorage | None = None,
        memory: int | None = None,
        keep_alive: float = _FOR_EVER,
        restart_policy: RestartPolicy | None = None,
    ) -> ModelPool:
        """A pool of these models, none loaded but those that are pinned. `config` is for all, as far as a
        model does not say; `memory` bounds what they take of the machine's, instead of what is free now."""
        if not specs:
            raise InvalidInputError("a pool needs at least one model")
        pool = cls(_room(memory), keep_alive=keep_alive)
        storage = storage or BlockStorage()
        store = storage.folder
        if store is not None:
            check_copies(specs)
        try:
            lock = None
            if store is not None:
                lock = StoreLock(store)
                pool._held.callback(lock.release)
            sessions = open_store(store)
            pool._held.callback(sessions.close)
            pool._sharing = _Sharing(
                sessions=sessions,
                storage=storage,
                config=config or EngineConfig(),
                restart_policy=restart_policy,
            )
            for spec in specs:
                pool._add(spec, pool._sharing)
            pool._check_room(explicit=memory is not None)
            if lock is not None:
                # Another process that opens the store gets the first model.
                first = next(iter(pool.models.values()))
                listener = Listener(lock.holder, first.backend, {})
                pool._held.callback(listener.close)
            for model in pool.models.values():
                if model.pinned:
                    model.start()
        except BaseException:
            pool.close()
            raise
        return pool

    @classmethod
    def of_runtime(
        cls,
        name: str,
        runtime: Runtime,
        *,
        source: str = "",
        config: EngineConfig | None = None,
        keep_alive: float = _FOR_EVER,
    ) -> ModelPool:
        """A pool of one model that is loaded already. The caller that opened its runtime closes it after the
        pool. `config` is for models that are added."""
        pool = cls(keep_alive=keep_alive)
        model = PooledModel(pool, name, runtime, source=source)
        if not runtime.backend.is_attached:
            pool._sharing = _Sharing(
                sessions=runtime.sessions.store,
                storage=runtime.backend.storage,
                config=config or EngineConfig(),
            )
        model.keep_alive = keep_alive
        model.resident = model.is_ready = True
        model.ready_at, model.loads = time.monotonic(), 1
        pool.models[name] = model
        runtime.backend.watch(model)
        return pool

    @property
    def default(self) -> PooledModel:
        """The one that is meant where nobody names one."""
        return next(iter(self.models.values()))

    # Models that come and go.

    def add(self, spec: ModelSpec) -> PooledModel:
        """Have one more model from now on, loaded when it is asked for. A copy of one that is there is that
        one."""
        if self._sharing is None:
            raise InvalidInputError(
                "this server uses the engine of another process and can add no model: start that one with it"
            )
        for known in self.models.values():
            if known.source and is_copy(known.source, spec.source):
                return known
        with self._changed:
            self._check_open()
            if (namesake := self.models.get(spec.name)) is not None:
                raise InvalidInputError(f"there is a model {spec.name} already, {namesake.source}")
            self._budget(self._sharing.config)
            return self._add(spec, self._sharing)

    def remove(self, model: PooledModel) -> bool:
        """Do without a model that is not in use from now on: whether that is so. The first one stays."""
        with self._changed:
            if model.used or model is self.default:
                return False
            if model.resident and not model.unload_if_idle():
                return False
            model.removed = True
            self.models = {name: each for name, each in self.models.items() if each is not model}
            if model in self._queue:
                self._queue.remove(model)
            self._changed.notify_all()
        model.runtime.close()
        return True

    # For users of a model.

    def try_acquire(self, model: PooledModel) -> bool:
        """Have a model until `release`, if it is loaded."""
        with self._changed:
            self._check_open()
            if model.removed:
                raise ModelNotFoundError(f"model {model.name} is not served any more")
            if not model.is_ready or model.draining:
                return False
            model.leases += 1
            return True

    async def acquire(self, model: PooledModel) -> None:
        """Return when the model is loaded, and keep it so until `release`."""
        with self._changed:
            if self.try_acquire(model):
                return
            loop = asyncio.get_running_loop()
            waiter = _Waiter(loop, loop.create_future())
            model.waiters.append(waiter)
            if not model.is_ready:
                model.start()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            with self._changed:
                if waiter in model.waiters:
                    model.waiters.remove(waiter)
                elif waiter.granted.done() and not waiter.granted.cancelled():
                    self.release(model)
            raise

    def release(self, model: PooledModel) -> None:
        """The end of a use."""
        with self._changed:
            model.leases -= 1
            model.idle_since = time.monotonic()
            self._changed.notify_all()

    def keep(self, model: PooledModel, keep_alive: float, *, only_longer: bool = False) -> None:
        """Have a model stay for so long without a request; with `only_longer`, not for less than it would."""
        with self._changed:
            if only_longer and _seconds(keep_alive) < _seconds(model.keep_alive):
                return
            model.keep_alive = keep_alive
            self._changed.notify_all()

    async def unload(self, model: PooledModel) -> bool:
        """Let a model go, unless it is in use for longer than a second: then it stays, and False is returned.
        Requests that come meanwhile wait, and have it loaded again where it went."""
        if model.pinned:
            raise InvalidInputError(f"model {model.name} is pinned: it stays until the server stops")
        if not model.can_unload:
            raise InvalidInputError(
                "the engine is not in a process that this server started, so it cannot be unloaded: start "
                "the server without --in-process"
            )
        with self._changed:
            if not model.resident:
                return True
            before, end = model.loads, time.monotonic() + _DRAIN
            model.draining = True
        went = False
        try:
            while model.loads == before and model.resident:
                with self._changed:
                    went = model.unload_if_idle() or went
                    if model.is_ready and time.monotonic() >= end:
                        return False
                await asyncio.sleep(_RETRY)
        finally:
            with self._changed:
                if model.is_ready and model.draining:
                    self._open_door(model)
        return went or not model.resident

    def close(self) -> None:
        """End what is running as cancelled, let all processes go, and everything that was opened here."""
        with self._changed:
            self._closing = True
            for model in self.models.values():
                self._refuse(model, ClosedError("this server is stopping"))
            self._changed.notify_all()
        self._thread.join()
        self._held.close()

    # For the supervisors, in their threads.

    def admit(self, model: PooledModel) -> bool:
        """Whether a model may be loaded now; if not, room is being made for it."""
        with self._changed:
            self._check_open()
            if model.resident:
                return True
            if model not in self._queue:
                self._queue.append(model)
            if self._queue[0] is not model or not self._has_room(model):
                if self._queue[0] is model:
                    self._make_room(model)
                return False
            self._queue.remove(model)
            model.resident = True
            model.load_began = time.monotonic()
            for other in self.models.values():
                # One that was to go for this one, and need not any more.
                if other.is_ready and other.draining:
                    self._open_door(other)
            return True

    def loaded(self, model: PooledModel) -> None:
        with self._changed:
            now = time.monotonic()
            if not model.is_ready:
                model.load_seconds = now - model.load_began if model.load_began else 0.0
                model.ready_at, model.idle_since = now, now
                model.loads += 1
            model.is_ready, model.error = True, None
            self._open_door(model)

    def gone(self, model: PooledModel, error: Exception | None = None) -> None:
        with self._changed:
            model.resident = model.is_ready = model.draining = False
            model.error = error
            if model in self._queue:
                self._queue.remove(model)
            if error is not None:
                self._refuse(model, error)
            elif model.waiters:
                model.start()
            self._changed.notify_all()

    # Inside.

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError("this server is stopping")

    def _open_door(self, model: PooledModel) -> None:
        """Admit all requests that wait for a model that is loaded."""
        model.draining = False
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            model.leases += 1
            self._tell(waiter, functools.partial(self._grant, model, waiter))
        self._changed.notify_all()

    def _grant(self, model: PooledModel, waiter: _Waiter) -> None:
        if waiter.granted.done():
            self.release(model)
        else:
            waiter.granted.set_result(None)

    def _refuse(self, model: PooledModel, error: Exception) -> None:
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            self._tell(waiter, functools.partial(_fail, waiter, error))

    def _tell(self, waiter: _Waiter, what: Callable[[], None]) -> None:
        try:
            waiter.loop.call_soon_threadsafe(what)
        except RuntimeError:
            # The loop is closed, and the task that waited in it is gone.
            log.debug("a request that waited for a model is gone")

    def fits(self, model: PooledModel, beside: Callable[[PooledModel], bool]) -> bool:
        """Whether a model and those others take no more memory than there is."""
        if self.room is None:
            return True
        both = [model, *(each for each in self.models.values() if each is not model and beside(each))]
        machine, device = sum(each.machine for each in both), sum(each.device for each in both)
        return machine <= self.room.machine and device <= self.room.device

    def _has_room(self, model: PooledModel) -> bool:
        others = (each for each in self.models.values() if each is not model)
        # By itself it is tried: the prediction may be wrong.
        return not any(each.resident for each in others) or self.fits(model, lambda other: other.resident)

    def _make_room(self, model: PooledModel) -> None:
        """Have others go, those that were used longest ago first, as many as must."""
        assert self.room is not None
        loaded = [each for each in self.models.values() if each.resident and each is not model]
        machine = model.machine + sum(each.machine for each in loaded) - self.room.machine
        device = model.device + sum(each.device for each in loaded) - self.room.device
        movable = [each for each in loaded if each.can_unload]
        for victim in sorted(movable, key=lambda each: (each.used, each.idle_since)):
            if machine <= 0 and device <= 0:
                return
            machine, device = machine - victim.machine, device - victim.device
            if not victim.is_ready:
                continue
            if victim.used and time.monotonic() - victim.ready_at < victim.load_seconds:
                continue
            victim.draining = True
            victim.unload_if_idle()

    def _check_room(self, *, explicit: bool) -> None:
        """Refuse models that could never be loaded in the memory that was given."""
        if not explicit or self.room is None:
            return
        pinned = sum(model.machine for model in self.models.values() if model.pinned)
        for model in self.models.values():
            need = pinned if model.pinned else pinned + model.machine
            if need > self.room.machine:
                beside = " beside those that are pinned" if pinned and not model.pinned else ""
                raise InvalidInputError(
                    f"model {model.name} takes about {_gib(need)}{beside}, and --memory allows "
                    f"{_gib(self.room.machine)}: allow more, or give it a smaller ctx or fewer slots"
                )

    def _budget(self, config: EngineConfig) -> None:
        """Where the first model had the machine for itself: the memory for it and for those that come."""
        if self.room is not None:
            return
        first, free = self.default, _room(None)
        sizes = registry.engine_for(first.source).sizes(first.source) if first.source else None
        if sizes is not None:
            first.machine, first.device = memory_needed(sizes, free, config)
        self.room = Room(
            machine=free.machine + first.machine, device=free.device + first.device, devices=free.devices
        )

    def _add(self, spec: ModelSpec, sharing: _Sharing) -> PooledModel:
        storage = sharing.storage
        config = sharing.config.overlaid(spec.config)
        if spec.adapters:
            files = {name: file for name, (file, _) in spec.adapters.items()}
            config = replace(config, adapter_names=absolute_names(files))

        in_process: Callable[..., Backend] = part("isolated", "workers")
        backend = in_process(
            spec.source,
            config,
            storage=replace(storage, own_blocks=storage.folder is not None),
            restart_policy=sharing.restart_policy,
            lazy=True,
        )
        runtime = Runtime(backend, sessions=sharing.sessions, template=spec.template)
        model = PooledModel(self, spec.name, runtime, source=spec.source)
        backend.watch(model)
        model.spec, model.pinned = replace(spec, config=config), spec.pinned
        model.keep_alive = self.keep_alive if spec.keep_alive is None else spec.keep_alive
        self._held.callback(runtime.close)
        if spec.memory is not None:
            model.machine = spec.memory
        elif self.room is not None:
            sizes = registry.engine_for(spec.source).sizes(spec.source)
            if sizes is not None:
                model.machine, model.device = memory_needed(sizes, self.room, config)
        self.models = {**self.models, spec.name: model}
        return model

    def _tidy(self) -> None:
        """Let models go whose time is up."""
        with self._changed:
            while not self._closing:
                due: float | None = None
                for model in self.models.values():
                    left = model.expires_in if model.is_ready and not model.used else None
                    if left is None:
                        continue
                    if left <= 0 and model.unload_if_idle():
                        continue
                    due = min(max(left, _RETRY), due or left + _RETRY)
                self._changed.wait(due)


def _seconds(keep_alive: float) -> float:
    return math.inf if keep_alive < 0 else keep_alive


def _fail(waiter: _Waiter, error: Exception) -> None:
    if not waiter.granted.done():
        waiter.granted.set_exception(error)


def _room(memory: int | None) -> Room:
    """The memory for all models: what is free now, the machine's as it was said."""
    from perdure.engine.llama.layer_plan import room_now

    free = room_now()
    return free if memory is None else Room(machine=memory, device=free.device, devices=free.devices)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
