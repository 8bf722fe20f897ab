"""A replica: a runtime and its routes, without a socket. It reports to the router what is warm.

It knows nothing of Ray: `application.py` makes an actor of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from filelock import FileLock, Timeout
from starlette.types import Message, Scope

from perdure import Event, Runtime
from perdure.ext.cluster.postgres.place import parse_place
from perdure.ext.cluster.ray.config import ClusterConfig
from perdure.ext.cluster.ray.policy import ReplicaFacts, RoutedRequest, WarmMarks
from perdure.spi.base import make_folder
from perdure.spi.engine import registry
from perdure.spi.models import finder
from perdure.spi.runtime import BlocksStored, ChunkRead, Woken, opening
from perdure.spi.server import Keys, ServerState, served

log = logging.getLogger("perdure.server")

_MOST_REPLICAS = 1024
"""Of one machine."""
_WEIGHT = 0.2
"""Of the latest measurement in an average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCall:
    """A request as it travels to a replica."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    ask: RoutedRequest
    client: tuple[str, int] | None = None
    scheme: str = "http"


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of an answer; its body follows as bytes."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


class OwnFolder:
    """A folder of this machine that no other replica has while this one lives. The first that is free is
    taken, so that a replica that is started again finds the state of one that ended."""

    def __init__(self, store: str, folder: str = "") -> None:
        base = Path(folder) if folder else parse_place(store).folder
        make_folder(base)
        for number in range(_MOST_REPLICAS):
            lock = FileLock(base / f"replica-{number}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            self._lock = lock
            self.path = base / f"replica-{number}"
            make_folder(self.path)
            break
        else:
            raise RuntimeError(f"{base} has {_MOST_REPLICAS} replicas already")
        parts = urlsplit(store)
        query = {**dict(parse_qsl(parts.query, keep_blank_values=True)), "folder": str(self.path)}
        self.store = urlunsplit(parts._replace(query=urlencode(query)))

    def release(self) -> None:
        self._lock.release()


class Replica:
    """Answers requests with one runtime, and keeps count of what is warm. For one event loop."""

    def __init__(self, server_state: ServerState, *, capacity: int | None = None) -> None:
        """`capacity` are the tokens whose state it has at hand; else by its slots and its memory."""
        self.state = server_state
        runtime = server_state.models.first.runtime
        self._app = served(server_state)
        self._warm = WarmMarks(capacity or max(1, runtime.n_ctx * runtime.slots))
        self._measures = capacity is None
        self._budget = runtime.cache.stats().budget if self._measures else 0
        self._seconds: float | None = None
        self._rates: dict[str, float] = {}
        self._answering = 0
        self.reused = self.computed = 0
        """Tokens of prompts, so far."""
        self._watching = runtime.observe(self._happened, ("ChunkRead", "Woken", "BlocksStored"))

    def facts(self) -> ReplicaFacts:
        waiting, running = self.state.models.first.runtime.load
        speeds: dict[str, float] = {}
        if self._seconds is not None:
            speeds["seconds"] = self._seconds
        if self._rates:
            speeds["rate"] = max(self._rates.values())
        return ReplicaFacts(
            marks=self._warm.latest(),
            queue=max(waiting + running, self._answering),
            slots=self.state.models.first.runtime.slots,
            full=self._warm.full(time.monotonic()),
            draining=self.state.draining,
            **speeds,
        )

    async def answer(self, call: ReplicaCall) -> AsyncIterator[Head | bytes]:
        """The answer to a request, piece by piece. A client that stops reading it has left."""
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": call.method,
            "scheme": call.scheme,
            "path": call.path,
            "raw_path": call.path.encode(),
            "query_string": call.query,
            "root_path": "",
            "headers": list(call.headers),
            "client": call.client,
            "server": None,
            "state": {},
        }
        left, body_sent = asyncio.Event(), False
        # One piece may wait: a client that reads slowly slows its reply, and nothing is piled up.
        pieces: asyncio.Queue[Head | bytes | None] = asyncio.Queue(1)

        async def receive() -> Message:
            nonlocal body_sent
            if not body_sent:
                body_sent = True
                return {"type": "http.request", "body": call.body, "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                await pieces.put(Head(message["status"], tuple(map(tuple, message["headers"]))))
            elif message["type"] == "http.response.body" and message.get("body"):
                await pieces.put(bytes(message["body"]))

        async def run() -> None:
            try:
                await self._app(scope, receive, send)
            finally:
                await pieces.put(None)

        began = time.monotonic()
        self._answering += 1
        running = asyncio.create_task(run())
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await running
            self._answered(call.ask, scope["state"].get("notes", {}), time.monotonic() - began)
        finally:
            self._answering -= 1
            left.set()
            if not running.done():
                # Nobody reads what it still sends; it ends by itself once it knows that its client left.
                drain = asyncio.create_task(_read_out(pieces))
                with contextlib.suppress(Exception):
                    await asyncio.wait({running, drain}, timeout=5)
                running.cancel()
                drain.cancel()

    def _answered(self, ask: RoutedRequest, notes: dict[str, Any], seconds: float) -> None:
        prompt, reply = int(notes.get("prompt_tokens", 0)), int(notes.get("completion_tokens", 0))
        if not prompt:
            return
        cached = int(notes.get("cached_tokens", 0))
        self.reused += cached
        self.computed += prompt - cached
        self._warm.answered(ask, prompt + reply, time.monotonic())
        self._seconds = _averaged(self._seconds, seconds)

    def _happened(self, event: Event) -> None:
        """Measure how fast state is had here, computed or read, and what a token of it takes. In a thread of
        its own."""
        if isinstance(event, BlocksStored) and self._measures and event.nbytes and event.tokens:
            runtime = self.state.models.first.runtime
            in_memory = self._budget * event.tokens // event.nbytes
            self._warm.capacity = max(1, runtime.n_ctx * runtime.slots + in_memory)
        if isinstance(event, ChunkRead) and event.seconds > 0:
            self._rates["computed"] = _averaged(self._rates.get("computed"), event.tokens / event.seconds)
        elif isinstance(event, Woken) and event.seconds > 0:
            read = sum(event.tiers.values())
            if read and not event.computed:
                self._rates["read"] = _averaged(self._rates.get("read"), read / event.seconds)

    def drain(self) -> None:
        """Say that it takes its leave. Routers send nothing more."""
        self.state.draining = True

    def close(self) -> None:
        """Write all state where others can read it, and end. To be called when every reply is finished."""
        self.drain()
        self.state.end()
        self._watching.close()
        self.state.keys.usage.save()
        self.state.models.first.runtime.close()


OpenRuntime: TypeAlias = Callable[[ClusterConfig, str], tuple[Runtime, str]]
"""Opens the runtime of a replica on a store, and says what its model is called."""


def open_replica(config: ClusterConfig, store: str, open_runtime: OpenRuntime) -> Replica:
    """A replica as the config says, whose blocks are in the folder that `store` names."""
    keys = Keys.read(Path(config.keys)) if config.keys else Keys()
    runtime, label = open_runtime(config, store)
    try:
        names = finder().short_names(config.model) if config.model else ()
        return Replica(ServerState(runtime=runtime, name=label, short_names=names, keys=keys, hosts=None))
    except BaseException:
        runtime.close()
        raise


def usual_runtime(config: ClusterConfig, store: str) -> tuple[Runtime, str]:
    """A runtime with its engine in a child process: if that dies, it is restarted."""
    opener = registry.engine_for(config.model)
    source = opener.fetch(config.model)
    settings: dict[str, Any] = dict(config.engine)
    runtime = opening.open(source, store=store, blocks=config.blocks or None, isolated=True, **settings)
    return runtime, config.name or opener.label(source)


def _averaged(before: float | None, now: float) -> float:
    return now if before is None else (1 - _WEIGHT) * before + _WEIGHT * now


async def _read_out(pieces: asyncio.Queue[Head | bytes | None]) -> None:
    while await pieces.get() is not None:
        pass
