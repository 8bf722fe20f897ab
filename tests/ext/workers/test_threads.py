"""A failure planted in each thread of the worker is told, and the others go on."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from decode.observed import open_toy
from events.test_background import PATIENCE, Once
from events.test_background import failures as failures
from inside import inside
from perdure.backend import Residence
from perdure.errors import EngineError
from perdure.events.background import FAILURES, BackgroundThread
from perdure.ext.workers import guest
from perdure.ext.workers.child import Child
from perdure.ext.workers.connection import Connection
from perdure.ext.workers.message_reader import MessageReader
from perdure.ext.workers.pending_requests import PendingRequests
from perdure.ext.workers.protocol import Call, Close, Pulse, RequestId
from perdure.ext.workers.service import RequestService
from perdure.ext.workers.supervisor import Supervisor
from perdure.restart_policy import RestartPolicy
from perdure.sessions.listener import Listener
from perdure.store.owner import StoreOwner
from server.live_server import live_server


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    one, other = map(Connection, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_ready_says_which_threads_of_the_engines_process_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = PendingRequests(1)
    supervisor = Supervisor(Once(), RestartPolicy(), pending, MessageReader(), Residence())
    pending.handle([Pulse(1, {}, {"perdure-connection": 2})])
    health = supervisor.health()
    with open_toy(slots=1) as rt, live_server(rt) as server, server.client() as client:
        monkeypatch.setattr(rt.backend, "health", lambda: replace(health, state="ready"))
        assert client.get("/ready").json()["failed_threads"] == {"perdure-connection": 2}
    supervisor.close()


def test_a_model_that_is_loaded_in_the_background() -> None:
    errors: list[Exception] = []

    class Watching(Residence):
        def failed(self, error: Exception) -> None:
            errors.append(error)

    supervisor = Supervisor(Once(), RestartPolicy(), PendingRequests(1), MessageReader(), Watching())
    with pytest.raises(EngineError, match="planted"):
        supervisor.wait_ready()
    supervisor.close()
    assert len(errors) == 1


def test_a_call_in_the_engines_process_is_answered(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = ends
    with open_toy(slots=1) as rt:
        monkeypatch.setattr(inside(rt).cache, "plan", Once(lambda: 7))
        service = RequestService(there, inside(rt))
        for number in (1, 2):
            service.handle(Call(RequestId(number), "cache", "plan", (), {}))
            answer = here.receive()
            assert answer.id == number
            assert (str(answer.error), answer.value) == (
                ("the engine's process raised Panic('planted')", None) if number == 1 else ("None", 7)
            )
        service.close()


def test_the_pulse_of_the_engines_process(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = ends
    with open_toy(slots=1) as rt:
        monkeypatch.setattr(inside(rt).engine_loop, "call", Once())
        child = BackgroundThread(Child(there, inside(rt), pulse=0.001).serve, name="perdure-child")
        child.start()
        while not isinstance(pulse := here.receive(), Pulse):
            pass
        assert pulse.failures == {"perdure-pulse": 1}
        here.send(Close())
        child.join(PATIENCE)
    assert FAILURES == {"perdure-pulse": 1}


def test_another_program_that_was_not_served_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "socket")
    planted = Once(guest.Guest)
    monkeypatch.setattr(guest, "Guest", planted)
    holder = StoreOwner(pid=os.getpid(), command="test", since=0.0, socket=address)
    with open_toy(slots=1) as rt, closing(Listener(holder, rt.backend, {})):
        for heard in (0, 1):
            with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as end:
                end.connect(address)
                assert len(end.recv(1)) == heard
        # The connection is closed before its failure is counted.
        ends = time.monotonic() + PATIENCE
        while not FAILURES and time.monotonic() < ends:
            time.sleep(0.01)
    assert FAILURES == {"perdure-service": 1}
