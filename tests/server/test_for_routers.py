"""What a router before several servers needs: one session header, metrics, draining."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

import perdure
from perdure.server.core.server_state import Drain
from perdure.testing.toy import ToyModel
from server.live_server import PATIENCE, LiveServer, live_server

ASK = {"model": "toy", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 4}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with (
        perdure.open(ToyModel(), n_ctx=512, slots=2, store=tmp_path) as runtime,
        live_server(runtime, drain_seconds=60.0) as server,
    ):
        yield server


@pytest.mark.parametrize(
    "header",
    ["x-session-id", "x-claude-code-session-id", "x-session-affinity", "thread-id", "session-id"],
)
def test_what_a_client_calls_its_conversation_comes_back_under_one_name(
    server: LiveServer, header: str
) -> None:
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json=ASK, headers={header: "abc-1.2:3"})
        assert answer.headers["x-session-id"] == "abc-1.2:3"
        assert "x-session-id" not in client.post("/v1/chat/completions", json=ASK).headers
        for odd in (b"a b", b"x" * 101, "ü".encode()):
            answer = client.get("/v1/models", headers={header.encode(): odd})
            assert "x-session-id" not in answer.headers


def test_gateways_find_the_metrics_that_they_read(server: LiveServer) -> None:
    with server.client() as client:
        text = client.get("/metrics").text
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        assert f"\n{name} 0.0\n" in text


def test_a_server_that_drains_answers_and_says_so(server: LiveServer) -> None:
    """Told to stop, it takes requests for as long as routers need to notice; a second signal ends that."""
    with server.client() as client:
        assert client.get("/ready").status_code == 200
        server.http_server.stop()
        while client.get("/ready").status_code == 200:
            pass
        told = client.get("/ready")
        assert (told.status_code, told.json()["error"]["code"]) == (503, "draining")
        # HAProxy takes a 404 for one that finishes what it has.
        assert client.get("/ready", params={"draining": "404"}).status_code == 404
        assert client.get("/health").status_code == 200
        # A connection that is new, too.
        again = httpx.post(f"{server.url}/v1/chat/completions", json=ASK, trust_env=False)
        assert again.status_code == 200
    server.http_server.stop(now=True)


def test_a_drain_lasts_until_whoever_asks_was_told_as_often_as_before() -> None:
    now = 100.0
    drain = Drain(lambda: now)
    for _ in range(3):
        drain.asked()
    now = 104.0
    for _ in range(2):
        drain.asked()
    drain.begin(5.0)
    assert not drain.is_over(5.0)
    now += 5.0
    # A busy server was slow to answer: those who wait for it do not know.
    for _ in range(5):
        assert not drain.is_over(5.0)
        drain.asked()
    assert drain.is_over(5.0)


def test_a_drain_is_as_long_as_it_was_told_where_nobody_asks_and_twice_that_at_most() -> None:
    now = 100.0
    drain, asked = Drain(lambda: now), Drain(lambda: now)
    asked.asked()
    for each in (drain, asked):
        each.begin(5.0)
        assert not each.is_over(5.0)
    now += 5.0
    assert drain.is_over(5.0)
    assert not asked.is_over(5.0)
    now += 5.0
    assert asked.is_over(5.0)
    assert Drain(lambda: now).is_over(5.0) is False


def test_checks_that_found_all_well_are_told_to_the_log_at_debug_alone(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Routers ask every second: nobody could read what else is in the log."""
    records: queue.Queue[logging.LogRecord] = queue.Queue()
    log, handler = logging.getLogger("perdure.server"), QueueHandler(records)
    log.addHandler(handler)
    told: list[tuple[str, int, str]] = []
    try:
        with server.client() as client, caplog.at_level(logging.DEBUG, logger="perdure.server"):
            for path in ("/health", "/ready", "/v1/models"):
                assert client.get(path).status_code == 200
            # A request is logged once it is answered.
            while len(told) < 3:
                record: Any = records.get(timeout=PATIENCE)
                if record.message == "request":
                    told.append((record.fields["route"], record.fields["status"], record.levelname))
    finally:
        log.removeHandler(handler)
    assert told == [
        ("/health", 200, "DEBUG"),
        ("/ready", 200, "DEBUG"),
        ("/v1/models", 200, "INFO"),
    ]
