"""Sessions of two keys at the same time, and of one key twice at once (D1, C8, I5)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode.observed import Turnstile, open_toy, toy
from perdure.server.core.keys import Keys, new_key
from perdure.sessions.info import SessionInfo
from perdure.sessions.store.sqlite.store import SqliteStore
from server.live_server import PATIENCE, live_server, opened

SESSIONS = "/v1/sessions"


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    made = [new_key(name) for name in ("alice", "bob")]
    keys = Keys([key for _, key in made])
    with (
        opened(toy(), store=tmp_path) as rt,
        live_server(rt, keys=keys) as server,
        server.client(made[0][0]) as alice,
        server.client(made[1][0]) as bob,
    ):
        yield alice, bob


def test_deleting_twice_while_another_key_creates_loses_nothing_of_its_d1(
    tenants: tuple[httpx.Client, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1, I5: numbers were given out again, and a delete went by the number alone.

    Both deletes have found the session before either deletes it, and the second one goes on only when
    somebody else's has been made.
    """
    alice, bob = tenants
    find, both, created = SqliteStore.find, threading.Barrier(2), threading.Event()

    def found_by_both(store: SqliteStore, namespace: str, name: str) -> SessionInfo:
        found = find(store, namespace, name)
        if namespace == "bob" and not created.is_set():
            second = both.wait(PATIENCE) == 1
            if second:
                assert created.wait(PATIENCE)
        return found

    assert bob.post(SESSIONS, json={"name": "s"}).status_code == 201
    answers: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(SqliteStore, "find", found_by_both)
    deleting = [
        threading.Thread(target=lambda: answers.put(bob.delete(f"{SESSIONS}/s").status_code))
        for _ in range(2)
    ]
    for each in deleting:
        each.start()
    assert answers.get(timeout=PATIENCE) == 200
    assert alice.post(SESSIONS, json={"name": "s", "system": "mine"}).status_code == 201
    created.set()
    assert answers.get(timeout=PATIENCE) == 404
    for each in deleting:
        each.join()
    assert alice.get(f"{SESSIONS}/s").json()["system"] == "mine"
    assert bob.get(f"{SESSIONS}/s").status_code == 404


def test_a_memory_address_with_a_huge_number_is_400(tenants: tuple[httpx.Client, httpx.Client]) -> None:
    alice, _ = tenants
    for digits in (20, 40, 900):
        address = f"perdure://a/{'9' * digits}#l"
        woken = alice.post("/v1/memories/wake", json={"name": "new", "address": address})
        assert woken.status_code == 400
        assert alice.delete("/v1/memories", params={"address": address}).status_code == 400


def test_a_second_turn_of_a_folding_session_is_409_at_once_c8() -> None:
    """C8: nobody waits for a summary that the model writes, neither here nor in the pool of threads."""
    gate = Turnstile(is_open=True)
    said: dict[str, Any] = {"message": "word " * 10, "max_tokens": 8, "temperature": 0}
    said["perdure"] = {"overflow": "fold"}
    answers: list[httpx.Response] = []
    with (
        open_toy(gate=gate, slots=1, n_ctx=256, queue=80) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        assert client.post(SESSIONS, json={"name": "long"}).status_code == 201
        turns = f"{SESSIONS}/long/turns"
        while len(rt.session("long").tokens) < 185:
            assert client.post(turns, json=said).status_code == 200
        gate.shut()
        first = threading.Thread(target=lambda: answers.append(client.post(turns, json=said)))
        first.start()
        gate.reached.wait()
        try:
            for _ in range(70):
                with server.client() as other:
                    assert other.post(turns, json=said).status_code == 409
            assert client.get("/v1/models").status_code == 200
            assert client.get(f"{SESSIONS}/long").status_code == 200
            assert client.delete(f"{SESSIONS}/long").status_code == 409
        finally:
            gate.open()
            first.join()
    # It was the summary that the others met: the toy writes on and on, so nothing is folded.
    assert "summary" in answers[0].text
