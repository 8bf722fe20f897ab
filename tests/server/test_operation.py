"""Health, figures, logs, strictness."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from decode.observed import toy
from perdure.errors import StoreFullError
from perdure.server.core.middleware import JsonLinesHandler
from perdure.server.core.server_state import ServerState
from perdure.server.http_server import HttpServer, address, bind
from server.live_server import PATIENCE, LiveServer, hello, live_server, opened, streamed

CHAT = "/v1/chat/completions"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the server logs."""
    out = io.StringIO()
    handler, log = JsonLinesHandler(out), logging.getLogger("perdure.server")
    log.addHandler(handler)
    before, log.level = log.level, logging.INFO
    log.setLevel(logging.INFO)
    try:
        yield out
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def figures(client: httpx.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = client.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_health_and_readiness(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json()["slots"] == 2


def test_figures_count_what_happened(here: LiveServer, client: httpx.Client) -> None:
    body = hello(messages=[{"role": "user", "content": "Count this one"}])
    before = figures(client)
    answers = [client.post(CHAT, json=body).json() for _ in range(2)]
    client.post(CHAT, json={"messages": 3})
    after = figures(client)

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0)

    assert grown("perdure_requests_total", method="POST", route=CHAT, status="200") == 2
    assert grown("perdure_requests_total", method="POST", route=CHAT, status="400") == 1
    usages = [answer["usage"] for answer in answers]
    for kind, field in (("prompt", "prompt_tokens"), ("written", "completion_tokens")):
        assert grown("perdure_tokens_total", kind=kind) == sum(usage[field] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    tiers = [key for key in after if key[0] == "perdure_reused_tokens_total"]
    assert sum(after[key] - before.get(key, 0) for key in tiers) == cached > 0
    assert grown("perdure_first_token_seconds_count") == 2
    assert after["perdure_slots", ()] == here.runtime.slots
    assert after["perdure_resident_bytes", (("process", "server"),)] > 1 << 20
    assert ("perdure_disk_bytes", ()) not in after, "it has no store"
    assert after["perdure_queue_length", ()] == 0
    assert after["perdure_engine_up", ()] == 1
    assert after["perdure_engine_restarts_total", ()] == 0
    assert after["perdure_kept_bytes", (("tier", "memory"),)] >= 0
    assert ("perdure_kept_bytes", (("tier", "disk"),)) not in after


@pytest.mark.parametrize("isolated", [False, True])
def test_what_is_on_the_disk_is_told(
    zoo_path: Callable[[str], Path], tmp_path: Path, *, isolated: bool
) -> None:
    disk = ("perdure_kept_bytes", (("tier", "disk"),))
    with (
        opened(zoo_path("llama"), threads=1, store=tmp_path, isolated=isolated) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        assert figures(client)[disk] == 0
        assert client.post("/v1/sessions", json={"name": "kept"}).status_code == 201
        said = {"message": "Keep this one, all of it", "max_tokens": 40}
        assert client.post("/v1/sessions/kept/turns", json=said).status_code == 200
        assert client.post("/v1/sessions/kept/sleep", json={}).status_code == 200
        there = sum(path.stat().st_size for path in (tmp_path / "blocks").rglob("*") if path.is_file())
        assert figures(client)[disk] == there > 0
        assert client.get("/v1/cache").json()["totals"]["disk_bytes"] == there


def test_a_line_of_log_for_every_request_without_its_text(lines: io.StringIO) -> None:
    with opened(toy()) as rt, live_server(rt) as server, server.client() as client:
        body = hello(messages=[{"role": "user", "content": "a private matter"}])
        text = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
        streamed(client, CHAT, body)
        client.post(CHAT, json={"messages": "a private matter"})
    shown = [json.loads(line) for line in lines.getvalue().splitlines()]
    # The line of a stream is written when all of it is sent: the client may have asked for more by then.
    requests = sorted((line for line in shown if line["event"] == "request"), key=lambda line: line["status"])
    assert [line["status"] for line in requests] == [200, 200, 400]
    assert all(line["route"] == CHAT and line["seconds"] > 0 for line in requests)
    assert requests[0]["prompt_tokens"] > 0
    assert requests[1]["finish_reason"] in ("stop", "length")
    assert "private" not in lines.getvalue()
    assert text
    assert text not in lines.getvalue()


def test_text_is_logged_where_that_was_asked_for(lines: io.StringIO) -> None:
    with opened(toy()) as rt, live_server(rt, log_text=True) as server, server.client() as client:
        body = hello(messages=[{"role": "user", "content": "a public matter"}])
        text = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    [line] = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert line["messages"][0]["content"] == "a public matter"
    assert line["replies"] == [text]


def test_a_strict_server_refuses_what_it_does_not_know() -> None:
    with opened(toy()) as rt, live_server(rt, strict=True) as server, server.client() as client:
        assert client.post(CHAT, json=hello()).status_code == 200
        for change, param in (
            ({"usr": "me"}, "usr"),
            ({"messages": [{"role": "user", "content": "hi", "mood": "good"}]}, "messages.0.mood"),
            ({"perdure": {"sesion": "x"}}, "perdure.sesion"),
        ):
            response = client.post(CHAT, json=hello(**change))
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
        document = client.get("/openapi.json").json()
        assert document["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False


def test_a_server_that_has_stopped_can_be_told_again() -> None:
    with opened(toy()) as rt:
        listening = bind("127.0.0.1", 0)
        listening.listen(1)
        server = HttpServer(ServerState(runtime=rt, name="toy"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        with httpx.Client(base_url=address(listening), timeout=PATIENCE, trust_env=False) as client:
            assert client.get("/health").status_code == 200
        server.stop(now=True)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        server.stop(now=True)


def test_limits_that_are_read_again_hold_for_connections_too() -> None:
    """For messages over a WebSocket, and for how long replies may take when the server is told to stop."""
    with opened(toy()) as rt:
        state = ServerState(runtime=rt, name="toy")

        def read_settings() -> None:
            state.limits = replace(state.limits, body_bytes=2048, grace_seconds=3)

        http_server = HttpServer(state, read_settings=read_settings)
        before = http_server.config.timeout_graceful_shutdown
        assert before is not None
        http_server.reload()
        assert http_server.config.ws_max_size == 2048
        after = http_server.config.timeout_graceful_shutdown
        assert after is not None
        assert after == before - 17


def test_a_turn_that_could_not_be_kept_is_a_warning_a_metric_and_a_field_of_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreFullError("the disk is full", needed=1)

    with opened(toy(), store=tmp_path) as rt, live_server(rt) as server, server.client() as client:
        client.post("/v1/sessions", json={"name": "a"}).raise_for_status()
        assert client.get("/ready").json()["not_kept"] == 0
        monkeypatch.setattr(rt.sessions.store, "add", full)
        with caplog.at_level("WARNING", "perdure.server"):
            said = client.post("/v1/sessions/a/turns", json={"message": "Hi", "max_tokens": 4})
        assert said.json()["perdure"]["not_kept"] == "the disk is full"
        assert "a turn of session 'a'" in caplog.text
        assert "the disk is full" in caplog.text
        assert client.get("/ready").json()["not_kept"] == 1
        assert "perdure_turns_not_kept_total 1.0" in client.get("/metrics").text
