"""Toy models with projectors; a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ext.cluster.servers import PostgresServer, postgres_server

from . import toys


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A model and its projector, by kind."""
    folder = tmp_path_factory.mktemp("seeing")
    written: dict[str, tuple[Path, Path]] = {}

    def find(kind: str) -> tuple[Path, Path]:
        if kind not in written:
            (folder / kind).mkdir()
            written[kind] = toys.write(folder / kind, kind)
        return written[kind]

    return find


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for all tests of this process."""
    with postgres_server() as server:
        yield server
