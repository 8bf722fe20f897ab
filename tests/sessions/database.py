"""The database below sessions, for tests of what lies in it."""

from __future__ import annotations

from perdure.sessions.sessions import Sessions
from perdure.sessions.store.sqlite.store import SqliteStore
from perdure.store.index import Index


def index_of(sessions: Sessions) -> Index:
    assert isinstance(sessions.store, SqliteStore)
    return sessions.store.index
