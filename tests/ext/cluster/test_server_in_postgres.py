"""The server's tests of keys, namespaces and quotas once more, with sessions and keys in a PostgreSQL server.

Not here: what is of a file of keys alone, of the clock of one machine (the database counts a minute by its
own), or of SQLite's own calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ext.cluster.servers import PostgresServer
from ext.cluster.test_sessions_in_postgres import copied
from perdure.ext.cluster import shared_keys
from perdure.ext.cluster.postgres.place import parse_place
from perdure.ext.cluster.shared_keys import SharedKeyStore
from perdure.server.core.keys import Keys
from perdure.sessions.store import registry
from perdure.sessions.store.base import SessionStore
from server import test_key_terms, test_keys, test_quotas, test_tenants
from server.test_keys import callers
from server.test_tenants import tenants

__all__ = ["callers", "tenants"]

_QUICK = ("test_sessions_of_one_are_nothing", "test_x20_a_key_stores", "test_who_leaves_a_websocket")
_OTHER = (
    "SqliteStore",
    "keys.txt",
    "Keys.read",
    "clock",
    "CliRunner",
    "check_address",
    "monkeypatch.setattr",
)
"""What a test says that looks into SQLite, into a file of keys, or at the clock."""

for suite in (test_keys, test_tenants, test_quotas, test_key_terms):
    for name, test in list(vars(suite).items()):
        if name.startswith("test_") and callable(test):
            body = inspect.getsource(test)
            if not any(word in body for word in _OTHER):
                globals()[name] = test if name.startswith(_QUICK) else pytest.mark.soak(copied(test))

del test


@pytest.fixture(scope="module", autouse=True)
def postgres_store(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A schema for each folder. The keys that a test gives its server are those of the database."""
    from perdure.ext.cluster.postgres.store import PostgresStore

    urls: dict[Path, str] = {}

    def opened(folder: Path | None, readonly: bool) -> SessionStore:
        if folder is None:
            folder = tmp_path_factory.mktemp("memory")
        url = urls.setdefault(folder, postgres.url(folder))
        return PostgresStore(parse_place(url), readonly=readonly)

    class Filled(SharedKeyStore):
        """Has the keys that a test gave its server."""

        def share(self, keys: Keys, changed: Callable[[], object]) -> None:
            if not keys.has_file:
                for key in keys:
                    self.add(key)
            super().share(keys, changed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "open_folder", opened)
        patch.setattr(shared_keys, "SharedKeyStore", Filled)
        yield
