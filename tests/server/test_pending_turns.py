"""What is asked of a session over HTTP is there until it is answered, whatever ends it (C12)."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode.observed import Turnstile, toy
from perdure.server.core.middleware import JsonLinesHandler
from server.live_server import LiveServer, check_freed, events, live_server, opened, streamed, text_of

SESSIONS = "/v1/sessions"
ASKED = "Tell me of the sea."


@dataclass(frozen=True)
class Tongue:
    """How a protocol asks a question of a session."""

    path: str
    body: dict[str, Any]
    session: str
    headers: dict[str, str] | None = None


MESSAGES = [{"role": "user", "content": ASKED}]
BIAS = {"256": -100, "258": -100}
"""Against an early end."""
SETTINGS = {"max_tokens": 60, "temperature": 0.9, "seed": 7, "logit_bias": BIAS, "stream": True}
TONGUES = {
    "session": Tongue(f"{SESSIONS}/one/turns", {"message": ASKED, **SETTINGS}, "one"),
    "chat": Tongue(
        "/v1/chat/completions", {"messages": MESSAGES, **SETTINGS, "perdure": {"session": "one"}}, "one"
    ),
    "chat with a key": Tongue(
        "/v1/chat/completions", {"messages": MESSAGES, **SETTINGS, "prompt_cache_key": "k"}, "cache-key:k"
    ),
    "chat with a header": Tongue(
        "/v1/chat/completions", {"messages": MESSAGES, **SETTINGS}, "opencode:h", {"x-session-id": "h"}
    ),
    "messages": Tongue(
        "/v1/messages",
        {"messages": MESSAGES, **SETTINGS},
        "claude-code:c",
        {"x-claude-code-session-id": "c"},
    ),
    "ollama": Tongue(
        "/api/chat",
        {"messages": MESSAGES, "options": {"num_predict": 60, "temperature": 0.9, "seed": 7}, "stream": True},
        "open-webui:o",
        {"x-openwebui-chat-id": "o"},
    ),
    "responses": Tongue(
        "/v1/responses", {"input": ASKED, "max_output_tokens": 60, "logit_bias": BIAS, "stream": True}, ""
    ),
}


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    out = io.StringIO()
    handler, logger = JsonLinesHandler(out), logging.getLogger("perdure.server")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield out
    logger.setLevel(before)
    logger.removeHandler(handler)


def lines(log: io.StringIO, path: str) -> list[dict[str, Any]]:
    shown = map(json.loads, log.getvalue().splitlines())
    return [line for line in shown if (line.get("method"), line.get("route")) == ("POST", path)]


def pending(client: httpx.Client, name: str) -> dict[str, Any] | None:
    answer = client.get(f"{SESSIONS}/{name}/pending")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] | None = answer.json()["pending"]
    return found


def left(server: LiveServer, gate: Turnstile, tongue: Tongue, tokens: int = 45) -> None:
    """Ask, and go away while the reply is written: the engine stands still after so many tokens."""
    gate.shut()
    gate.admit(tokens)
    with (
        server.client() as other,
        other.stream("POST", tongue.path, json=tongue.body, headers=tongue.headers) as response,
    ):
        # The iterator closes the connection when it goes.
        coming = response.iter_lines()
        next(coming)
        assert gate.reached.wait(60)
    check_freed(server.runtime)
    gate.open()


@pytest.mark.parametrize("name", TONGUES)
def test_c12_what_is_asked_over_any_protocol_is_there_when_its_client_leaves(
    name: str, tmp_path: Path, log: io.StringIO
) -> None:
    gate, tongue = Turnstile(is_open=True), TONGUES[name]
    with (
        opened(toy(gate=gate), store=tmp_path, exact=True) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        session = tongue.session
        if name == "session":
            client.post(SESSIONS, json={"name": "one"})
        if name == "responses":
            session = client.post("/v1/conversations", json={}).json()["id"]
            body = {**tongue.body, "conversation": session}
            tongue = Tongue(tongue.path, body, session)
        left(server, gate, tongue)
        found = pending(client, session)
        assert found is not None
        assert [each["content"] for each in found["messages"]] == [ASKED]
        assert not found["running"]
        assert client.get(f"{SESSIONS}/{session}/turns").json()["data"] == []
        [line] = lines(log, tongue.path if name != "session" else f"{SESSIONS}/{{name}}/turns")
        assert (line["status"], line["ended"]) == (499, "left")
        if name == "responses":
            # It is made again by its id, and is then a turn of its conversation.
            return
        part = found["reply"]["content"]
        chunks = streamed(client, f"{SESSIONS}/{session}/pending", {})
        assert chunks[-1]["perdure"]["kept"]
        assert text_of(chunks).startswith(part)
        [turn] = client.get(f"{SESSIONS}/{session}/turns").json()["data"]
        assert turn["reply"]["content"] == text_of(chunks)
        assert pending(client, session) is None


def test_c12_the_reply_is_the_one_that_there_would_have_been(tmp_path: Path) -> None:
    gate = Turnstile(is_open=True)
    with (
        opened(toy(gate=gate), store=tmp_path, exact=True) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        want = text_of(
            streamed(client, "/v1/chat/completions", {**TONGUES["chat"].body, "perdure": {"session": "two"}})
        )
        left(server, gate, TONGUES["chat"])
        found = pending(client, "one")
        assert found is not None
        assert 0 < found["tokens"] < 60
        assert want.startswith(found["reply"]["content"])
        assert found["ended"] == "its client left"
        assert text_of(streamed(client, f"{SESSIONS}/one/pending", {})) == want


def test_a_pending_turn_is_answered_again_or_discarded(tmp_path: Path) -> None:
    gate = Turnstile(is_open=True)
    with opened(toy(gate=gate), store=tmp_path) as rt, live_server(rt) as server, server.client() as client:
        assert client.get(f"{SESSIONS}/none/pending").status_code == 404
        left(server, gate, TONGUES["chat"])
        again = client.post(f"{SESSIONS}/one/pending", json={"again": True, "max_tokens": 5})
        assert again.json()["usage"]["completion_tokens"] == 5
        assert pending(client, "one") is None
        refused = client.post(f"{SESSIONS}/one/pending", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_error")
        left(server, gate, TONGUES["chat"])
        assert pending(client, "one") is not None
        assert client.delete(f"{SESSIONS}/one/pending").json() == {"deleted": 1}
        assert client.delete(f"{SESSIONS}/one/pending").json() == {"deleted": 0}
        assert pending(client, "one") is None
        assert len(client.get(f"{SESSIONS}/one/turns").json()["data"]) == 1


def test_a_client_that_sends_all_of_its_conversation_asks_anew(tmp_path: Path) -> None:
    gate, tongue = Turnstile(is_open=True), TONGUES["chat with a key"]
    with opened(toy(gate=gate), store=tmp_path) as rt, live_server(rt) as server, server.client() as client:
        left(server, gate, tongue)
        assert pending(client, tongue.session) is not None
        messages = [{"role": "user", "content": "Something else"}]
        body = {**tongue.body, "messages": messages, "stream": False}
        assert client.post(tongue.path, json=body).status_code == 200
        assert pending(client, tongue.session) is None
        [turn] = client.get(f"{SESSIONS}/{tongue.session}/turns").json()["data"]
        assert turn["messages"][0]["content"] == "Something else"


def test_what_its_client_has_stopped_is_not_pending(tmp_path: Path, log: io.StringIO) -> None:
    gate = Turnstile(is_open=True)
    with opened(toy(gate=gate), store=tmp_path) as rt, live_server(rt) as server, server.client() as client:
        client.post(SESSIONS, json={"name": "one"})
        gate.shut()
        gate.admit(45)
        path = f"{SESSIONS}/one/turns"
        with client.stream("POST", path, json=TONGUES["session"].body) as response:
            chunks = events(response)
            next(chunks)
            assert gate.reached.wait(60)
            with server.client() as other:
                found = pending(other, "one")
                assert found is not None
                assert found["running"]
                assert other.delete(f"{SESSIONS}/one/pending").status_code == 409
                assert other.post(f"{SESSIONS}/one/stop", json={}).json() == {"stopped": True}
            gate.open()
            assert [*chunks][-1] == "[DONE]"
        assert pending(client, "one") is None
    [line] = lines(log, f"{SESSIONS}/{{name}}/turns")
    assert (line["status"], line["ended"]) == (499, "cancelled")


def test_c12_a_server_that_stops_keeps_parts_and_questions(tmp_path: Path, log: io.StringIO) -> None:
    """What is being answered has the grace, what waits behind it is ended at once; the log says so."""
    gate = Turnstile(is_open=True)
    names = ["one", "two", "waiting"]
    with (
        opened(toy(gate=gate), store=tmp_path, exact=True) as rt,
        live_server(rt, grace_seconds=0.5) as server,
        server.client() as client,
    ):
        found: dict[str, Any] = {}
        threads = []
        gate.shut()

        def ask(name: str) -> None:
            body = {"message": f"Hello {name}", **SETTINGS, "max_tokens": 200}
            with server.client() as other:
                path = f"{SESSIONS}/{name}/turns"
                if name == "waiting":
                    found[name] = other.post(path, json={**body, "stream": False})
                    return
                with other.stream("POST", path, json=body) as response:
                    found[name] = [*events(response)]

        end = time.monotonic() + 60
        for name in names:
            client.post(SESSIONS, json={"name": name})
            threads.append(threading.Thread(target=ask, args=(name,)))
            threads[-1].start()
            if name != "waiting":
                # Two are written, and the third comes when they stand still.
                while (pending(client, name) or {"tokens": 0})["tokens"] < 3 and time.monotonic() < end:
                    gate.admit(5)
                    time.sleep(0.02)
        while rt.load[0] < 1 and time.monotonic() < end:
            time.sleep(0.01)
        server.http_server.stop()
        threads[-1].join(60)
        assert (found["waiting"].status_code, found["waiting"].json()["error"]["code"]) == (
            503,
            "stopping",
        )
        while not server.state.stopping and time.monotonic() < end:
            time.sleep(0.01)
        gate.open()
        for thread in threads:
            thread.join(60)
    with opened(toy(), store=tmp_path, exact=True) as rt:
        for name in names:
            info = rt.session(name).pending
            assert info is not None
            assert info.messages[0].content == f"Hello {name}"
            assert info.ended == "its server was stopped"
            assert bool(info.tokens) is (name != "waiting")
            sent = text_of([each for each in found[name] if "choices" in each]) if info.tokens else ""
            assert info.text == sent
            assert rt.session(name).resume().text.startswith(sent)
    shown = {line["status"] for line in lines(log, f"{SESSIONS}/{{name}}/turns")}
    assert 503 in shown
