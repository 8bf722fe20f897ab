"""llama-server's small routes, and requests that are cancelled by their id."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from decode.observed import Turnstile, open_toy
from perdure.server.core.keys import Keys, new_key
from server.live_server import LiveServer, live_server

SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture
def gate() -> Turnstile:
    return Turnstile(is_open=True)


@pytest.fixture
def server(gate: Turnstile) -> Iterator[LiveServer]:
    with open_toy(gate=gate, n_ctx=4096, slots=2) as rt, live_server(rt) as server:
        yield server
        gate.open()


def test_a_client_that_probes_finds_llama_servers_routes(server: LiveServer) -> None:
    with server.client() as client:
        props = client.get("/props").json()
        assert props["default_generation_settings"]["n_ctx"] == 4096
        assert props["total_slots"] == 2
        assert [slot["is_processing"] for slot in client.get("/slots").json()] == [False, False]
        tokens = client.post("/tokenize", json={"content": "Hello, wörld"}).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": "Hello, wörld"}


def test_a_template_is_applied_as_a_chat_would_have_it(server: LiveServer) -> None:
    with server.client() as client:
        prompt = client.post("/apply-template", json={"messages": SAID}).json()["prompt"]
        assert "Be brief." in prompt
        assert "Hello" in prompt
        count = len(client.post("/tokenize", json={"content": prompt, "special": True}).json()["tokens"])
        answer = client.post("/v1/chat/completions", json={"messages": SAID, "max_tokens": 1}).json()
        assert answer["usage"]["prompt_tokens"] == count


def test_what_is_wrong_is_refused(server: LiveServer) -> None:
    with server.client() as client:
        assert client.post("/apply-template", json={"messages": []}).status_code == 400


PROTOCOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": SAID, "max_tokens": 50}),
    "messages": ("/v1/messages", {"messages": SAID[1:], "max_tokens": 50}),
    "ollama": ("/api/chat", {"messages": SAID, "stream": False, "options": {"num_predict": 50}}),
    "completions": ("/v1/completions", {"prompt": "Hello", "max_tokens": 50}),
}


@pytest.mark.parametrize(
    "protocol",
    [
        pytest.param(each, marks=pytest.mark.extension(each)) if each in ("ollama", "completions") else each
        for each in PROTOCOLS
    ],
)
def test_a_request_is_cancelled_by_the_id_that_its_client_gave(
    protocol: str, server: LiveServer, gate: Turnstile
) -> None:
    """H7: its client gets what there is, and its slot is free."""
    path, body = PROTOCOLS[protocol]
    gate.shut()
    answers: list[httpx.Response] = []

    def ask() -> None:
        with server.client() as client:
            answers.append(client.post(path, json=body, headers={"x-request-id": "mine-1"}))

    asking = threading.Thread(target=ask)
    asking.start()
    gate.reached.wait(30)
    with server.client() as client:
        assert client.post("/v1/requests/another/cancel", json={}).status_code == 404
        cancelled = client.post("/v1/requests/mine-1/cancel", json={})
        assert cancelled.json() == {"object": "request.cancelled", "id": "mine-1", "replies": 1}
        asking.join(30)
        assert not asking.is_alive()
        assert answers[0].status_code == 200
        assert answers[0].headers["x-request-id"] == "mine-1"
        assert client.post("/v1/requests/mine-1/cancel", json={}).status_code == 404
        gate.open()
        assert [slot["is_processing"] for slot in client.get("/slots").json()] == [False, False]


def test_nobody_cancels_or_looks_into_the_request_of_another() -> None:
    """H5: an id is of one namespace."""
    gate = Turnstile()
    made = [new_key(name) for name in ("alice", "bob")]
    with (
        open_toy(gate=gate, n_ctx=4096, slots=2) as rt,
        live_server(rt, keys=Keys([key for _, key in made])) as server,
        server.client(made[0][0]) as alice,
        server.client(made[1][0]) as bob,
    ):
        path, body = PROTOCOLS["chat"]
        asking = threading.Thread(
            target=lambda: alice.post(path, json=body, headers={"x-request-id": "mine-1"})
        )
        asking.start()
        gate.reached.wait(30)
        try:
            check(bob)
        finally:
            gate.open()
            asking.join(30)


def check(bob: httpx.Client) -> None:
    assert bob.post("/v1/requests/mine-1/cancel", json={}).status_code == 404
    assert [slot["n_past"] for slot in bob.get("/slots").json()] == [None, None]
