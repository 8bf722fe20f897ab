"""While a long prompt is read, every protocol hears of it, and a retry goes on where the first one was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from decode.observed import Turnstile, open_toy
from server.live_server import LiveServer, live_server

LONG = "A long story of many words. " * 60
Figures = dict[str, int]


def data(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        text = line.removeprefix("data: ")
        if text.startswith("{"):
            yield json.loads(text)


def in_chat(event: dict[str, Any]) -> Figures | None:
    [choice] = event["choices"]
    if choice["delta"] or choice["finish_reason"]:
        return None
    return event["prompt_progress"]  # type: ignore[no-any-return]


def in_responses(event: dict[str, Any]) -> Figures | None:
    if event["type"] != "response.in_progress":
        return None
    assert event["sequence_number"] == 1
    return event.get("prompt_progress")


def in_messages(event: dict[str, Any]) -> Figures | None:
    return event.get("prompt_progress") if event["type"] == "ping" else None


def in_ollama(event: dict[str, Any]) -> Figures | None:
    if event["done"] or event["message"]["content"]:
        return None
    return event["prompt_progress"]  # type: ignore[no-any-return]


SAID = [{"role": "user", "content": LONG}]
PROTOCOLS: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Any]], Figures | None]]] = {
    "chat": ("/v1/chat/completions", {"messages": SAID, "max_tokens": 2, "stream": True}, in_chat),
    "responses": ("/v1/responses", {"input": LONG, "max_output_tokens": 2, "stream": True}, in_responses),
    "messages": ("/v1/messages", {"messages": SAID, "max_tokens": 2, "stream": True}, in_messages),
    "ollama": ("/api/chat", {"messages": SAID, "options": {"num_predict": 2}}, in_ollama),
}


def told(events: Iterator[dict[str, Any]], figures: Callable[[dict[str, Any]], Figures | None]) -> Figures:
    """What the first sign of life says that tells of progress."""
    for event in events:
        found = figures(event)
        if found is not None and found["processed"]:
            return found
    raise AssertionError("the stream ended without a sign of life")


@pytest.fixture
def gate() -> Turnstile:
    return Turnstile()


@pytest.fixture
def server(gate: Turnstile) -> Iterator[LiveServer]:
    with open_toy(gate=gate, n_ctx=4096) as rt, live_server(rt, silent_seconds=0.05) as server:
        yield server
        gate.open()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_it_is_told_how_far_a_prompt_is_read(protocol: str, server: LiveServer, gate: Turnstile) -> None:
    path, body, figures = PROTOCOLS[protocol]
    with server.client() as client, client.stream("POST", path, json=body) as response:
        events = data(response)
        gate.pass_through(1000)
        found = told(events, figures)
        assert 0 < found["processed"] < found["total"]
        gate.open()
        assert list(events), "the stream goes on to its end"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_retry_goes_on_where_the_first_one_was(protocol: str, server: LiveServer, gate: Turnstile) -> None:
    path, body, figures = PROTOCOLS[protocol]
    with server.client() as client:
        with client.stream("POST", path, json=body) as response:
            gate.pass_through(1000)
            read = told(data(response), figures)["processed"]
        gate.open()
        again = client.post(path, json={**body, "stream": False}).json()
        assert cached(protocol, again) >= read


def cached(protocol: str, answer: dict[str, Any]) -> int:
    if protocol == "chat":
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    if protocol == "responses":
        return int(answer["usage"]["input_tokens_details"]["cached_tokens"])
    if protocol == "messages":
        return int(answer["usage"]["cache_read_input_tokens"])
    return sum(answer["perdure"]["reuse"]["tiers"].values())


def test_a_websocket_hears_of_it_too(server: LiveServer, gate: Turnstile) -> None:
    asked = {"type": "response.create", "model": "toy", "input": LONG, "max_output_tokens": 2}
    with connect(f"ws{server.url.removeprefix('http')}/v1/responses") as socket:
        socket.send(json.dumps(asked))
        gate.pass_through(1000)
        found = told(map(json.loads, socket), in_responses)
        assert 0 < found["processed"] < found["total"]
        gate.open()
        # It is drawn, so it may also end by itself.
        while json.loads(socket.recv(timeout=60))["type"] not in (
            "response.incomplete",
            "response.completed",
        ):
            pass


def test_a_completion_hears_that_it_goes_on(server: LiveServer, gate: Turnstile) -> None:
    body = {"prompt": LONG, "max_tokens": 2, "stream": True, "temperature": 0}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        events = data(response)
        assert next(events)["choices"][0]["text"] == ""
        gate.open()
        assert list(events)[-1]["choices"][0]["finish_reason"] in ("length", "stop")
