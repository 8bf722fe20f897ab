"""For extensions that look after the session store of a folder: its files, tables and rows."""

from perdure.cache.tiers.disk import DiskTier as DiskTier, Findings as Findings
from perdure.engine_config import STORE_BYTES as STORE_BYTES
from perdure.sessions.info import STREAM as STREAM
from perdure.sessions.store.sql.tables import (
    INSERT_SESSION as INSERT_SESSION,
    INSERT_TURN as INSERT_TURN,
    MEMORY_COLUMNS as MEMORY_COLUMNS,
    SESSION_COLUMNS as SESSION_COLUMNS,
    TURN as TURN,
    TURN_COLUMNS as TURN_COLUMNS,
    parse_turn as parse_turn,
    read_memory as read_memory,
    read_record as read_record,
    read_session as read_session,
    row_checksum as row_checksum,
    table_of as table_of,
    turn_values as turn_values,
)
from perdure.sessions.store.sqlite import FILE as FILE
from perdure.sessions.store.sqlite.folder import (
    KEY as KEY,
    MARK as MARK,
    MENDED as MENDED,
    SessionFolder as SessionFolder,
    UseLock as UseLock,
    opening_lock as opening_lock,
)
from perdure.sessions.store.sqlite.store import (
    MIGRATIONS as MIGRATIONS,
    USAGE as USAGE,
    SqliteStore as SqliteStore,
)
from perdure.sessions.turn import FIRST as FIRST
from perdure.store.index import APPLICATION as APPLICATION, unopened as unopened
