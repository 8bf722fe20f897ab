"""The contract of a session store, on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ext.cluster.servers import PostgresServer
from perdure.ext.cluster.postgres.place import stand_in
from perdure.sessions.store.base import SessionStore
from perdure.sessions.store.registry import open_store
from sessions import test_store_contract
from sessions.test_store_contract import Open

globals().update({name: test for name, test in vars(test_store_contract).items() if name.startswith("test_")})


@pytest.fixture
def opened(postgres: PostgresServer, tmp_path: Path) -> Iterator[Open]:
    """Opens the same store, as another process would."""
    stores: list[SessionStore] = []
    stand_in(postgres.url(tmp_path))

    def opened() -> SessionStore:
        stores.append(open_store(tmp_path))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()
