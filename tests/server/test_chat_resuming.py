"""Streams of chat completions that a client comes back to: the rest comes, once, and to nobody else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode.observed import Turnstile, open_toy
from perdure.server.core import event_log
from perdure.server.core.keys import Keys, new_key
from perdure.server.protocols import chat_record
from perdure.sessions.info import STREAM
from server.live_server import PATIENCE, LiveServer, check_freed, live_server

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


# After the end of the server, from the record in the store.


@contextmanager
def stored(folder: Path, gate: Turnstile | None = None, **settings: Any) -> Iterator[LiveServer]:
    """A server whose sessions are in a folder. One without a gate runs freely."""
    keys = settings.pop("keys", None)
    gate = gate or Turnstile(is_open=True)
    asked: dict[str, Any] = {"n_ctx": 1024, "exact": True, **settings}
    with open_toy(gate=gate, store=folder, **asked) as rt, live_server(rt, keys=keys) as server:
        try:
            yield server
        finally:
            gate.open()


def records(server: LiveServer) -> list[tuple[str, str]]:
    return server.runtime.sessions.store.expired(1e12, limit=100, kind=STREAM)


def interrupted(folder: Path, asked: dict[str, Any], **settings: Any) -> list[tuple[int, str]]:
    """What a client has of a stream that the end of its server interrupted."""
    gate, heard = Turnstile(), []
    with stored(folder, gate, **settings) as server, server.client() as client:
        gate.admit(server.runtime.count_chat(asked["messages"]) + 20)
        with client.stream("POST", PATH, json=asked) as response:
            for each in numbered(response):
                heard.append(each)
                if len(text_of(heard)) >= 2:
                    break
        # Before the gate opens: the reply must not come to its end first.
        server.http_server.stop(now=True)
        while not server.state.stopping:
            time.sleep(0.01)
    return heard


def test_a_stream_that_the_end_of_the_server_interrupts_goes_on_after_its_next_start(tmp_path: Path) -> None:
    heard = interrupted(tmp_path, RESUMABLE)
    name = json.loads(heard[0][1])["id"]
    bob, key = new_key("bob")
    with stored(tmp_path, keys=Keys([key])) as server, server.client(bob) as other:
        refused = other.get(f"{PATH}/{name}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "stream_not_found")
        assert len(records(server)) == 1
    with stored(tmp_path) as server, server.client() as client:
        rest = whole(client.get(f"{PATH}/{name}", params={"starting_after": heard[-1][0]}))
        got = [*heard, *rest]
        assert [number for number, _ in got] == list(range(len(got)))
        assert rest[-1][1] == "[DONE]"
        once = client.post(PATH, json={**ASKED, "stream": False}).json()
        assert text_of(got) == once["choices"][0]["message"]["content"]
        assert server.runtime.sessions.list() == [], "a record is not listed"


def test_a_turn_that_was_kept_before_the_server_ended_is_sent_again_and_not_made_twice(
    tmp_path: Path,
) -> None:
    asked = {**ASKED, "perdure": {"resumable": True, "session": "mine"}}
    with stored(tmp_path) as server, server.client() as client:
        events = whole(client.post(PATH, json=asked))
    name = json.loads(events[0][1])["id"]
    with stored(tmp_path) as server, server.client() as client:
        rest = whole(client.get(f"{PATH}/{name}", params={"starting_after": 3}))
        assert [number for number, _ in rest] == list(range(4, len(events)))
        assert text_of([*events[:4], *rest]) == text_of(events)
        assert json.loads(rest[-2][1])["perdure"]["kept"]
        assert len(client.get("/v1/sessions/mine/turns").json()["data"]) == 1


def test_records_go_with_their_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that was cancelled has none at its end, one that can be asked for no more soon afterwards;
    those that a killed server has left expire."""
    gate = Turnstile()
    with stored(tmp_path, gate) as server, server.client() as client:
        gate.admit(server.runtime.count_chat(ASKED["messages"]) + 10)
        with client.stream("POST", PATH, json=RESUMABLE, headers={"x-request-id": "mine"}) as response:
            events = numbered(response)
            name = json.loads(next(events)[1])["id"]
            assert [each for _, each in records(server)] == [name]
            assert client.post("/v1/requests/mine/cancel", json={}).json()["replies"] == 1
            gate.open()
            list(events)
        assert records(server) == []
        monkeypatch.setattr(event_log, "SECONDS", 0.0)
        whole(client.post(PATH, json=RESUMABLE))
        while records(server):
            time.sleep(0.01)
    monkeypatch.undo()
    name = json.loads(interrupted(tmp_path, RESUMABLE)[0][1])["id"]
    with stored(tmp_path) as server, server.client() as client:
        monkeypatch.setattr(chat_record, "SECONDS", -1000.0)
        assert client.get(f"{PATH}/{name}").status_code == 404
        whole(client.post(PATH, json=RESUMABLE))
        assert name not in [each for _, each in records(server)]


def test_a_server_that_stops_lets_a_stream_finish_that_nobody_reads(tmp_path: Path) -> None:
    gate = Turnstile()
    asked = {**ASKED, "perdure": {"resumable": True, "session": "trip"}}
    with stored(tmp_path, gate) as server:
        with server.client() as client:
            gate.admit(server.runtime.count_chat(ASKED["messages"]) + 20)
            with client.stream("POST", PATH, json=asked) as response:
                assert next(numbered(response))
        server.http_server.stop()
        # No connection is left, and the engine is held: only the stream is waited for.
        time.sleep(0.5)
        gate.open()
        end = time.monotonic() + PATIENCE
        while not server.runtime.session("trip").turns and time.monotonic() < end:
            time.sleep(0.01)
        assert server.runtime.session("trip").turns == 1


def test_a_stream_that_no_server_could_make_again_says_so(tmp_path: Path) -> None:
    """Without `exact`, and with several samples. A server that stops has told their readers."""
    cases: list[tuple[bool, dict[str, Any], str]] = [
        (False, RESUMABLE, "--exact"),
        (True, {**RESUMABLE, "n": 2}, "samples"),
    ]
    for exact, asked, word in cases:
        with stored(tmp_path, exact=exact) as server, server.client() as client:
            name = json.loads(whole(client.post(PATH, json=asked))[0][1])["id"]
        with stored(tmp_path) as server, server.client() as client:
            refused = client.get(f"{PATH}/{name}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "stream_not_resumable")
            assert word in refused.json()["error"]["message"]
    heard = interrupted(tmp_path, RESUMABLE, exact=False)
    name = json.loads(heard[0][1])["id"]
    with stored(tmp_path) as server, server.client() as client:
        assert client.get(f"{PATH}/{name}").status_code == 404
