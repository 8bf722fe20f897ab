"""The tests of sessions once more, with the sessions in a PostgreSQL server."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from ext.cluster.servers import PostgresServer
from perdure.ext.cluster.postgres.place import parse_place
from perdure.sessions.store import registry
from perdure.sessions.store.base import SessionStore
from sessions import test_second_store
from subjects import Subject


def copied(test: Callable[..., None]) -> Callable[..., None]:
    """The same test as another object: a mark on it is not one on the first."""
    copy = types.FunctionType(
        test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__
    )
    copy.__kwdefaults__ = test.__kwdefaults__
    copy.__annotations__ = test.__annotations__
    copy.__dict__.update(
        {name: list(value) if name == "pytestmark" else value for name, value in vars(test).items()}
    )
    return copy


_QUICK = re.compile(r"test_(d2|d4|w5|x7)_|test_d1_two|test_a_session_goes_on|test_a_fork|test_a_name_is")
"""What every run tries, by names. All of it is in `make soak`."""

for name, test in list(vars(test_second_store).items()):
    if name.startswith("test_") and callable(test):
        globals()[name] = test if _QUICK.match(name) else pytest.mark.soak(copied(test))


@pytest.fixture(autouse=True)
def postgres_store(
    monkeypatch: pytest.MonkeyPatch, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A schema for each folder, for as long as the test: a restart finds it again."""
    from perdure.ext.cluster.postgres.store import PostgresStore

    urls: dict[Path, str] = {}

    def opened(folder: Path | None, readonly: bool) -> SessionStore:
        if folder is None:
            folder = tmp_path_factory.mktemp("memory")
        url = urls.setdefault(folder, postgres.url(folder))
        return PostgresStore(parse_place(url), readonly=readonly)

    monkeypatch.setattr(registry, "open_folder", opened)


@pytest.fixture
def subject(toy: Subject) -> Subject:
    return toy
