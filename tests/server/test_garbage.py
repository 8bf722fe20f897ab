"""What a request leaves is freed with it, so that the garbage collector finds nothing to do: with hundreds of
requests it holds every thread up for 0.1 s and more."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

from perdure.server.core.keys import Keys, new_key
from perdure.testing.toy import ToyModel
from server.live_server import LiveServer, live_server, opened

ROUNDS = 5
OURS = ("perdure.", "uvicorn.", "starlette.", "fastapi.", "h11.")


def ask(server: LiveServer, secret: str, method: str, path: str, body: object = None) -> None:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.netloc, timeout=30)
    connection.request(
        method,
        path,
        None if body is None else json.dumps(body),
        {"authorization": f"Bearer {secret}", "content-type": "application/json"},
    )
    answer = connection.getresponse()
    answer.read()
    assert answer.status < 300, (path, answer.status)
    connection.close()


def leave(server: LiveServer, secret: str, body: object) -> None:
    """Ask for a stream, and leave with its first bytes."""
    address, text = urlsplit(server.url), json.dumps(body)
    with socket.create_connection((address.hostname, address.port or 80), timeout=30) as connection:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer {secret}"
        )
        head += f"\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        connection.sendall((head + text).encode())
        assert connection.recv(1)


def test_requests_leave_no_garbage(tmp_path: Path) -> None:
    secret, key = new_key("ada")
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    with (
        opened(ToyModel(reply_tokens=6), n_ctx=1024, store=tmp_path) as rt,
        live_server(rt, keys=Keys([key])) as server,
    ):

        def everything(count: int) -> None:
            for at in range(count):
                ask(server, secret, "GET", "/health")
                ask(server, secret, "POST", "/v1/chat/completions", chat)
                ask(server, secret, "POST", "/v1/chat/completions", chat | {"stream": True})
                leave(server, secret, chat | {"stream": True, "max_tokens": 400})
                name = f"s-{count}-{at}"
                ask(server, secret, "POST", "/v1/sessions", {"name": name})
                ask(server, secret, "POST", f"/v1/sessions/{name}/turns", {"message": "Hi", "stream": True})
                ask(server, secret, "GET", "/v1/sessions?text=Hi")
            # Those that left are noticed.
            time.sleep(0.5)

        everything(2)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            everything(ROUNDS)
            gc.collect()
        finally:
            gc.set_debug(0)
            gc.enable()
            left = Counter(f"{type(each).__module__}.{type(each).__name__}" for each in gc.garbage)
            gc.garbage.clear()
    # A single object may be of another thread's work in this moment; one a request is not.
    assert {name: n for name, n in left.items() if name.startswith(OURS) and n >= ROUNDS} == {}
