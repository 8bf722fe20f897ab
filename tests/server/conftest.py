"""Servers that tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from perdure import Model
from server.house import House, house, opened


@pytest.fixture(scope="module")
def here(zoo_path: Callable[[str], Path]) -> Iterator[House]:
    """A server on a toy model of the zoo, without a store."""
    with opened(Model(zoo_path("llama")), threads=1) as runtime, house(runtime) as server:
        yield server


@pytest.fixture
def client(here: House) -> Iterator[httpx.Client]:
    with here.client() as client:
        yield client
