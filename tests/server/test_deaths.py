"""The engine's process dies; the server, and every committed turn, do not (H4)."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure import Runtime
from perdure.ext.workers import supervisor as supervisor_module
from perdure.ext.workers.remote import RemoteBackend
from perdure.restart_policy import RestartPolicy
from server.live_server import LiveServer, events, hello, live_server, opened

SESSIONS = "/v1/sessions"
SWIFT = RestartPolicy(backoff=0.01, backoff_limit=0.05, grace=10.0)


def engine(rt: Runtime) -> RemoteBackend:
    assert isinstance(rt.backend, RemoteBackend)
    return rt.backend


def kill(rt: Runtime, last: int | None = None) -> int:
    """Kill the engine's process, as soon as another than the last is at work."""
    while (health := engine(rt).health()).state != "ready" or health.pid in (None, last):
        rt.cache.stats()
    assert health.pid is not None
    os.kill(health.pid, signal.SIGKILL)
    return health.pid


def test_a_death_in_the_middle_of_a_stream_is_told_and_the_server_goes_on_h4(
    zoo_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """H4, H1. For whoever runs the server it is one line at level error."""
    with (
        opened(zoo_path("llama"), threads=1, n_ctx=4096, isolated=SWIFT) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        body = hello(max_tokens=4000, logit_bias={"381": -100, "383": -100}, stream=True)
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            chunks = events(response)
            said = 0
            while not said:
                chunk = next(chunks)
                assert isinstance(chunk, dict)
                said += bool(chunk["choices"][0]["delta"].get("content"))
            kill(rt)
            *_, error, last, done = chunks
        assert isinstance(error, dict)
        assert isinstance(last, dict)
        assert error["error"]["code"] == "engine_unavailable"
        assert last["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
        # Nobody has to do anything for this.
        assert client.post("/v1/chat/completions", json=hello()).status_code == 200
        assert client.get("/ready").json()["restarts"] == 1
        assert "perdure_engine_restarts_total 1.0" in client.get("/metrics").text
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert re.search(r"SIGKILL.*it is started again", line)
    # Nobody is told of tokens as kept that are not.
    assert "the rest is lost" in error["error"]["message"]


def test_ready_tells_the_truth_of_a_worker_that_is_stopped_x22(
    zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """X22: a process that an idle server has, and that does nothing any more, is told of and replaced."""
    monkeypatch.setattr(supervisor_module, "UNRESPONSIVE", 1.0)
    policy = replace(SWIFT, hang_timeout=2.0)
    with (
        opened(zoo_path("llama"), threads=1, isolated=policy) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        assert client.get("/ready").status_code == 200
        pid = engine(rt).health().pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        while (answer := client.get("/ready")).status_code == 200:
            assert answer.json()["restarts"] == 0
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert client.get("/health").status_code == 200
        while (answer := client.get("/ready")).status_code != 200:
            pass
        assert answer.json()["restarts"] == 1
        assert client.post("/v1/chat/completions", json=hello()).status_code == 200


class Talker(threading.Thread):
    """Says one thing after the other in a session, and notes what was acknowledged."""

    def __init__(self, server: LiveServer, name: str) -> None:
        super().__init__()
        self.name = name
        self.acknowledged: list[str] = []
        self.unclear: list[str] = []
        self.stopped = threading.Event()
        self.progress = threading.Semaphore(0)
        self._server = server

    def run(self) -> None:
        number = 0
        with self._server.client() as client:
            while not self.stopped.is_set():
                number += 1
                self._say(client, f"{self.name} {number}", stream=bool(number % 2))
                self.progress.release()

    def _say(self, client: httpx.Client, text: str, *, stream: bool) -> None:
        body = {"message": text, "max_tokens": 6, "stream": stream, "perdure": {"overflow": "drop_oldest"}}
        path = f"{SESSIONS}/{self.name}/turns"
        if not stream:
            response = client.post(path, json=body)
            kept = response.status_code == 200 and response.json()["perdure"]["kept"]
            assert response.status_code in (200, 503), response.text
        else:
            with client.stream("POST", path, json=body) as response:
                assert response.status_code in (200, 503)
                chunks = list(events(response)) if response.status_code == 200 else []
            last: Any = chunks[-2] if chunks else {}
            kept = last.get("perdure", {}).get("kept", False)
        if kept:
            self.acknowledged.append(text)


def talked(zoo_path: Callable[[str], Path], store: Path, kills: int) -> None:
    with (
        opened(zoo_path("llama"), threads=1, n_ctx=512, store=store, isolated=SWIFT) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        talkers = [Talker(server, f"talker-{number}") for number in range(3)]
        for talker in talkers:
            assert client.post(SESSIONS, json={"name": talker.name}).status_code == 201
            talker.start()
        killed: int | None = None
        for number in range(kills):
            # Some turns in between, so that deaths hit all phases of one.
            assert talkers[number % len(talkers)].progress.acquire(timeout=60)
            killed = kill(rt, killed)
        for talker in talkers:
            talker.stopped.set()
            talker.join(60)
            assert not talker.is_alive()
        assert client.post("/v1/chat/completions", json=hello()).status_code == 200
        check(client, talkers)
        acknowledged = [len(talker.acknowledged) for talker in talkers]
        restarts = engine(rt).health().restarts
        assert restarts >= kills
        print(f"{kills} kills, {restarts} restarts, turns acknowledged: {acknowledged}")
    # And once more after a restart of everything.
    with (
        opened(zoo_path("llama"), threads=1, n_ctx=512, store=store) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        check(client, talkers)


def check(client: httpx.Client, talkers: list[Talker]) -> None:
    for talker in talkers:
        turns = client.get(f"{SESSIONS}/{talker.name}/turns").json()["data"]
        there = [turn["messages"][0]["content"] for turn in turns]
        assert set(talker.acknowledged) <= set(there)
        assert talker.acknowledged, "no turn came through at all"
        assert len(set(there)) == len(there)


def test_every_acknowledged_turn_is_there_whatever_the_engine_does_h4(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """H4, S1."""
    talked(zoo_path, tmp_path, kills=4)


@pytest.mark.soak
def test_twenty_deaths_under_load_h4(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    """H4."""
    talked(zoo_path, tmp_path, kills=20)


def test_a_schema_that_kills_what_compiles_it_costs_no_engine_y25(zoo_path: Callable[[str], Path]) -> None:
    """Y25: a small request; the engine's process is the same after it."""
    bounds = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}
    many = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(8000)}}
    with (
        opened(zoo_path("llama"), threads=1, n_ctx=4096, isolated=SWIFT) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        assert client.post("/v1/chat/completions", json=hello(max_tokens=1)).status_code == 200
        before = engine(rt).health().pid
        for schema in (bounds, many) * 2:
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            answer = client.post("/v1/chat/completions", json=hello(response_format=form))
            assert answer.status_code == 400, answer.text[:300]
        assert client.post("/v1/chat/completions", json=hello(max_tokens=1)).status_code == 200
        assert engine(rt).health().pid == before
        assert client.get("/ready").json()["restarts"] == 0
