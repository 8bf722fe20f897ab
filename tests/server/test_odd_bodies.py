"""Bodies in which something is odd: each is answered or refused, never by 500, and leaves nothing behind."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from decode.observed import toy
from server.live_server import LiveServer, live_server, opened
from server.odd_values import BODIES, ODD, changed, odd_bodies, paths, written

JSON = {"content-type": "application/json"}
_FUNCTION = {"type": "function", "name": "f"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with opened(toy(), n_ctx=1024) as rt, live_server(rt) as server:
        yield server


def is_failure(answer: httpx.Response) -> bool:
    """A toy may have no summary to give."""
    return answer.status_code >= 500 and answer.json()["error"]["code"] != "empty"


def rows(server: LiveServer) -> int:
    return sum(size.sessions for size in server.runtime.sessions.store.sizes())


@pytest.mark.parametrize("protocol", BODIES)
def test_the_bodies_that_are_changed_are_good_ones(protocol: str, server: LiveServer) -> None:
    with server.client() as client:
        answer = client.post(protocol, content=written(BODIES[protocol]), headers=JSON)
        assert answer.status_code < 300 or protocol.endswith("compact"), answer.text


@pytest.mark.parametrize(
    ("protocol", "at", "odd"),
    [
        ("/api/chat", ("options", "seed"), float("inf")),
        ("/api/chat", ("options", "top_k"), float("nan")),
        ("/api/generate", ("options", "num_predict"), 10**400),
        ("/v1/messages", ("messages", 2, "content", 0, "content", 0, "type"), []),
        ("/v1/messages", ("messages", 2, "content", 0, "content", 0, "text"), {}),
        ("/v1/responses", ("input", 0, "content", 0, "type"), []),
        ("/v1/responses", ("input", 3, "output", 0, "type"), {}),
        ("/v1/responses", ("tool_choice", "tools", 0, "name"), [[]]),
        ("/v1/conversations", ("items", 0, "content"), [{"type": []}]),
    ],
)
def test_what_ended_in_500_is_refused_or_left_out_x15(
    protocol: str, at: tuple[Any, ...], odd: Any, server: LiveServer
) -> None:
    """X15: and it leaves nothing behind where it is refused."""
    before = rows(server)
    with server.client() as client:
        answer = client.post(protocol, content=written(changed(BODIES[protocol], at, odd)), headers=JSON)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert rows(server) == before


@pytest.mark.parametrize("protocol", BODIES)
def test_something_odd_in_any_place_is_no_500_x15(protocol: str, server: LiveServer) -> None:
    """X15: one odd value in each of some places; the soak has all values in all places."""
    chance = random.Random(protocol)
    places = list(paths(BODIES[protocol]))
    with server.client() as client:
        for at in chance.sample(places, min(24, len(places))):
            odd = chance.choice(ODD)
            answer = client.post(protocol, content=written(changed(BODIES[protocol], at, odd)), headers=JSON)
            assert not is_failure(answer), (at, odd, answer.text)


@pytest.mark.soak
@pytest.mark.parametrize("protocol", BODIES)
def test_everything_odd_in_every_place_is_no_500_x15(protocol: str, server: LiveServer) -> None:
    """X15: and what is refused leaves no row behind."""
    with server.client() as client:
        before = rows(server)
        for at, odd, body in odd_bodies(protocol):
            answer = client.post(protocol, content=body, headers=JSON)
            assert not is_failure(answer), (at, odd, answer.text)
            if answer.status_code >= 400:
                assert rows(server) == before, (at, odd)
            before = rows(server)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_only_utf8_is_read_x12(encoding: str, server: LiveServer) -> None:
    """X12: brackets of another encoding are not counted by the limits."""
    with server.client() as client:
        answer = client.post("/tokenize", content='{"content": "Hi"}'.encode(encoding), headers=JSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    with server.client() as client:
        answer = client.post("/tokenize", content='{"content": "Hi"}'.encode("utf-8-sig"), headers=JSON)
        assert answer.status_code == 200


@pytest.mark.extension("responses")
def test_a_response_is_read_once_however_many_of_its_items_are_named_x14(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X14."""
    from perdure.ext.responses.stored import StoredResponse

    read: list[str] = []
    input_items = StoredResponse.input_items

    def counted(self: StoredResponse) -> list[Any]:
        read.append(self.head.id)
        return input_items(self)

    said = [{"role": "user", "content": f"{number}"} for number in range(40)]
    with server.client() as client:
        first = client.post("/v1/responses", json={"input": said, "max_output_tokens": 1}).json()["id"]
        listed = client.get(f"/v1/responses/{first}/input_items", params={"limit": 100}).json()["data"]
        named = [{"type": "item_reference", "id": item["id"]} for item in listed]
        monkeypatch.setattr(StoredResponse, "input_items", counted)
        body = {"input": [*named, {"role": "user", "content": "x"}], "max_output_tokens": 1}
        assert client.post("/v1/responses", json=body).status_code == 200
    assert read == [first]


def test_items_that_are_named_are_no_larger_than_a_body_may_be_x14() -> None:
    """X14: a small request cannot name a large item a thousand times."""
    with (
        opened(toy(), n_ctx=16384) as rt,
        live_server(rt, body_bytes=20_000) as server,
        server.client() as client,
    ):
        body = {"input": [{"role": "user", "content": "a" * 9_000}], "max_output_tokens": 1}
        first = client.post("/v1/responses", json={**body})
        [item] = client.get(f"/v1/responses/{first.json()['id']}/input_items").json()["data"]
        for times, code in ((2, "context_length_exceeded"), (4, "invalid_value")):
            named = [{"type": "item_reference", "id": item["id"]}] * times
            answer = client.post("/v1/responses", json={"input": named, "max_output_tokens": 1})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == code, answer.text


def test_items_are_counted_for_each_request_of_a_connection_x14(server: LiveServer) -> None:
    """X14."""
    with server.client() as client:
        body = {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 1}
        first = client.post("/v1/responses", json=body).json()["id"]
        [item] = client.get(f"/v1/responses/{first}/input_items").json()["data"]
    named = [{"type": "item_reference", "id": item["id"]}] * 40
    url = f"ws{server.url.removeprefix('http')}/v1/responses"
    with connect(url) as socket:
        for _ in range(30):
            asked = {"type": "response.create", "input": named, "max_output_tokens": 1, "generate": False}
            socket.send(json.dumps(asked))
            while (event := json.loads(socket.recv(timeout=60)))["type"] != "response.completed":
                assert event["type"] in ("response.created", "response.in_progress"), event


@pytest.mark.parametrize("name", ["", " ", " x", "x ", "\t", "\x7f", "\u00a0", "a, "])
def test_fields_with_odd_names_are_answered(name: str, server: LiveServer) -> None:
    """They are named in a header, which may not end in a space: the fuzzer found connections that ended."""
    with server.client() as client:
        answer = client.post("/tokenize", json={"content": "Hi", name: 1})
        assert answer.status_code == 200, answer.text
