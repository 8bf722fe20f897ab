"""Adapters over HTTP: by the names that the operator allowed, and as names of models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import perdure
from perdure.testing.toy import ToyModel

from .live_server import LiveServer, live_server

NAMES = {"pirate": "p.gguf", "judge": "j.gguf"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with (
        perdure.open(ToyModel(), n_ctx=1024, slots=2, adapter_names=NAMES) as runtime,
        live_server(runtime, adapters={"pirate": 1.0, "judge": 0.5}) as live,
    ):
        yield live


def chat(client: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 12,
        "temperature": 0,
        **fields,
    }
    return client.post("/v1/chat/completions", json=body)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_a_model_with_an_adapter_is_a_model(server: LiveServer) -> None:
    with server.client() as client:
        names = [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert names == ["toy", "toy:pirate", "toy:judge"]
        assert client.get("/v1/models/toy:pirate").json()["id"] == "toy:pirate"
        shown = [each["adapter"] for each in client.get("/v1/models").json()["data"]]
        assert shown == [None, {"name": "pirate", "scale": 1.0}, {"name": "judge", "scale": 0.5}]
        replies = {name: text(chat(client, name)) for name in names}
        assert len(set(replies.values())) == 3
        # The same by its name, at the scale that the operator chose and at another.
        assert text(chat(client, "toy", perdure={"adapters": {"judge": 0.5}})) == replies["toy:judge"]
        assert text(chat(client, "toy:pirate", perdure={"adapters": {}})) == replies["toy"]
        assert text(chat(client, "toy", perdure={"adapters": {"judge": 1.0}})) not in replies.values()


def test_h8_every_protocol_knows_the_names(server: LiveServer) -> None:
    """H8: the same adapter, whatever protocol a client speaks."""
    said = [{"role": "user", "content": "Hello"}]
    with server.client() as client:
        expected = text(chat(client, "toy:pirate"))
        answer = client.post(
            "/v1/messages",
            json={"model": "toy:pirate", "messages": said, "max_tokens": 12, "temperature": 0},
        )
        assert answer.json()["content"][0]["text"] == expected
        answer = client.post(
            "/v1/responses",
            json={"model": "toy:pirate", "input": "Hello", "max_output_tokens": 12, "temperature": 0},
        )
        assert answer.json()["output"][-1]["content"][0]["text"] == expected
        options = {"temperature": 0, "num_predict": 12}
        answer = client.post(
            "/api/chat", json={"model": "toy:pirate", "messages": said, "stream": False, "options": options}
        )
        assert answer.json()["message"]["content"] == expected
        one, other = (
            client.post("/v1/completions", json={"model": name, "prompt": "Once", "temperature": 0}).json()
            for name in ("toy", "toy:pirate")
        )
        assert one["choices"][0]["text"] != other["choices"][0]["text"]


@pytest.mark.parametrize("name", ["toy:other", "other:pirate", "toy:p.gguf", ":", "toy:pirate:judge"])
def test_an_unknown_adapter_is_not_found(server: LiveServer, name: str) -> None:
    with server.client() as client:
        assert chat(client, name).status_code == 404
        assert client.get(f"/v1/models/{name}").status_code == 404


@pytest.mark.parametrize(
    ("adapters", "status"),
    [
        ({"other": 1.0}, 404),
        # I1: no file is read for a client, not even one that the operator named.
        ({"p.gguf": 1.0}, 404),
        ({"/etc/passwd": 1.0}, 404),
        ({"../p.gguf@1-2": 1.0}, 404),
        ({"pirate": "1"}, 422),
        ({"pirate": 1e9}, 422),
        (["pirate"], 422),
        ({str(number): 1.0 for number in range(65)}, 422),
    ],
)
def test_i1_what_a_client_names_is_known_or_refused(server: LiveServer, adapters: Any, status: int) -> None:
    with server.client() as client:
        answer = chat(client, "toy", perdure={"adapters": adapters})
        assert answer.status_code in (status, 400 if status == 422 else status), answer.text
        assert "error" in answer.json()
        assert text(chat(client, "toy"))


def test_h8_vectors_are_those_of_the_adapter_that_is_named(server: LiveServer) -> None:
    with server.client() as client:

        def vectors(model: str) -> list[Any]:
            body = {"model": model, "input": "Hello"}
            answer = client.post("/v1/embeddings", json=body)
            assert answer.status_code == 200, answer.text
            ollama = client.post("/api/embed", json=body).json()["embeddings"][0]
            old = client.post("/api/embeddings", json={"model": model, "prompt": "Hello"}).json()["embedding"]
            assert ollama == old == answer.json()["data"][0]["embedding"]
            return list(ollama)

        assert len({tuple(vectors(name)) for name in ("toy", "toy:pirate", "toy:judge")}) == 3
        body = {"query": "Hello", "documents": ["one", "two"]}
        scores = [
            client.post("/v1/rerank", json={**body, "model": name}).json()["results"]
            for name in ("toy", "toy:pirate")
        ]
        assert scores[0] != scores[1]
        assert client.post("/v1/embeddings", json={"model": "toy:other", "input": "x"}).status_code == 404
