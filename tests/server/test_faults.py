"""Faults of the machine under a running server (class 4): what is kept, what is said, how it recovers."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from server.live_server import PATIENCE
from server.test_command import Running, serving

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of another process need Linux"),
]
TURN = {"message": "Hi", "max_tokens": 4}


@pytest.fixture
def running(zoo_path: Callable[[str], Path], tmp_path: Path) -> Iterator[Running]:
    with serving(zoo_path("llama"), "--store", str(tmp_path / "store"), "--in-process") as running:
        yield running


def say(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/sessions/alice/turns", json=TURN)


def turns(client: httpx.Client) -> int:
    return int(client.get("/v1/sessions/alice").json()["turns"])


@pytest.mark.extension("upkeep")
def test_a_disk_that_is_full_costs_the_turn_and_nothing_before_it(running: Running, tmp_path: Path) -> None:
    """No file grows any more: turns, notes, responses and exports are refused or say that they were not kept;
    afterwards all goes on, and nothing that was acknowledged is lost."""
    pid, limit = running.process.pid, resource.RLIMIT_FSIZE
    with running.client() as client:
        assert client.post("/v1/sessions", json={"name": "alice"}).status_code == 201
        assert say(client).json()["perdure"]["kept"]
        before = resource.prlimit(pid, limit)
        resource.prlimit(pid, limit, (4096, before[1]))
        for _ in range(3):
            answer = say(client)
            assert answer.status_code in (200, 503, 507), answer.text
            assert answer.status_code != 200 or not answer.json()["perdure"]["kept"]
        response = client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 4})
        assert response.status_code in (503, 507) or response.json()["status"] == "failed", response.text
        assert client.get("/v1/sessions/alice/export").status_code in (503, 507)
        assert client.get("/health").status_code == 200
        assert turns(client) == 1
        resource.prlimit(pid, limit, before)
        assert say(client).json()["perdure"]["kept"]
        assert client.get("/v1/sessions/alice/export").status_code == 200
        assert turns(client) == 2


def test_a_server_without_file_descriptors_recovers(running: Running) -> None:
    """EMFILE: connections wait or are refused; once some are closed, everybody is served again."""
    pid, limit = running.process.pid, resource.RLIMIT_NOFILE
    with running.client() as client:
        assert client.post("/v1/sessions", json={"name": "alice"}).status_code == 201
    before = resource.prlimit(pid, limit)
    used = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, limit, (used + 8, before[1]))
    url = httpx.URL(running.screen["address"])
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection((url.host, url.port or 80), timeout=PATIENCE))
    assert running.process.poll() is None
    with running.client() as client:
        assert client.get("/health").status_code == 200
    resource.prlimit(pid, limit, before)
    with running.client() as client:
        assert say(client).json()["perdure"]["kept"]


def test_a_server_that_was_stopped_and_continued_goes_on(running: Running) -> None:
    """SIGSTOP and SIGCONT in the middle of a stream: it comes to its end, and its turn is kept."""
    with running.client() as client:
        assert client.post("/v1/sessions", json={"name": "alice"}).status_code == 201
        body = {**TURN, "max_tokens": 200, "stream": True}
        with client.stream("POST", "/v1/sessions/alice/turns", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(running.process.pid, signal.SIGSTOP)
            os.kill(running.process.pid, signal.SIGCONT)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert turns(client) == 1
