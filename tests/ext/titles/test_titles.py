"""Titles that the model writes while it is idle: what they cost others, and what they never replace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import perdure
from perdure import Runtime
from perdure.ext.titles.title import ask_for_title, title_of
from perdure.testing.toy import ToyModel
from server.live_server import LiveServer, live_server


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with perdure.open(ToyModel(reply_tokens=12), n_ctx=2048, slots=2, store=tmp_path) as rt:
        yield rt


@pytest.fixture
def server(runtime: Runtime) -> Iterator[LiveServer]:
    with live_server(runtime) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.mark.parametrize(
    ("reply", "title"),
    [
        ('**"Plants for the shade"**', "Plants for the shade"),
        ("Title: ferns and hostas.\n\nI chose it because …", "Ferns and hostas"),
        ("# Title: Reise nach Lissabon", "Reise nach Lissabon"),
        ("", ""),
        ("…", ""),
        ("This conversation is about a great many things that nobody can put into a few words", ""),
    ],
)
def test_of_a_reply_only_a_short_line_is_a_title(reply: str, title: str) -> None:
    assert title_of(reply) == title


def test_a_title_takes_the_place_of_the_first_words(client: httpx.Client) -> None:
    client.post("/v1/sessions", json={"name": "shade", "title": "What grows"}).raise_for_status()
    client.post("/v1/sessions/shade/turns", json={"message": "What grows there?"}).raise_for_status()
    answer = client.post("/v1/sessions/shade/title", json={"instead_of": "What grows"}).json()
    assert answer["written"]
    assert client.get("/v1/sessions/shade").json()["title"] == answer["title"] != "What grows"
    assert client.get("/v1/sessions/shade").json()["turns"] == 1


def test_a_title_that_a_person_gave_stays(client: httpx.Client) -> None:
    client.post("/v1/sessions", json={"name": "shade", "title": "What grows"}).raise_for_status()
    client.post("/v1/sessions/shade/turns", json={"message": "What grows there?"}).raise_for_status()
    client.patch("/v1/sessions/shade", json={"title": "My garden"}).raise_for_status()
    answer = client.post("/v1/sessions/shade/title", json={"instead_of": "What grows"}).json()
    assert answer == {"title": "My garden", "written": False}


def test_a_title_evicts_nothing_and_the_conversation_goes_on_from_its_slot(
    client: httpx.Client, runtime: Runtime
) -> None:
    for name in ("one", "two"):
        client.post("/v1/sessions", json={"name": name}).raise_for_status()
        client.post(f"/v1/sessions/{name}/turns", json={"message": f"Tell me of {name}. " * 8})
    before = runtime.session("two").plan_wake()
    assert set(before.tiers) == {"slot"}
    assert client.post("/v1/sessions/one/title", json={}).json()["written"]
    assert runtime.session("two").plan_wake() == before
    for name in ("one", "two"):
        reuse = runtime.session(name).say("And then?").reuse
        assert set(reuse.tiers) == {"slot"}
        assert reuse.computed < 64


def test_it_is_idle_work_beside_the_conversation(
    client: httpx.Client, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reply waits for it, and what it leaves is the first to go."""
    client.post("/v1/sessions", json={"name": "one"}).raise_for_status()
    client.post("/v1/sessions/one/turns", json={"message": "Tell me of the sea."}).raise_for_status()
    asked: list[Any] = []
    submit = runtime.backend.submit

    def noted(request: Any) -> Any:
        asked.append(request)
        return submit(request)

    monkeypatch.setattr(runtime.backend, "submit", noted)
    assert client.post("/v1/sessions/one/title", json={}).json()["written"]
    [request] = asked
    assert request.idle
    assert request.side


def test_none_is_asked_for_where_state_would_have_to_move(client: httpx.Client, runtime: Runtime) -> None:
    client.post("/v1/sessions", json={"name": "asleep"}).raise_for_status()
    client.post("/v1/sessions/asleep/turns", json={"message": "Tell me of the sea. " * 20})
    runtime.session("asleep").sleep()
    assert ask_for_title(runtime.session("asleep")) is None
    assert client.post("/v1/sessions/asleep/title", json={}).json() == {"title": "", "written": False}


def test_an_empty_session_has_none(client: httpx.Client) -> None:
    client.post("/v1/sessions", json={"name": "empty"}).raise_for_status()
    assert client.post("/v1/sessions/empty/title", json={}).json() == {"title": "", "written": False}
    assert client.post("/v1/sessions/nobody/title", json={}).status_code == 404
