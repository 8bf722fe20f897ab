"""The backend of a model that is loaded when somebody asks for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from perdure.backend import SecondOpening
from perdure.cache.prefix_cache import PrefixCacheCalls
from perdure.decode.embedding import EmbeddingFuture
from perdure.decode.output_queue import OutputQueue
from perdure.decode.request import Request
from perdure.engine.adapters import Scales
from perdure.engine.contract import Tokenizer, Tokens
from perdure.errors import ClosedError
from perdure.events.hub import EventHub
from perdure.worker.process import Health
from perdure.worker.remote import RemoteBackend

_UNLOADED = Health(state="unloaded", restarts=0, last_death=None, pid=None, rss=None, uptime=None)
_STARTING = Health(state="starting", restarts=0, last_death=None, pid=None, rss=None, uptime=None)


class PooledBackend:
    """An engine in a process of its own that is started with the first request. Until then everything that is
    asked of it waits for that; nothing that only looks starts it.

    Always holds: one start at a time; one that failed is tried again with the next request.
    """

    def __init__(
        self, open_backend: Callable[[], RemoteBackend], failed: Callable[[Exception], None]
    ) -> None:
        """`failed` is told of a first start that came to nothing."""
        self._open_backend = open_backend
        self._failed = failed
        self._changed = threading.Condition()
        self._remote: RemoteBackend | None = None
        self._opening: threading.Thread | None = None
        self._error: Exception | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def remote(self) -> RemoteBackend | None:
        """The process's backend, once it was loaded for the first time."""
        return self._remote

    @property
    def model(self) -> Tokenizer:
        return self._loaded().model

    @property
    def cache(self) -> PrefixCacheCalls:
        return self._loaded().cache

    @property
    def n_ctx(self) -> int:
        return self._loaded().n_ctx

    @property
    def slots(self) -> int:
        return self._loaded().slots

    @property
    def exact(self) -> bool:
        return self._loaded().exact

    @property
    def load(self) -> tuple[int, int]:
        return (0, 0) if self._remote is None else self._remote.load

    @property
    def events(self) -> EventHub:
        return self._loaded().events

    def submit(self, request: Request) -> OutputQueue:
        return self._loaded().submit(request)

    def embed(self, texts: Sequence[Tokens], adapters: Scales | None = None) -> EmbeddingFuture:
        return self._loaded().embed(texts, adapters)

    def embedding_width(self) -> int:
        return self._loaded().embedding_width()

    def second_opening(self, adapters: Scales | None) -> SecondOpening:
        return self._loaded().second_opening(adapters)

    def health(self) -> Health:
        if self._remote is not None:
            return self._remote.health()
        return _UNLOADED if self._opening is None else _STARTING

    def attach_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Have what the engine says read in that event loop, from when there is one."""
        with self._changed:
            self._loop = loop
            if self._remote is not None:
                self._remote.attach_loop(loop)

    def start(self) -> None:
        """Have it loaded, without waiting for that."""
        with self._changed:
            if self._closed:
                raise ClosedError("this runtime is closed")
            if self._remote is not None:
                self._remote.load_again()
            elif self._opening is None:
                self._error = None
                self._opening = threading.Thread(target=self._open, name="perdure-open", daemon=True)
                self._opening.start()

    def unload(self) -> bool:
        """Let the process go. False where there is none, or somebody waits for it."""
        return self._remote is not None and self._remote.unload()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            opening = self._opening
        if opening is not None:
            opening.join()
        if self._remote is not None:
            self._remote.close()

    def _loaded(self) -> RemoteBackend:
        if (remote := self._remote) is not None:
            return remote
        self.start()
        with self._changed:
            self._changed.wait_for(lambda: self._opening is None)
            if (remote := self._remote) is None:
                raise self._error or ClosedError("this runtime is closed")
            return remote

    def _open(self) -> None:
        error: Exception | None = None
        try:
            remote = self._open_backend()
        except Exception as caught:
            error = caught
        with self._changed:
            self._opening = None
            if error is None:
                self._remote = remote
                if self._loop is not None and not self._closed:
                    remote.attach_loop(self._loop)
            self._error = error
            self._changed.notify_all()
        if error is not None:
            self._failed(error)
