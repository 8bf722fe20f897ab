"""What a router asks a replica: whether a conversation is warm there, and what it would cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import perdure
from perdure.server.core.keys import Key, Keys, new_key
from perdure.testing.toy import ToyModel
from server.live_server import LiveServer, live_server
from server.test_for_routers import ASK


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with (
        perdure.open(ToyModel(), n_ctx=512, slots=2, store=tmp_path) as runtime,
        live_server(runtime, drain_seconds=60.0) as server,
    ):
        yield server


def test_where_says_what_is_warm_and_what_it_would_cost(server: LiveServer) -> None:
    with server.client() as client:
        cold = client.get("/v1/where", params={"prompt": "a beginning of some length"}).json()
        assert (cold["warm"], cold["tiers"], cold["compute"]) == (0, {}, cold["tokens"])
        assert client.get("/v1/where", params={"session": "trip"}).status_code == 404
        client.post("/v1/chat/completions", json={**ASK, "perdure": {"session": "trip"}}).raise_for_status()
        warm = client.get("/v1/where", params={"session": "trip"}).json()
        assert warm["warm"] > 0
        assert warm["tokens"] == sum(warm["tiers"].values()) + warm["compute"]
        assert (warm["slots"], warm["draining"]) == (2, False)
        client.post("/v1/sessions/trip/sleep", json={}).raise_for_status()
        asleep = client.get("/v1/where", params={"session": "trip"}).json()
        assert asleep["tiers"].get("disk", 0) + asleep["warm"] >= warm["warm"]
        for wrong in ({}, {"session": "trip", "prompt": "x"}):
            assert client.get("/v1/where", params=wrong).status_code == 400


def test_where_tells_nobody_of_another_namespace(tmp_path: Path) -> None:
    pairs: list[tuple[str, Key]] = [new_key(name) for name in ("one", "two")]
    keys = Keys([key for _, key in pairs])
    with (
        perdure.open(ToyModel(), n_ctx=512, slots=2, store=tmp_path) as runtime,
        live_server(runtime, keys=keys) as server,
    ):
        first, second = (server.client(secret) for secret, _ in pairs)
        with first, second:
            first.post(
                "/v1/chat/completions", json={**ASK, "perdure": {"session": "trip"}}
            ).raise_for_status()
            assert first.get("/v1/where", params={"session": "trip"}).json()["warm"] > 0
            assert second.get("/v1/where", params={"session": "trip"}).status_code == 404
            with server.client() as nobody:
                assert nobody.get("/v1/where", params={"session": "trip"}).status_code == 401


def test_where_says_that_a_server_drains(server: LiveServer) -> None:
    with server.client() as client:
        assert client.get("/v1/where", params={"prompt": "x"}).json()["draining"] is False
        server.http_server.stop()
        while client.get("/ready").status_code == 200:
            pass
        assert client.get("/v1/where", params={"prompt": "x"}).json()["draining"] is True
    server.http_server.stop(now=True)
