"""Servers that tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from decode.observed import Turnstile
from perdure import Model, Runtime
from perdure.extension import extensions
from server.live_server import LiveServer, live_server, opened


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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """In every server of these tests each word of a prompt is traced to where it comes from (C13), unless the
    extension that does it is hidden."""
    if "inspection" in extensions():
        os.environ["PERDURE_CHECK_PROMPTS"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    os.environ.pop("PERDURE_CHECK_PROMPTS", None)
