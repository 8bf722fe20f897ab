"""For extensions that keep or change conversations."""

from perdure.sessions.fold import HEADING, TurnStream
from perdure.sessions.history import History
from perdure.sessions.info import RESPONSE, Record, check_session_name, is_record
from perdure.sessions.pending_turn import TurnExtra
from perdure.sessions.responses import respond
from perdure.sessions.session import today
from perdure.sessions.sessions import Sessions
from perdure.sessions.store.base import SessionStore
from perdure.sessions.store.registry import encryption_of, has_sessions, open_store, store_folder
from perdure.sessions.store.remote import FILE, RemoteStore, remote_of, url_in
from perdure.sessions.store.sql.database import Database, Dialect, NeverDamaged
from perdure.sessions.store.sql.store import SqlStore
from perdure.sessions.store.sql.tables import table_of
from perdure.sessions.store.sql.upkeep import (
    bring_memory,
    bring_session,
    check_turn,
    every_row,
    has_turn,
    store_id,
)
from perdure.sessions.turn import FIRST, Turn, check_settings, portable_settings, transcript

__all__ = [
    "FILE",
    "FIRST",
    "HEADING",
    "RESPONSE",
    "Database",
    "Dialect",
    "History",
    "NeverDamaged",
    "Record",
    "RemoteStore",
    "SessionStore",
    "Sessions",
    "SqlStore",
    "Turn",
    "TurnExtra",
    "TurnStream",
    "bring_memory",
    "bring_session",
    "check_session_name",
    "check_settings",
    "check_turn",
    "encryption_of",
    "every_row",
    "has_sessions",
    "has_turn",
    "is_record",
    "open_store",
    "portable_settings",
    "remote_of",
    "respond",
    "store_folder",
    "store_id",
    "table_of",
    "today",
    "transcript",
    "url_in",
]
