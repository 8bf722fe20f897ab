"""Responses that are resumed when something else has changed meanwhile: the conversation, the day, the
reply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode.observed import Turnstile, open_toy, toy
from ext.responses.test_responses import PATH, events, resumed, text_of
from perdure import Template
from perdure.chat.template import sandbox
from perdure.errors import StoreFullError
from perdure.ext.responses import stored
from perdure.server.core.keys import Keys, new_key
from perdure.sessions import session as session_module
from perdure.sessions.responses import respond
from perdure.sessions.session import Session
from perdure.sessions.sessions import Sessions
from perdure.sessions.store.sqlite.store import SqliteStore
from server.live_server import LiveServer, check_freed, live_server, opened
from server.scripted import THINKS, steer

DATED = Template(
    "{{ strftime_now('%Y-%m-%d') }}\n{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    name="dated",
)
ASKED = {"input": "Go", "temperature": 1.0, "max_output_tokens": 64, "seed": 5, "stream": True}


@contextmanager
def held(gate: Turnstile, **settings: Any) -> Iterator[LiveServer]:
    """A server whose engine waits at a gate, which is open at the end."""
    keys = settings.pop("keys", None)
    with (
        open_toy(gate=gate, **{"n_ctx": 1024, **settings}) as rt,
        live_server(rt, keys=keys) as server,
    ):
        try:
            yield server
        finally:
            gate.open()


def broken(
    server: LiveServer, client: httpx.Client, gate: Turnstile, namespace: str = "", **body: Any
) -> list[dict[str, Any]]:
    """What a client has of a stream that it left in the middle of the reply."""
    gate.admit(server.runtime.count_chat([{"role": "user", "content": ASKED["input"]}]) + 10)
    heard = []
    with client.stream("POST", PATH, json={**ASKED, **body}) as response:
        for event in events(response):
            heard.append(event)
            if len(text_of(heard)) >= 2:
                break
    # It is written down what was sent.
    session = server.runtime.session(heard[0]["response"]["id"], namespace=namespace)
    while "sent" not in session.origin:
        pass
    check_freed(server.runtime)
    gate.open()
    return heard


def finished(client: httpx.Client, response_id: str) -> dict[str, Any]:
    while True:
        shown: dict[str, Any] = client.get(f"{PATH}/{response_id}").json()
        if shown.get("status") not in ("queued", "in_progress"):
            return shown


def test_a_response_is_not_resumed_in_a_conversation_that_moved_on_x5() -> None:
    """X5: it is refused before any work, and nobody pays for it."""
    gate = Turnstile()
    (first_secret, first), (second_secret, second) = new_key("ada"), new_key("ada")
    keys = Keys([first, second])
    with held(gate, keys=keys) as server, server.client(first_secret) as client:
        conversation = client.post("/v1/conversations", json={}).json()["id"]
        heard = broken(server, client, gate, "ada", conversation=conversation)
        response_id = heard[0]["response"]["id"]
        other = client.post(PATH, json={**ASKED, "conversation": conversation, "stream": False})
        assert other.status_code == 200
        with server.client(second_secret) as client:
            for params in ({}, {"stream": "true", "starting_after": "3"}):
                refused = client.get(f"{PATH}/{response_id}", params=params)
                assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_error")
            assert not any(day.completion_tokens for day in keys.usage.days(second).values())
            assert client.post(f"{PATH}/{response_id}/cancel", json={}).json()["status"] == "cancelled"
            assert finished(client, response_id)["status"] == "cancelled"
            # The conversation is not held up by it.
            again = client.post(PATH, json={**ASKED, "conversation": conversation, "stream": False})
            assert again.json()["status"] in ("completed", "incomplete")


@pytest.mark.parametrize("how", ["whole", "stream", "background"])
def test_a_response_that_could_not_be_stored_has_failed_x5(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """X5: its reply is there to be read once, and it is not made again at every look."""

    def full(*_: Any, **__: Any) -> int:
        raise StoreFullError("no room left", needed=1)

    with opened(toy(), n_ctx=1024) as rt, live_server(rt) as server, server.client() as client:
        monkeypatch.setattr(SqliteStore, "add", full)
        body = {**ASKED, "stream": how == "stream", "background": how == "background"}
        if how == "stream":
            with client.stream("POST", PATH, json=body) as response:
                last = list(events(response))[-1]
            assert last["type"] == "response.failed"
            shown = last["response"]
        else:
            shown = client.post(PATH, json=body).json()
        response_id = shown["id"]
        if how == "background":
            finished(client, response_id)
        else:
            assert (shown["status"], shown["error"]["code"]) == ("failed", "response_not_kept")
            assert shown["output"][0]["content"][0]["text"]
        monkeypatch.undo()
        for _ in range(2):
            shown = finished(client, response_id)
            assert (shown["status"], shown["error"]["code"]) == ("failed", "response_not_kept")
            assert "no room left" in shown["error"]["message"]


def test_a_stream_goes_on_with_the_same_reply_on_another_day_x6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X6: the day of a template that shows it is that of the request."""

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(days=1)

    gate = Turnstile()
    with held(gate, store=tmp_path, template=DATED) as server, server.client() as client:
        heard = broken(server, client, gate)
    with held(gate, store=tmp_path, template=DATED) as server, server.client() as client:
        expected = client.post(PATH, json={**ASKED, "stream": False}).json()
        for module in (session_module, sandbox):
            monkeypatch.setattr(module, "datetime", Tomorrow)
        other = client.post(PATH, json={**ASKED, "stream": False}).json()
        rest = resumed(client, heard[0]["response"]["id"], heard[-1]["sequence_number"])
    assert other["output"][0]["content"] != expected["output"][0]["content"]
    assert text_of(heard + rest) == expected["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("polled", [False, True])
def test_a_reply_that_does_not_come_again_is_not_spliced_x6(
    restarts: bool, polled: bool, tmp_path: Path
) -> None:
    """X6: the client that has a part of another one is told so, and the whole is there by GET."""
    first, second = "The sea is blue, as ever.", "Grey is the sky, and so on."
    gate = Turnstile()
    with held(gate, store=tmp_path, template=THINKS) as server, server.client() as client:
        steer(server.runtime, *[first] if restarts else [first, second])
        heard = broken(server, client, gate)
        if not restarts:
            check_not_spliced(client, heard, second, polled)
    if restarts:
        with opened(toy(), n_ctx=1024, store=tmp_path, template=THINKS) as rt:
            steer(rt, second)
            with live_server(rt) as server, server.client() as client:
                check_not_spliced(client, heard, second, polled)


@pytest.mark.parametrize("polled", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_a_stream_whose_server_was_killed_goes_on_only_if_replies_are_exact_x6(
    exact: bool, polled: bool, tmp_path: Path
) -> None:
    """X6: a server that was killed wrote down nothing of what it had sent."""
    text = "The sea is blue, as ever."
    gate = Turnstile()
    with held(gate, store=tmp_path, template=THINKS) as server, server.client() as client:
        steer(server.runtime, text)
        heard = broken(server, client, gate)
        session = server.runtime.session(heard[0]["response"]["id"])
        # As it is after SIGKILL.
        session.note({"sent": None})
    with opened(toy(), n_ctx=1024, store=tmp_path, template=THINKS, exact=exact) as rt:
        steer(rt, text)
        with live_server(rt) as server, server.client() as client:
            if not exact:
                check_not_spliced(client, heard, text, polled)
                return
            if polled:
                client.get(f"{PATH}/{heard[0]['response']['id']}")
            rest = resumed(client, heard[0]["response"]["id"], heard[-1]["sequence_number"])
            assert text_of(heard + rest) == text


def check_not_spliced(
    client: httpx.Client, heard: Sequence[dict[str, Any]], second: str, polled: bool
) -> None:
    response_id, last = heard[0]["response"]["id"], heard[-1]["sequence_number"]
    if polled:
        client.get(f"{PATH}/{response_id}")
    params: dict[str, str | int] = {"stream": "true", "starting_after": last}
    with client.stream("GET", f"{PATH}/{response_id}", params=params) as response:
        if response.status_code == 200:
            # While it is made in the background.
            [told] = events(response)
            assert told["type"] == "response.failed"
            assert told["response"]["error"]["code"] == "stream_not_resumable"
        else:
            response.read()
            assert response.status_code == 409
            assert response.json()["error"]["code"] == "stream_not_resumable"
    shown = finished(client, response_id)
    assert shown["output"][0]["content"][0]["text"] == second
    # From the beginning, it is a stream as any other; from the middle, it is not that of this client.
    assert text_of(resumed(client, response_id, -1)) == second
    assert client.get(f"{PATH}/{response_id}", params=params).status_code == 409


def test_a_response_begins_where_its_conversation_stands_x19(monkeypatch: pytest.MonkeyPatch) -> None:
    """X19: it is not taken for finished, with the turn that another one made in between."""

    def later(sessions: Sessions, name: str, origin: Any, *, after: Any = None, **more: Any) -> Session:
        if after is not None:
            monkeypatch.undo()
            after.append("I was faster.")
        return respond(sessions, name, origin, after=after, **more)

    with opened(toy(), n_ctx=1024) as rt, live_server(rt) as server, server.client() as client:
        conversation = client.post("/v1/conversations", json={}).json()["id"]
        monkeypatch.setattr(stored, "respond", later)
        body = {"input": "Go", "conversation": conversation, "max_output_tokens": 4, "background": True}
        shown = finished(client, client.post(PATH, json=body).json()["id"])
        assert shown["usage"]["output_tokens"] == 4
        assert [turn.messages[0].content for turn in rt.session(conversation).history()] == [
            "I was faster.",
            "Go",
        ]


def test_a_poll_of_a_background_response_reads_no_store_on_the_event_loop_x7(tmp_path: Path) -> None:
    """X7: `no_store_on_the_loop` looks on at this test, as at every other one of the server."""
    gate = Turnstile()
    with held(gate, store=tmp_path) as server, server.client() as client:
        body = {"input": "Go", "background": True, "max_output_tokens": 8}
        response_id = client.post(PATH, json=body).json()["id"]
        gate.reached.wait()
        assert client.get(f"{PATH}/{response_id}").json()["status"] == "in_progress"
        gate.open()
        assert finished(client, response_id)["status"] in ("completed", "incomplete")
