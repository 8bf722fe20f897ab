"""A server for clients that others publish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure import Model
from perdure.server.core.keys import Keys, new_key
from server.live_server import LiveServer, live_server, opened


@pytest.fixture(scope="package")
def key() -> tuple[str, Keys]:
    secret, key = new_key("peer")
    return secret, Keys([key])


@pytest.fixture(scope="package")
def here(zoo_path: Callable[[str], Path], key: tuple[str, Keys]) -> Iterator[LiveServer]:
    with opened(Model(zoo_path("llama")), threads=1) as rt, live_server(rt, keys=key[1]) as server:
        yield server
