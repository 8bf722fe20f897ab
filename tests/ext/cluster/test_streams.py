"""Streams survive the loss of their replica: another one goes on with them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import perdure
from decode.observed import Turnstile, open_toy
from ext.cluster.harness import Replica
from ext.cluster.servers import PostgresServer, free_port
from perdure.testing.toy import ToyModel
from server.live_server import LiveServer, live_server

ASKED: dict[str, Any] = {
    "model": "toy",
    "input": "Tell me a long story.",
    "max_output_tokens": 120,
    "temperature": 0,
}


def events(response: httpx.Response) -> Any:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def test_a_stream_of_a_killed_replica_goes_on_at_another_one(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request and its seed are in PostgreSQL before its id is sent. The client reads the first events
    from one replica and the rest from the other: together they are the reply of one that nobody killed."""
    monkeypatch.setenv("PERDURE_TEST_EXACT", "1")
    first = postgres.url(tmp_path / "r0", lease=1)
    replica = Replica(first, free_port(), tmp_path / "log")
    seen = []
    try:
        replica.wait()
        with httpx.stream(
            "POST",
            f"http://127.0.0.1:{replica.port}/v1/responses",
            json={**ASKED, "stream": True},
            trust_env=False,
            timeout=60,
        ) as response:
            for event in events(response):
                seen.append(event)
                if len(seen) == 6:
                    break
            replica.kill()
    finally:
        replica.kill()
    name, last = seen[0]["response"]["id"], seen[-1]["sequence_number"]
    second = first.replace("%2Fr0", "%2Fr1")
    with (
        perdure.open(ToyModel(), n_ctx=1024, slots=4, store=second, exact=True) as runtime,
        live_server(runtime) as server,
        server.client() as client,
    ):
        with client.stream(
            "GET", f"/v1/responses/{name}", params={"stream": "true", "starting_after": last}
        ) as response:
            assert response.status_code == 200, response.read()
            seen += list(events(response))
        numbers = [event["sequence_number"] for event in seen]
        assert numbers == list(range(len(numbers)))
        assert seen[-1]["type"] in ("response.completed", "response.incomplete")
        undisturbed = client.post("/v1/responses", json=ASKED).json()
        said = "".join(each["delta"] for each in seen if each["type"] == "response.output_text.delta")
        assert said == undisturbed["output"][0]["content"][0]["text"]


# Chat streams with `perdure.resumable`.

CHAT = "/v1/chat/completions"
SAID: dict[str, Any] = {
    "model": "toy",
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "max_tokens": 60,
    "temperature": 1.0,
    "stream": True,
}
RESUMABLE = {**SAID, "perdure": {"resumable": True}}


def numbered(response: httpx.Response) -> Iterator[tuple[int, str]]:
    number = -1
    for line in response.iter_lines():
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: ") and number >= 0:
            yield number, line[6:]


def text_of(events: list[tuple[int, str]]) -> str:
    chunks = [json.loads(data) for _, data in events if data != "[DONE]"]
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each["choices"])


def killed_in_the_middle(
    store: str, folder: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, headers: Any = None
) -> list[tuple[int, str]]:
    """What a client has of a stream whose replica was killed while the reply was being made."""
    with perdure.open(ToyModel(), n_ctx=1024) as runtime:
        prompt = runtime.count_chat(asked["messages"])
    monkeypatch.setenv("PERDURE_TEST_TOKENS", str(prompt + 20))
    replica = Replica(store, free_port(), folder / "log")
    heard: list[tuple[int, str]] = []
    try:
        replica.wait()
        url = f"http://127.0.0.1:{replica.port}{CHAT}"
        with httpx.stream("POST", url, json=asked, headers=headers, trust_env=False, timeout=60) as response:
            assert response.status_code == 200, response.read()
            for each in numbered(response):
                heard.append(each)
                if len(text_of(heard)) >= 6:
                    break
            replica.kill()
    finally:
        replica.kill()
    return heard


@contextmanager
def other_replica(store: str, **settings: Any) -> Iterator[LiveServer]:
    with (
        perdure.open(
            ToyModel(), n_ctx=1024, slots=4, store=store.replace("%2Fr0", "%2Fr1"), **settings
        ) as runtime,
        live_server(runtime) as server,
    ):
        yield server


def id_of(heard: list[tuple[int, str]]) -> str:
    return str(json.loads(heard[0][1])["id"])


@pytest.mark.parametrize("where", ["alone", "in a session", "in an agent's conversation"])
def test_a_chat_stream_of_a_killed_replica_goes_on_at_another_one(
    where: str, postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed is drawn by the replica that dies. The other one makes the same events: each comes once, and
    together they are the reply of one that nobody killed. A turn of a session is kept once."""
    monkeypatch.setenv("PERDURE_TEST_EXACT", "1")
    store = postgres.url(tmp_path / "r0", lease=1)
    asked, headers = RESUMABLE, {"x-session-id": "mine"} if where == "in an agent's conversation" else {}
    if where == "in a session":
        asked = {**SAID, "perdure": {"resumable": True, "session": "mine"}}
    heard = killed_in_the_middle(store, tmp_path, asked, monkeypatch, headers)
    with other_replica(store, exact=True) as server, server.client() as client:
        with client.stream(
            "GET", f"{CHAT}/{id_of(heard)}", headers={"last-event-id": str(heard[-1][0])}
        ) as response:
            assert response.status_code == 200, response.read()
            heard += list(numbered(response))
        assert [number for number, _ in heard] == list(range(len(heard)))
        assert heard[-1][1] == "[DONE]"
        last = next(json.loads(data) for _, data in reversed(heard) if data != "[DONE]")["perdure"]
        undisturbed = client.post(CHAT, json={**SAID, "stream": False, "seed": last["seed"]}).json()
        assert text_of(heard) == undisturbed["choices"][0]["message"]["content"]
        assert len({json.loads(data)["created"] for _, data in heard[:-1]}) == 1
        again = client.get(f"{CHAT}/{id_of(heard)}")
        assert list(numbered(again)) == heard, "the other one has all of it now"
        if where != "alone":
            assert last["kept"]
            [turn] = client.get(f"/v1/sessions/{last['session']}/turns").json()["data"]
            assert turn["reply"]["content"] == text_of(heard)


def test_a_chat_stream_that_would_not_be_the_same_is_refused(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that has moved on, and a replica that is not exact: nothing is sent."""
    monkeypatch.setenv("PERDURE_TEST_EXACT", "1")
    store = postgres.url(tmp_path / "r0", lease=1)
    asked = {**SAID, "perdure": {"resumable": True, "session": "mine"}}
    heard = killed_in_the_middle(store, tmp_path, asked, monkeypatch)
    path = f"{CHAT}/{id_of(heard)}"

    def refused(response: httpx.Response) -> tuple[int, str, str]:
        error = response.json()["error"]
        return response.status_code, error["code"], error["message"]

    with other_replica(store) as server, server.client() as client:
        status, code, why = refused(client.get(path))
        assert (status, code) == (409, "stream_not_resumable")
        assert "--exact" in why
    with other_replica(store, exact=True) as server, server.client() as client:
        more = {**SAID, "stream": False, "perdure": {"session": "mine"}}
        assert client.post(CHAT, json=more).status_code == 200
        status, code, why = refused(client.get(path))
        assert (status, code) == (409, "stream_not_resumable")
        assert "moved on" in why


def test_a_chat_stream_whose_replica_is_there_is_not_made_twice(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """A replica that does not have the stream says that another one does; once that one was told to go, its
    readers are told nothing but the end, and the other one goes on."""
    store, gate = postgres.url(tmp_path / "r0", lease=2), Turnstile()
    with ExitStack() as first, other_replica(store, exact=True) as server, server.client() as client:
        runtime = first.enter_context(open_toy(gate=gate, n_ctx=1024, slots=4, store=store, exact=True))
        held = first.enter_context(live_server(runtime))
        first.callback(gate.open)
        gate.admit(runtime.count_chat(SAID["messages"]) + 20)
        heard: list[tuple[int, str]] = []
        with held.client() as reader, reader.stream("POST", CHAT, json=RESUMABLE) as response:
            events = numbered(response)
            while len(text_of(heard)) < 6:
                heard.append(next(events))
            busy = client.get(f"{CHAT}/{id_of(heard)}")
            assert (busy.status_code, busy.json()["error"]["code"]) == (409, "stream_busy")
            stopping = threading.Thread(target=held.http_server.stop, kwargs={"now": True})
            stopping.start()
            gate.open()
            heard += list(events)
            stopping.join()
        assert "[DONE]" not in [data for _, data in heard]
        rest = client.get(f"{CHAT}/{id_of(heard)}", params={"starting_after": heard[-1][0]})
        heard += list(numbered(rest))
    assert [number for number, _ in heard] == list(range(len(heard)))
    assert heard[-1][1] == "[DONE]"
