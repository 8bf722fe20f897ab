"""Fixtures for tests of several machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ext.cluster.servers import PostgresServer, postgres_server
from subjects import Subject


@pytest.fixture
def toy(find_subject: Callable[[str], Subject]) -> Subject:
    return find_subject("toy-full")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for all tests of this process."""
    with postgres_server() as server:
        yield server
