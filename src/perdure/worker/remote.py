"""The engine in another process, behind the protocol of a backend."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Concatenate, Unpack

import numpy as np

from perdure import system
from perdure.backend import Backend, BackendKeywords
from perdure.config import QUEUE
from perdure.decode.embedding import EmbeddingFuture
from perdure.decode.request import Request
from perdure.decode.stream import OutputQueue, result_of
from perdure.engine import registry
from perdure.engine.contract import LoadingKeywords, Tokens
from perdure.errors import InvalidInputError
from perdure.worker.message_reader import MessageReader
from perdure.worker.pending_requests import PendingRequests, packed
from perdure.worker.protocol import P, Ready, Setup, T, Target
from perdure.worker.proxies.prefix_cache import RemotePrefixCache
from perdure.worker.proxies.tokenizer import RemoteTokenizer
from perdure.worker.restart_policy import Health, RestartPolicy
from perdure.worker.supervisor import Supervisor

_PATIENCE = 5.0
"""Seconds that `submit` waits to hear that a request was taken. After that, a refusal ends the job."""


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

    def attach_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Have what the engine says read in the event loop of those who wait for it; None: not any more."""
        self._reader.attach_loop(loop)

    def _handshake(self, about: Ready) -> None:
        """What the engine says about itself."""
        self.n_ctx = about.n_ctx
        self.slots = about.slots
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
        pending = self._pending.submit(request)
        self._request_start()
        self._reader.detach_waiting_loop()
        try:
            pending.wait_acknowledged(_PATIENCE)
        except BaseException:
            pending.cancel()
            raise
        if pending.refusal is not None:
            raise pending.refusal
        return pending

    def embed(self, texts: Sequence[Tokens]) -> EmbeddingFuture:
        answer = EmbeddingFuture()
        self._pending.ask("backend", "embed", ([_plain(text) for text in texts],), {}, answer)
        self._request_start()
        return answer

    def embedding_width(self) -> int:
        return self._ask("backend", Backend.embedding_width)

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
        store: str | os.PathLike[str] | None = None,
        loading: LoadingKeywords | None = None,
        **settings: Unpack[BackendKeywords],
    ) -> None:
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
        self._handshake(self._supervisor.start())

    def _request_start(self) -> None:
        self._supervisor.request_start()

    def health(self) -> Health:
        return self._supervisor.health()

    def close(self) -> None:
        """End what is running as cancelled, and let the process go."""
        self._supervisor.close()


def _plain(value: Any) -> Any:
    """What iterates, as something that can be sent: a generator or a view of a dict cannot."""
    if isinstance(value, (str, bytes, list, tuple, set, frozenset, dict, array, np.ndarray)):
        return value
    return list(value) if isinstance(value, Iterable) else value
