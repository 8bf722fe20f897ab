"""The engine in another process, behind the protocol of a backend."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, Protocol, Unpack

import numpy as np

from perdure import system
from perdure.backend import Backend, BackendKeywords, SecondOpening
from perdure.cache.prefix_cache import PrefixCacheCalls
from perdure.config import QUEUE
from perdure.decode.embedding import EmbeddingFuture
from perdure.decode.output_queue import OutputQueue
from perdure.decode.request import Request
from perdure.decode.stream import result_of
from perdure.engine import registry
from perdure.engine.adapters import Scales
from perdure.engine.contract import LoadingKeywords, Tokenizer, Tokens, check_token
from perdure.errors import InvalidInputError
from perdure.events.event import Event
from perdure.events.hub import EventHub, Subscription
from perdure.memory import MemorySpec
from perdure.worker.message_reader import MessageReader
from perdure.worker.pending_requests import PendingRequests, packed
from perdure.worker.process import Health, RestartPolicy
from perdure.worker.protocol import Ask, P, Ready, Setup, T, Tables, Target
from perdure.worker.supervisor import Residence, Supervisor

_PATIENCE = 5.0
"""Seconds that `submit` waits to hear that a request was taken. After that, a refusal ends the job."""


def _elsewhere(event: Event) -> None:
    """Stands for an observer in another process."""


class BackendClient:
    """A backend whose engine is in another process: requests and calls outlive that one, or are told so.

    What is wrong with a request is raised by `submit`, as in process, while the engine is there to say so;
    for a request that has to wait for the engine to start again, it is raised where the result is asked for.
    """

    no_processors = ""
    """What to do instead of giving functions to a request."""

    def __init__(self, queue: int) -> None:
        self._pending = PendingRequests(queue)
        self._reader = MessageReader()

    @property
    def events(self) -> EventHub:
        """What happens in the engine's process."""
        return self._pending.events

    def attach_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Have what the engine says read in the event loop of those who wait for it; None: not any more."""
        self._reader.attach_loop(loop)

    def _handshake(self, about: Ready) -> None:
        """What the engine says about itself."""
        self.n_ctx = about.n_ctx
        self.slots = about.slots
        self.exact = about.exact
        self.model = RemoteTokenizer(about, self._ask)
        self.cache = RemotePrefixCache(self._ask)

    def _request_start(self) -> None:
        """Somebody waits for the engine."""

    @property
    def load(self) -> tuple[int, int]:
        """Requests waiting, and being served, as far as can be told from here without asking."""
        return self._pending.load

    def submit(self, request: Request) -> OutputQueue:
        if request.processors:
            raise InvalidInputError(
                f"processors are functions of this process and the engine is in another; {self.no_processors}"
            )
        if (prompt := _plain(request.prompt)) is not request.prompt:
            request = replace(request, prompt=prompt)
        request = replace(request, event_id=request.event_id or next(self.events.ids))
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
        self._request_start()
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
        self._pending.ask("backend", "embed", (plain, _plain(adapters)), {}, answer)
        self._request_start()
        return answer

    def embedding_width(self) -> int:
        return self._ask("backend", Backend.embedding_width)

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
        answer: Future[T] = self._pending.ask(target, method.__name__, tuple(map(_plain, args)), sent)
        self._request_start()
        self._reader.detach_waiting_loop()
        return result_of(answer)


class RemoteBackend(BackendClient):
    """The engine in a child process that may die, and is then started again."""

    no_processors = "open the runtime without isolated to use them"

    def __init__(
        self,
        source: str | os.PathLike[str] | None = None,
        *,
        restart_policy: RestartPolicy | None = None,
        residence: Residence | None = None,
        store: str | os.PathLike[str] | None = None,
        loading: LoadingKeywords | None = None,
        **settings: Unpack[BackendKeywords],
    ) -> None:
        """`residence` says when the process may have its memory."""
        system.require_child_pipes("an engine in a process of its own")
        engine = registry.find(source)
        setup = Setup(
            engine=engine,
            # Fetched here, where a progress bar can be seen.
            model=registry.imported(engine).fetch(source),
            settings={**settings, "store": None if store is None else os.path.abspath(store)},
            loading=loading or {},
            paths=tuple(sys.path),
            pulse=1.0,
            log_level=logging.getLogger("perdure").getEffectiveLevel(),
        )
        packed(setup)
        queue = settings.get("queue", QUEUE)
        super().__init__(queue if isinstance(queue, int) else 0)
        self._supervisor = Supervisor(setup, restart_policy or RestartPolicy(), self._pending, self._reader)
        if residence is not None:
            self._supervisor.residence = residence
        self._handshake(self._supervisor.start())

    def _request_start(self) -> None:
        self._supervisor.request_start()

    def health(self) -> Health:
        return self._supervisor.health()

    def unload(self) -> bool:
        """Let the process go until the next request; its state is in the store. False, and nothing done,
        where something is being asked of it."""
        return self._supervisor.unload()

    def load_again(self) -> None:
        """Have a process that was let go started, without waiting for it."""
        self._supervisor.request_start()

    def watch(self, residence: Residence) -> None:
        """Have `residence` asked and told from now on."""
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
