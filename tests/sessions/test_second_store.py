"""The tests of sessions once more, on a second session store: nothing above the contract knows SQLite."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from perdure.sessions.store import registry
from perdure.sessions.store.base import SessionStore
from sessions import test_fold, test_handles, test_memory, test_session
from sessions.memory_store import Data, MemoryStore
from subjects import Subject

SUITES = (test_session, test_fold, test_handles, test_memory)
_OF_SQLITE = ("index_of", "SqliteStore", "memory_table", "children", "readonly", "sqlite", "copytree")
"""What a test says that looks into a database, or that locks a file."""

for suite in SUITES:
    for name, test in list(vars(suite).items()):
        if name.startswith("test_") and callable(test):
            body = inspect.getsource(test)
            if not any(word in body for word in _OF_SQLITE):
                globals()[name] = test


@pytest.fixture(autouse=True)
def second_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a folder holds stays for as long as the test: a restart finds it again."""
    folders: dict[Path | None, Data] = {}

    def opened(folder: Path | None, readonly: bool) -> SessionStore:
        data = folders.setdefault(folder, Data()) if folder is not None else Data()
        return MemoryStore(data, readonly=readonly, shared=folder is not None)

    monkeypatch.setattr(registry, "open_folder", opened)


@pytest.fixture
def subject(toy: Subject) -> Subject:
    return toy
