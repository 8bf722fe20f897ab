"""For extensions that keep or change conversations."""

from perdure.sessions.fold import HEADING as HEADING, TurnStream as TurnStream
from perdure.sessions.history import History as History
from perdure.sessions.info import (
    RESPONSE as RESPONSE,
    Record as Record,
    check_session_name as check_session_name,
    is_record as is_record,
)
from perdure.sessions.pending_turn import TurnExtra as TurnExtra
from perdure.sessions.responses import respond as respond
from perdure.sessions.session import today as today
from perdure.sessions.sessions import Sessions as Sessions
from perdure.sessions.store.base import SessionStore as SessionStore
from perdure.sessions.store.registry import (
    encryption_of as encryption_of,
    has_sessions as has_sessions,
    open_store as open_store,
    store_folder as store_folder,
)
from perdure.sessions.store.remote import (
    FILE as FILE,
    RemoteStore as RemoteStore,
    remote_of as remote_of,
    url_in as url_in,
)
from perdure.sessions.store.sql.database import (
    Database as Database,
    Dialect as Dialect,
    NeverDamaged as NeverDamaged,
)
from perdure.sessions.store.sql.store import SqlStore as SqlStore
from perdure.sessions.store.sql.tables import table_of as table_of
from perdure.sessions.store.sql.upkeep import (
    bring_memory as bring_memory,
    bring_session as bring_session,
    check_turn as check_turn,
    every_row as every_row,
    has_turn as has_turn,
    store_id as store_id,
)
from perdure.sessions.turn import (
    FIRST as FIRST,
    Turn as Turn,
    check_settings as check_settings,
    portable_settings as portable_settings,
    transcript as transcript,
)
