"""Streams of chat completions that a client comes back to: the rest comes, once, and to nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from decode.observed import Turnstile, open_toy
from perdure.server.core import event_log
from perdure.server.core.keys import Keys, new_key
from server.live_server import LiveServer, check_freed, live_server

PATH = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Go"}],
    "max_tokens": 48,
    "temperature": 1.0,
    "seed": 5,
    "stream": True,
}
RESUMABLE = {**ASKED, "perdure": {"resumable": True}}


@contextmanager
def held(gate: Turnstile, keys: Keys | None = None) -> Iterator[LiveServer]:
    """A server whose engine waits at a gate, which is open at the end."""
    with open_toy(gate=gate, n_ctx=1024) as rt, live_server(rt, keys=keys) as server:
        try:
            yield server
        finally:
            gate.open()


def numbered(response: httpx.Response) -> Iterator[tuple[int, str]]:
    """The events of a stream, with their numbers."""
    number = -1
    for line in response.iter_lines():
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: "):
            yield number, line[6:]


def whole(response: httpx.Response) -> list[tuple[int, str]]:
    assert response.status_code == 200, response.text
    return list(numbered(response))


def text_of(events: list[tuple[int, str]]) -> str:
    chunks = [json.loads(data) for _, data in events if data != "[DONE]"]
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each["choices"])


def broken(server: LiveServer, client: httpx.Client, gate: Turnstile) -> list[tuple[int, str]]:
    """What a client has of a stream that it left in the middle of the reply."""
    gate.admit(server.runtime.count_chat(ASKED["messages"]) + 10)
    heard = []
    with client.stream("POST", PATH, json=RESUMABLE) as response:
        for each in numbered(response):
            heard.append(each)
            if len(text_of(heard)) >= 2:
                break
    return heard


def test_the_rest_of_a_stream_comes_to_whoever_comes_back() -> None:
    gate = Turnstile()
    with held(gate) as server, server.client() as client:
        heard = broken(server, client, gate)
        name = json.loads(heard[0][1])["id"]
        gate.open()
        rest = whole(client.get(f"{PATH}/{name}", params={"starting_after": heard[-1][0]}))
        got = [*heard, *rest]
        assert [number for number, _ in got] == list(range(len(got))), "each event once, in order"
        assert rest[-1][1] == "[DONE]"
        check_freed(server.runtime)
        once = client.post(PATH, json={**ASKED, "stream": False}).json()
        assert text_of(got) == once["choices"][0]["message"]["content"]
        by_header = whole(client.get(f"{PATH}/{name}", headers={"last-event-id": str(heard[-1][0])}))
        assert by_header == rest
        assert whole(client.get(f"{PATH}/{name}")) == got


def test_others_cannot_read_it_and_what_is_not_there_is_said() -> None:
    gate = Turnstile()
    gate.open()
    (ada, one), (bob, two) = new_key("ada"), new_key("bob")
    with held(gate, Keys([one, two])) as server, server.client(ada) as client:
        events = whole(client.post(PATH, json=RESUMABLE))
        name = json.loads(events[0][1])["id"]
        with server.client(bob) as other:
            refused = other.get(f"{PATH}/{name}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "stream_not_found")
        later = client.get(f"{PATH}/{name}", params={"starting_after": 10_000})
        assert (later.status_code, later.json()["error"]["param"]) == (400, "starting_after")
        plain = whole(client.post(PATH, json=ASKED))
        assert {number for number, _ in plain} == {-1}, "no numbers unless they are asked for"
        gone = client.get(f"{PATH}/{json.loads(plain[0][1])['id']}")
        assert gone.status_code == 404


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Turnstile()
    gate.open()
    (ada, one), (bob, two) = new_key("ada"), new_key("bob")
    with held(gate, Keys([one, two])) as server, server.client(ada) as client, server.client(bob) as other:
        first = json.loads(whole(other.post(PATH, json=RESUMABLE))[0][1])["id"]
        monkeypatch.setattr(event_log, "_ALL_LOGS", 3)
        names = [json.loads(whole(client.post(PATH, json=RESUMABLE))[0][1])["id"] for _ in range(5)]
        status = [client.get(f"{PATH}/{name}").status_code for name in names]
        assert status == [404, 404, 404, 200, 200], "the oldest of whoever has the most goes"
        assert other.get(f"{PATH}/{first}").status_code == 200


def test_events_that_are_not_kept_any_more_are_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Turnstile()
    with held(gate) as server, server.client() as client:
        heard = broken(server, client, gate)
        name = json.loads(heard[0][1])["id"]
        monkeypatch.setattr(event_log, "_LOG_BYTES", 500)
        gate.open()
        # To its end, or until it is as far behind.
        client.get(f"{PATH}/{name}", params={"starting_after": heard[-1][0]})
        cut = client.get(f"{PATH}/{name}")
        assert (cut.status_code, cut.json()["error"]["code"]) == (409, "stream_not_resumable")


def test_one_that_nobody_reads_ends_by_its_id_and_is_paid_for() -> None:
    gate = Turnstile()
    secret, key = new_key("ada")
    keys = Keys([key])
    with held(gate, keys) as server, server.client(secret) as client:
        heard = []
        gate.admit(server.runtime.count_chat(ASKED["messages"]) + 10)
        with client.stream("POST", PATH, json=RESUMABLE, headers={"x-request-id": "mine"}) as response:
            for each in numbered(response):
                heard.append(each)
                if len(text_of(heard)) >= 2:
                    break
        name = json.loads(heard[0][1])["id"]
        assert client.post("/v1/requests/mine/cancel", json={}).json()["replies"] == 1
        gate.open()
        rest = whole(client.get(f"{PATH}/{name}", params={"starting_after": heard[-1][0]}))
        assert any('"finish_reason":"cancelled"' in data for _, data in rest)
        check_freed(server.runtime)
        [day] = keys.usage.days(key).values()
        assert day.completion_tokens > 0
