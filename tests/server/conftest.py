"""Servers that tests share."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode.observed import Turnstile
from perdure import Model, Runtime
from perdure.store.index import Index
from server.live_server import LiveServer, live_server, opened


@pytest.fixture(autouse=True)
def no_store_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """X7: a store may take its time, and an event loop that waits for it serves nobody. So every test of the
    server fails in which a database is asked on a loop."""
    found: list[str] = []

    def watched(name: str) -> None:
        ask = getattr(Index, name)

        def asked(self: Index, *args: Any, **keywords: Any) -> Any:
            if asyncio._get_running_loop() is not None:
                found.append("".join(traceback.format_stack(limit=12)))
            return ask(self, *args, **keywords)

        monkeypatch.setattr(Index, name, asked)

    for name in ("rows", "run", "writing"):
        watched(name)
    yield
    assert not found, f"a store was asked on the event loop:\n{found[0]}"


@pytest.fixture(scope="module")
def here(zoo_path: Callable[[str], Path]) -> Iterator[LiveServer]:
    """A server on a toy model of the zoo, without a store."""
    with opened(Model(zoo_path("llama")), threads=1) as runtime, live_server(runtime) as server:
        yield server


@pytest.fixture
def client(here: LiveServer) -> Iterator[httpx.Client]:
    with here.client() as client:
        yield client


@pytest.fixture
def server(rt: Runtime, gate: Turnstile) -> Iterator[LiveServer]:
    """A server on a module's own `rt`, whose engine waits at its `gate`."""
    with live_server(rt) as server:
        yield server
        gate.open()
