"""A server that runs while a test does, and ways to talk to it."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

import perdure
from perdure import Runtime
from perdure.server.core.keys import Keys
from perdure.server.core.server_state import ServerState
from perdure.server.core.settings import Limits, ReplyDefaults
from perdure.server.http_server import HttpServer, address, bind

PATIENCE = 60.0
"""Seconds after which a test that waits has failed. None is meant to wait so long."""


@dataclass(frozen=True)
class LiveServer:
    """A server with its runtime, as a test sees them."""

    url: str
    runtime: Runtime
    state: ServerState
    http_server: HttpServer

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE, trust_env=False)

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)


@contextmanager
def live_server(runtime: Runtime, *, keys: Keys | None = None, **settings: Any) -> Iterator[LiveServer]:
    """A server on a runtime, in a thread. Limits may be given by themselves. With `PERDURE_TEST_SETTLE`, a
    number of tokens, it settles, unless the test says otherwise."""
    names = Limits.__dataclass_fields__
    if settle := os.environ.get("PERDURE_TEST_SETTLE"):
        settings.setdefault("defaults", ReplyDefaults(settle=int(settle)))
    limits = Limits(**{name: settings.pop(name) for name in list(settings) if name in names})
    state = ServerState(
        runtime=runtime, limits=limits, keys=keys or Keys(), **{"debug": True, "name": "toy", **settings}
    )
    listening = bind("127.0.0.1", 0)
    listening.listen(1024)
    http_server = HttpServer(state)
    thread = threading.Thread(target=http_server.run, kwargs={"sockets": [listening]}, name="server")
    thread.start()
    try:
        yield LiveServer(address(listening), runtime, state, http_server)
    finally:
        http_server.stop(now=True)
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server did not stop"
        watch = http_server.loop_watch
        assert watch is None or not watch.refused, "something waited on the event loop"
        assert watch is None or not watch.held, f"the event loop was held: {watch.held[0]}"


@contextmanager
def opened(model: Any, **settings: Any) -> Iterator[Runtime]:
    with perdure.open(model, **{"n_ctx": 512, "slots": 2, **settings}) as runtime:
        yield runtime


def check_freed(runtime: Runtime) -> None:
    """The engine is between two steps, and nobody is served. One that is held in a step changes nothing."""
    asking = threading.Thread(target=runtime.cache.clear, args=(["nobody's"],), daemon=True)
    asking.start()
    asking.join(PATIENCE)
    assert not asking.is_alive(), "the engine is still in a step"
    assert runtime.load == (0, 0)


def hello(**more: Any) -> dict[str, Any]:
    """A request for a short chat."""
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0, **more}


def events(response: httpx.Response) -> Iterator[dict[str, Any] | str]:
    """The chunks of a stream, and at last the text `[DONE]`."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line[6:]
            yield data if data == "[DONE]" else json.loads(data)


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All chunks of a stream that ends as it should."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, end = events(response)
    assert end == "[DONE]"
    assert all(isinstance(chunk, dict) for chunk in chunks)
    return chunks  # type: ignore[return-value]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks
        for choice in chunk.get("choices", ())
        if choice["index"] == index
    )


def raw(path: str, body: bytes, **headers: str) -> bytes:
    """A request as bytes."""
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if "content_length" not in headers:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
