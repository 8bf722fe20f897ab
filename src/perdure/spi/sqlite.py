"""For extensions that look after the session store of a folder: its files, tables and rows."""

from perdure.cache.tiers.disk import DiskTier, Findings
from perdure.engine_config import STORE_BYTES
from perdure.sessions.info import STREAM
from perdure.sessions.store.sql.tables import (
    INSERT_SESSION,
    INSERT_TURN,
    MEMORY_COLUMNS,
    SESSION_COLUMNS,
    TURN,
    TURN_COLUMNS,
    parse_turn,
    read_memory,
    read_record,
    read_session,
    row_checksum,
    table_of,
    turn_values,
)
from perdure.sessions.store.sqlite import FILE
from perdure.sessions.store.sqlite.folder import KEY, MARK, MENDED, SessionFolder, UseLock, opening_lock
from perdure.sessions.store.sqlite.store import MIGRATIONS, USAGE, SqliteStore
from perdure.sessions.turn import FIRST
from perdure.store.index import APPLICATION, unopened

__all__ = [
    "APPLICATION",
    "FILE",
    "FIRST",
    "INSERT_SESSION",
    "INSERT_TURN",
    "KEY",
    "MARK",
    "MEMORY_COLUMNS",
    "MENDED",
    "MIGRATIONS",
    "SESSION_COLUMNS",
    "STORE_BYTES",
    "STREAM",
    "TURN",
    "TURN_COLUMNS",
    "USAGE",
    "DiskTier",
    "Findings",
    "SessionFolder",
    "SqliteStore",
    "UseLock",
    "opening_lock",
    "parse_turn",
    "read_memory",
    "read_record",
    "read_session",
    "row_checksum",
    "table_of",
    "turn_values",
    "unopened",
]
