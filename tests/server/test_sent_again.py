"""The header Idempotency-Key: a request that is sent again makes no second turn of a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

import perdure
from perdure import Runtime, TurnKeptError
from perdure.sessions.pending_turn import TurnExtra
from perdure.testing.toy import ToyModel
from server.live_server import LiveServer, live_server


@pytest.fixture
def rt() -> Iterator[Runtime]:
    with perdure.open(ToyModel(), n_ctx=512, slots=2) as runtime:
        yield runtime


@pytest.fixture
def server(rt: Runtime) -> Iterator[LiveServer]:
    with live_server(rt) as server:
        yield server


KEY = {"idempotency-key": "7f9c"}
SAID = [{"role": "user", "content": "Once?"}]


def ask(path: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return path, {"model": "toy", "messages": SAID, "max_tokens": 4, "perdure": {"session": "ada"}, **more}


ROUTES = {
    "chat": ask("/v1/chat/completions"),
    "chat, streamed": ask("/v1/chat/completions", stream=True),
    "messages": ask("/v1/messages"),
    "ollama": ask("/api/chat", stream=False),
    "sessions": ("/v1/sessions/ada/turns", {"messages": SAID, "max_tokens": 4}),
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_turn_is_made_once_for_a_key(server: LiveServer, route: str) -> None:
    path, body = ROUTES[route]
    with server.client() as client:
        server.runtime.session("ada")
        first = client.post(path, json=body, headers=KEY)
        assert first.status_code == 200, first.text
        for _ in range(2):
            again = client.post(path, json=body, headers=KEY)
            assert again.status_code == 409, again.text
            assert "turn 1 of session 'ada'" in again.text
            assert again.headers["x-should-retry"] == "false"
        # Another key, and none, make another turn.
        for headers in ({"idempotency-key": "8"}, {}):
            assert client.post(path, json=body, headers=headers).status_code == 200
        assert client.get("/v1/sessions/ada").json()["turns"] == 3
        # The first is still known.
        assert client.post(path, json=body, headers=KEY).status_code == 409
        page = client.get("/v1/sessions/ada/turns", params={"after": 0, "limit": 1}).json()
        assert page["data"][0]["messages"][0]["content"] == "Once?"
        # In another session it is another request.
        server.runtime.session("bob")
        other = {**body, "perdure": {"session": "bob"}} if "perdure" in body else body
        assert client.post(path.replace("ada", "bob"), json=other, headers=KEY).status_code == 200


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there"])
def test_a_key_has_its_bounds(server: LiveServer, key: str) -> None:
    path, body = ROUTES["chat"]
    with server.client() as client:
        answer = client.post(path, json=body, headers={"idempotency-key": key})
        assert answer.status_code == 400
        assert "Idempotency-Key" in answer.json()["error"]["message"]
        assert client.get("/v1/sessions/ada").status_code == 404


def test_a_client_that_tries_again_by_itself_stops_at_once(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        def say() -> Any:
            return client.chat.completions.create(
                model="toy",
                messages=[{"role": "user", "content": "Once?"}],
                max_tokens=4,
                extra_body={"perdure": {"session": "ada"}},
                extra_headers=KEY,
            )

        say()
        with pytest.raises(openai.ConflictError, match="turn 1 of session"):
            say()
    assert server.runtime.session("ada").turns == 1


def test_a_turn_that_was_taken_back_or_was_not_kept_can_be_asked_for_again(rt: Runtime) -> None:
    session, extra = rt.session("ada"), TurnExtra(idempotency_key="k")
    cut = session.submit("One.", extra=extra, max_tokens=40)
    cut.cancel()
    cut.reply()
    assert session.turns == 0
    assert session.submit("One.", extra=extra, max_tokens=4).reply().kept
    with pytest.raises(TurnKeptError) as error:
        session.submit("One.", extra=extra, max_tokens=4)
    assert (error.value.turn, session.turns) == (1, 1)
    # Refused, it lets go of the session.
    assert session.say("Two.", max_tokens=4).kept
    session.rewind(2)
    assert session.submit("One.", extra=extra, max_tokens=4).reply().kept
    for number in range(16):
        session.say(f"And {number}.", max_tokens=1)
    # Long after, it is a new request.
    assert session.submit("One.", extra=extra, max_tokens=4).reply().kept
