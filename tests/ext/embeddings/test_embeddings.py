"""`/v1/embeddings` over real sockets."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from decode.observed import Turnstile, open_toy, toy
from inside import inside
from perdure import Runtime
from perdure.engine.embedder import CHUNK
from perdure.testing.toy import Faults
from perdure.testing.toy.faults import PlannedFault
from server.live_server import LiveServer, check_freed, hello, live_server, opened, raw
from server.test_deaths import SWIFT, kill

EMBED = "/v1/embeddings"
CHAT = "/v1/chat/completions"
LONG = "word " * 40


def vectors(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return np.array([each["embedding"] for each in response.json()["data"]], np.float32)


def test_vectors_are_those_of_the_library(here: LiveServer, client: httpx.Client) -> None:
    texts = ["one", "two two", "three"]
    expected = here.runtime.embed(texts)
    response = client.post(EMBED, json={"input": texts})
    np.testing.assert_array_equal(vectors(response), expected.vectors)
    answer = response.json()
    assert answer["object"] == "list"
    assert answer["model"] == "toy"
    assert [(each["object"], each["index"]) for each in answer["data"]] == [
        ("embedding", at) for at in range(3)
    ]
    used = sum(expected.tokens)
    assert answer["usage"] == {"prompt_tokens": used, "total_tokens": used}


def test_an_input_has_four_shapes(here: LiveServer, client: httpx.Client) -> None:
    texts = ["one", "two two"]
    tokens = [here.runtime.model.tokenize(text) for text in texts]
    both = vectors(client.post(EMBED, json={"input": texts}))
    np.testing.assert_array_equal(vectors(client.post(EMBED, json={"input": tokens})), both)
    for one in (texts[0], tokens[0]):
        np.testing.assert_array_equal(vectors(client.post(EMBED, json={"input": one})), both[:1])


def test_base64_is_the_same_numbers(client: httpx.Client) -> None:
    plain = vectors(client.post(EMBED, json={"input": "one", "encoding_format": "float"}))
    packed = client.post(EMBED, json={"input": "one", "encoding_format": "base64"}).json()["data"][0]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed["embedding"]), "<f4"), plain[0])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": None}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 100_000}, "dimensions"),
        ({"input": [1, 2], "prefix": "query: "}, "input"),
    ],
)
def test_what_cannot_be_done_is_400(client: httpx.Client, change: dict[str, Any], param: str) -> None:
    response = client.post(EMBED, json=change)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert str(error["param"]).startswith(param)


def test_fewer_dimensions_are_the_first_ones_at_length_one(here: LiveServer, client: httpx.Client) -> None:
    (whole,) = vectors(client.post(EMBED, json={"input": "a"}))
    (short,) = vectors(client.post(EMBED, json={"input": "a", "dimensions": 4}))
    np.testing.assert_allclose(short, whole[:4] / np.linalg.norm(whole[:4]), atol=1e-6)
    np.testing.assert_array_equal(here.runtime.embed("a", dimensions=4).vectors[0], short)


def test_a_prefix_is_read_before_the_text(here: LiveServer, client: httpx.Client) -> None:
    found = vectors(client.post(EMBED, json={"input": ["a", "b"], "prefix": "query: "}))
    np.testing.assert_array_equal(found, here.runtime.embed(["query: a", "query: b"]).vectors)
    np.testing.assert_array_equal(found, here.runtime.embed(["a", "b"], prefix="query: ").vectors)


def test_dimensions_are_at_most_those_of_the_model(here: LiveServer, client: httpx.Client) -> None:
    width = here.runtime.embedding_width
    assert vectors(client.post(EMBED, json={"input": "a", "dimensions": width})).shape == (1, width)
    refused = client.post(EMBED, json={"input": "a", "dimensions": width + 1}).json()["error"]["message"]
    assert f"have {width}, {width + 1} were asked for" in refused


def test_a_text_that_does_not_fit_is_400_as_in_a_chat(here: LiveServer, client: httpx.Client) -> None:
    response = client.post(EMBED, json={"input": [[40], [40] * 513]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "text 1 has 513 tokens, 512 fit" in error["message"]


def test_embedded_tokens_are_counted(here: LiveServer, client: httpx.Client) -> None:
    def counted() -> float:
        lines = client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith('perdure_tokens_total{kind="embedded"}')]
        return float(found[0].split()[-1]) if found else 0.0

    before = counted()
    used = client.post(EMBED, json={"input": ["one", "two"]}).json()["usage"]["prompt_tokens"]
    assert counted() - before == used


# Failures.


@pytest.fixture
def gate() -> Turnstile:
    return Turnstile()


@pytest.fixture
def rt(gate: Turnstile) -> Iterator[Runtime]:
    with open_toy(gate=gate, slots=1, n_ctx=512, queue=0) as runtime:
        yield runtime


def test_a_client_that_leaves_ends_its_request(rt: Runtime, server: LiveServer, gate: Turnstile) -> None:
    """After the chunk in which the engine is held; a hundred more wait."""
    with server.connect() as connection:
        connection.sendall(raw(EMBED, json.dumps({"input": [LONG] * 100}).encode()))
        assert gate.reached.wait(60)
        [task] = inside(rt).embeddings._tasks
    with pytest.raises(CancelledError):
        task.answer.result(60)
    gate.admit(CHUNK)
    check_freed(rt)
    gate.open()
    with server.client() as client:
        assert client.post(EMBED, json={"input": "one"}).status_code == 200
        assert 'status="499"' in client.get("/metrics").text


def test_a_full_queue_is_429(rt: Runtime, server: LiveServer, gate: Turnstile) -> None:
    served = rt.submit_embed("first")
    with server.client() as client:
        response = client.post(EMBED, json={"input": "second"})
        assert response.status_code == 429
        assert response.headers["retry-after"]
        gate.open()
        served.result(60)
        assert client.post(EMBED, json={"input": "second"}).status_code == 200


def test_not_finished_in_time_is_504() -> None:
    with (
        opened(toy(faults=Faults(pace=0.005)), slots=1) as rt,
        live_server(rt, request_seconds=0.2) as server,
        server.client() as client,
    ):
        response = client.post(EMBED, json={"input": [LONG] * 50})
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        check_freed(rt)


def test_a_failure_of_the_engine_is_503() -> None:
    faults = Faults(decodes={1: PlannedFault()})
    with opened(toy(faults=faults), slots=1) as rt, live_server(rt) as server, server.client() as client:
        response = client.post(EMBED, json={"input": "one"})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_unavailable"
        assert client.post(EMBED, json={"input": "one"}).status_code == 200


def test_a_server_that_stops_says_so(rt: Runtime, server: LiveServer, gate: Turnstile) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        with server.client() as client:
            answers.append(client.post(EMBED, json={"input": [LONG] * 100}))

    asking = threading.Thread(target=ask)
    asking.start()
    assert gate.reached.wait(60)
    server.state.end()
    asking.join(60)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "stopping"


def test_a_death_of_the_engine_is_not_seen(zoo_path: Callable[[str], Path]) -> None:
    with (
        opened(zoo_path("llama"), threads=1, isolated=SWIFT) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        before = vectors(client.post(EMBED, json={"input": "one"}))
        kill(rt)
        np.testing.assert_array_equal(vectors(client.post(EMBED, json={"input": "one"})), before)
        assert client.post(CHAT, json=hello()).status_code == 200
