"""A WebSocket for as long as its client wants it, and for no more than a request may cost."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from decode.observed import Turnstile, toy
from perdure.ext.responses.requests import ResponseRequest
from perdure.ext.responses.websocket import Remembered, RememberedItems
from perdure.testing.toy import ToyModel
from server.live_server import PATIENCE, LiveServer, hello, live_server, opened

ENDS = {"response.completed", "response.incomplete", "response.failed", "error"}


def connected(server: LiveServer) -> ClientConnection:
    return connect(f"ws{server.url.removeprefix('http')}/v1/responses", close_timeout=0.1, max_size=None)


def respond(socket: ClientConnection, **fields: Any) -> dict[str, Any]:
    """The last event of a response."""
    socket.send(json.dumps({"type": "response.create", "max_output_tokens": 2, **fields}))
    while (event := json.loads(socket.recv(timeout=PATIENCE)))["type"] not in ENDS:
        pass
    return event  # type: ignore[no-any-return]


def test_a_connection_outlasts_the_time_for_headers_x8() -> None:
    """X8: an hour in small. The timer for late headers is that of the connection before its upgrade."""
    seconds = 0.2
    with (
        opened(ToyModel()) as runtime,
        live_server(runtime, head_seconds=seconds) as server,
        connected(server) as socket,
    ):
        until = time.monotonic() + 5 * seconds
        while time.monotonic() < until:
            assert respond(socket, input="Hi")["type"] != "error"


def test_a_response_over_a_websocket_is_a_request_in_flight_x13() -> None:
    gate = Turnstile()
    with (
        opened(toy(gate=gate), n_ctx=1024) as runtime,
        live_server(runtime, requests=1) as server,
        connected(server) as socket,
        connected(server) as other,
        server.client() as client,
    ):
        # A connection by itself is none.
        assert client.get("/health").status_code == 200
        socket.send(json.dumps({"type": "response.create", "input": "Hi", "max_output_tokens": 2}))
        assert gate.reached.wait(PATIENCE)
        refused = client.post("/v1/chat/completions", json=hello())
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        error = respond(other, input="Hi")
        assert (error["status"], error["error"]["code"]) == (429, "too_many_requests")
        gate.open()
        while json.loads(socket.recv(timeout=PATIENCE))["type"] not in ENDS:
            pass
        # Its place is free a moment after its last event.
        ends = time.monotonic() + PATIENCE
        while (last := respond(other, input="Hi"))["type"] == "error":
            assert (last["status"], time.monotonic() < ends) == (429, True)
        assert last["type"] in ENDS


def test_what_a_connection_remembers_is_no_larger_than_a_body_x13() -> None:
    """X13: a conversation that is not stored grows until it is as long as a request may be."""
    limit, size = 4096, 500
    with (
        opened(ToyModel(), n_ctx=8192) as runtime,
        live_server(runtime, body_bytes=limit) as server,
        connected(server) as socket,
    ):
        previous: dict[str, str] = {}
        for _ in range(limit // size):
            event = respond(socket, input="word " * 100, store=False, **previous)
            if event["type"] == "error":
                break
            previous = {"previous_response_id": event["response"]["id"]}
        assert (event["status"], event["error"]["code"]) == (413, "body_too_large")
        # The connection, and another conversation in it, go on.
        assert respond(socket, input="Hi", store=False)["type"] in ENDS - {"error"}


def test_a_binary_message_is_answered_by_an_error_and_a_close_frame_y27() -> None:
    """Y27: the client learns what was wrong. The response before it is not disturbed."""
    with opened(ToyModel()) as runtime, live_server(runtime) as server, connected(server) as socket:
        assert respond(socket, input="Hi", store=False)["type"] in ENDS - {"error"}
        socket.send(b"\x00\x01")
        event = json.loads(socket.recv(timeout=PATIENCE))
        assert (event["type"], event["status"]) == ("error", 400)
        assert "binary" in event["error"]["message"]
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=PATIENCE)
        assert socket.close_code == 1003


def test_the_oldest_is_forgotten_first_x13() -> None:
    remembered = Remembered()
    for number in range(20):
        remembered.add(str(number), RememberedItems([{"n": number}], 10), limit=50)
    known = [number for number in range(20) if remembered.get(str(number)) is not None]
    assert known == [15, 16, 17, 18, 19]
    remembered.add("large", RememberedItems([], 51), limit=50)
    assert remembered.get("large") is None
    assert remembered.get("19") is None


def test_a_message_is_read_off_the_event_loop_x13(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    validate = ResponseRequest.model_validate

    def noting(fields: Any) -> ResponseRequest:
        threads.append(threading.current_thread().name)
        return validate(fields)

    monkeypatch.setattr(ResponseRequest, "model_validate", noting)
    with opened(ToyModel()) as runtime, live_server(runtime) as server, connected(server) as socket:
        respond(socket, input="Hi", store=False)
    # The thread of the event loop is the one that the test started.
    assert threads
    assert "server" not in threads
