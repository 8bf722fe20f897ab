"""The engine in another process, behind the protocol of a backend."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, Protocol

import numpy as np

from perdure import Event, InvalidInputError, MemorySpec, Subscription
from perdure.ext.workers.message_reader import MessageReader
from perdure.ext.workers.pending_requests import PendingRequests, packed
from perdure.ext.workers.protocol import Ask, P, Ready, Setup, T, Tables, Target
from perdure.ext.workers.supervisor import Supervisor
from perdure.spi.base import EngineConfig, imported, processes
from perdure.spi.engine import Tokenizer, check_token, registry
from perdure.spi.runtime import (
    QUEUE,
    AlwaysLoaded,
    Backend,
    BlockStorage,
    EmbeddingFuture,
    EventHub,
    Health,
    OutputQueue,
    PrefixCacheCalls,
    Request,
    Residence,
    RestartPolicy,
    Scales,
    SecondOpening,
    Tokens,
    result_of,
)

_PATIENCE = 5.0
"""Seconds that `submit` waits to hear that a request was taken. After that, a refusal ends the job."""


def _elsewhere(event: Event) -> None:
    """Stands for an observer in another process."""


class BackendClient(AlwaysLoaded):
    """A backend whose engine is in another process: requests and calls outlive that one, or end with an error
    that says so.

    What is wrong with a request is raised by `submit`, as in process, while the engine is there to say so;
    for a request that has to wait for the engine to start again, it is raised where the result is asked for.
    """

    no_processors = ""
    """What to do instead of giving functions to a request."""

    def __init__(self, queue: int) -> None:
        self._pending = PendingRequests(queue)
        self._reader = MessageReader()
        self._introducing = threading.Lock()
        self._ready: Ready | None = None

    @property
    def events(self) -> EventHub:
        """What happens in the engine's process."""
        return self._pending.events

    def attach_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Have what the engine says read in the event loop of those who wait for it; None: not any more."""
        self._reader.attach_loop(loop)

    def _handshake(self, ready: Ready) -> Ready:
        """Keep what the engine says of itself when it was opened."""
        with self._introducing:
            if self._ready is None:
                self._model = RemoteTokenizer(ready, self._ask)
                self._cache = RemotePrefixCache(self._ask)
                self._ready = ready
            return self._ready

    @property
    def is_known(self) -> bool:
        return self._ready is not None

    def _wait_ready(self) -> Ready:
        """What the engine said of itself when it was opened. It may have to be opened first."""
        assert self._ready is not None
        return self._ready

    @property
    def n_ctx(self) -> int:
        return self._wait_ready().n_ctx

    @property
    def slots(self) -> int:
        return self._wait_ready().slots

    @property
    def exact(self) -> bool:
        return self._wait_ready().exact

    @property
    def model(self) -> RemoteTokenizer:
        self._wait_ready()
        return self._model

    @property
    def cache(self) -> RemotePrefixCache:
        self._wait_ready()
        return self._cache

    @property
    def load(self) -> tuple[int, int]:
        """Requests waiting, and being served, as far as this side knows without asking."""
        return self._pending.load

    def submit(self, request: Request) -> OutputQueue:
        if request.processors:
            raise InvalidInputError(
                f"processors are functions of this process and the engine is in another; {self.no_processors}"
            )
        if (prompt := _plain(request.prompt)) is not request.prompt:
            request = replace(request, prompt=prompt)
        self._wait_ready()
        request = replace(self.weighed(request), event_id=request.event_id or next(self.events.ids))
        if (observer := request.observe) is not None:
            if isinstance(observer, Subscription):
                self.events.forward(request.event_id, observer)
            else:
                self.events.observe(request.event_id, observer)
            # A function does not travel: its events come here.
            request = replace(request, observe=_elsewhere)
        try:
            pending = self._pending.submit(request)
        except BaseException:
            self.events.forget(request.event_id)
            raise
        self.start()
        self._reader.detach_waiting_loop()
        try:
            pending.wait_acknowledged(_PATIENCE)
        except BaseException:
            self.events.forget(request.event_id)
            pending.cancel()
            raise
        if pending.refusal is not None:
            self.events.forget(request.event_id)
            raise pending.refusal
        return pending

    def embed(self, texts: Sequence[Tokens], adapters: Scales | None = None) -> EmbeddingFuture:
        answer = EmbeddingFuture()
        plain = [_plain(text) for text in texts]
        self._wait_ready()
        self._pending.ask("backend", "embed", (plain, _plain(adapters)), {}, answer)
        self.start()
        return answer

    def embedding_width(self) -> int:
        return self._ask("backend", Backend.embedding_width)

    def shares(self) -> Mapping[str, Mapping[str, float]]:
        return self._ask("backend", Backend.shares)

    def second_opening(self, adapters: Scales | None) -> SecondOpening:
        return self._ask("backend", Backend.second_opening, adapters)

    def _ask(
        self,
        target: Target,
        method: Callable[Concatenate[Any, P], T],
        /,
        *args: P.args,
        **keywords: P.kwargs,
    ) -> T:
        sent = {key: _plain(value) for key, value in keywords.items()}
        self._wait_ready()
        answer: Future[T] = self._pending.ask(target, method.__name__, tuple(map(_plain, args)), sent)
        self.start()
        self._reader.detach_waiting_loop()
        return result_of(answer)


class RemoteBackend(BackendClient):
    """The engine in a child process that may die, and is then started again."""

    is_attached = False

    can_unload = True

    no_processors = "open the runtime without isolated to use them"

    def __init__(
        self,
        source: str | os.PathLike[str] | None = None,
        config: EngineConfig | None = None,
        *,
        storage: BlockStorage | None = None,
        restart_policy: RestartPolicy | None = None,
        residence: Residence | None = None,
        lazy: bool = False,
    ) -> None:
        """`residence` says when the process may have its memory. A `lazy` one is started by the first
        request, which waits for that; nothing that only looks starts it. After a start that failed the next
        request tries again."""
        processes.require_child_pipes("an engine in a separate process")
        engine = registry.find(source)
        config, storage = (config or EngineConfig()).resolved(), storage or BlockStorage()
        if storage.folder is not None:
            # Absolute: this process may go elsewhere.
            storage = replace(storage, folder=storage.folder.absolute())
        self.storage = storage

        def make_setup() -> Setup:
            setup = Setup(
                engine=engine,
                model=imported(engine).fetch(source),
                config=config,
                storage=storage,
                paths=tuple(sys.path),
                pulse=1.0,
                log_level=logging.getLogger("perdure").getEffectiveLevel(),
            )
            packed(setup)
            return setup

        super().__init__(QUEUE if config.queue is None else config.queue)
        if not lazy:
            # Fetched here, where a progress bar can be seen.
            setup = make_setup()
            make_setup = lambda: setup  # noqa: E731
        self._supervisor = Supervisor(
            make_setup,
            restart_policy or RestartPolicy(),
            self._pending,
            self._reader,
            residence,
            lambda: imported(engine).build(),
        )
        if not lazy:
            try:
                self._wait_ready()
            except BaseException:
                self.close()
                raise

    def _wait_ready(self) -> Ready:
        return self._ready or self._handshake(self._supervisor.wait_ready())

    def start(self) -> None:
        self._supervisor.request_start()

    def health(self) -> Health:
        return self._supervisor.health()

    def unload(self) -> bool:
        return self._supervisor.unload()

    def watch(self, residence: Residence) -> None:
        self._supervisor.residence = residence

    def close(self) -> None:
        """End what is running as cancelled, and let the process go."""
        self._supervisor.close()
        self.events.close()


def _plain(value: Any) -> Any:
    """What iterates, as something that can be sent: a generator or a view of a dict cannot."""
    if isinstance(value, (str, bytes, list, tuple, set, frozenset, dict, array, np.ndarray)):
        return value
    return list(value) if isinstance(value, Iterable) else value


# Remote prefix cache: `rt.cache` of an engine in another process.


def _asked(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[RemotePrefixCache, P], T]:
    """A call of the cache that is made over there, with the options and defaults that it has there."""

    @wraps(method)
    def call(self: RemotePrefixCache, /, *args: P.args, **keywords: P.kwargs) -> T:
        return self.ask("cache", method, *args, **keywords)

    return call


class RemotePrefixCache:
    """The calls of `PrefixCache`, made over there."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask

    warm = _asked(PrefixCacheCalls.warm)
    records = _asked(PrefixCacheCalls.records)
    blocks = _asked(PrefixCacheCalls.blocks)
    clear = _asked(PrefixCacheCalls.clear)
    plan = _asked(PrefixCacheCalls.plan)
    wake = _asked(PrefixCacheCalls.wake)
    sleep = _asked(PrefixCacheCalls.sleep)
    save = _asked(PrefixCacheCalls.save)
    pack = _asked(PrefixCacheCalls.pack)
    unpack = _asked(PrefixCacheCalls.unpack)
    held = _asked(PrefixCacheCalls.held)
    runs = _asked(PrefixCacheCalls.runs)
    slots = _asked(PrefixCacheCalls.slots)
    identity = _asked(PrefixCacheCalls.identity)
    stats = _asked(PrefixCacheCalls.stats)


# Text and tokens, asked of the engine's process.


class TableCalls(Protocol):
    """What is asked about the vocabulary as a whole."""

    def all(self) -> Tables: ...


class RemoteTokenizer:
    """What a model says about text and about itself. What is asked token by token comes from tables that
    are fetched once, when they are first needed."""

    def __init__(self, about: Ready, ask: Ask) -> None:
        self.n_vocab = about.n_vocab
        self.memory: MemorySpec = about.memory
        self.info = about.info
        self.metadata: Mapping[str, str] = MappingProxyType(dict(about.metadata))
        self.digest = about.digest
        self.path = None if about.path is None else Path(about.path)
        self._ask = ask
        self._fetched: Tables | None = None

    def tokenize(self, text: str, *, special: bool = False, bos: bool = True) -> list[int]:
        return self._ask("model", Tokenizer.tokenize, text, special=special, bos=bos)

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> str:
        return self._ask("model", Tokenizer.detokenize, list(tokens), special=special)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        tables = self._tables
        return (tables.special_pieces if special else tables.pieces)[self._check(token)]

    def is_end(self, token: int) -> bool:
        return self._check(token) in self._tables.ends

    def is_control(self, token: int) -> bool:
        return self._check(token) in self._tables.controls

    @property
    def ends(self) -> frozenset[int]:
        return self._tables.ends

    @property
    def controls(self) -> frozenset[int]:
        return self._tables.controls

    @property
    def _tables(self) -> Tables:
        # No `cached_property`: until Python 3.12 its lock is one for all models of the process, and one whose
        # engine is being loaded would hold up the others.
        if self._fetched is None:
            self._fetched = self._ask("tables", TableCalls.all)
        return self._fetched

    def _check(self, token: int) -> int:
        return check_token(token, self.n_vocab)
