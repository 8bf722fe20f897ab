"""The session store in SQLite: a database in the folder of a store, or in memory."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from pathlib import Path

from filelock import FileLock

from perdure.atomic import make_folder, translate_os_errors
from perdure.sessions.info import SessionInfo
from perdure.sessions.store.sql.rows import ADVICE, row_checksum
from perdure.sessions.store.sql.store import SqlStore
from perdure.sessions.store.sqlite.folder import SessionFolder, TurnLocks, UseLock
from perdure.sessions.store.sqlite.schema import DIALECT, MIGRATIONS, Counters
from perdure.store.index import Index, TableCheck

_OPENING, _PATIENCE = "sessions.opening", 60.0
"""Held while a database is created, migrated and checked; and how many seconds one waits for others."""


class SqliteStore(SqlStore):
    """`SessionStore` in a folder, or without one in memory. For any thread.

    SQLite lets one process write at a time, so no namespace is locked; locks of turns are the system's and
    end with a process, so no lease runs out.
    """

    def __init__(self, folder: Path | None, *, readonly: bool = False) -> None:
        """In `folder`, or without one in memory."""
        self.readonly = readonly
        self.is_shared = folder is not None
        self._files = SessionFolder(folder) if folder is not None else None
        self._turn_locks: TurnLocks | None = None
        with ExitStack() as held, ExitStack() as opening:
            known = ""
            if folder is not None and self._files is not None:
                if not readonly:
                    make_folder(folder)
                    lock = FileLock(folder / _OPENING, timeout=_PATIENCE, thread_local=False, mode=0o600)
                    with translate_os_errors(folder):
                        opening.enter_context(lock)
                    use = UseLock(folder)
                    held.callback(use.release)
                    if use.first:
                        # Of processes that were killed.
                        self._files.clear_transfers()
                    self._turn_locks = TurnLocks(folder)
                    held.callback(self._turn_locks.close)
                known = self._files.mark()
                self._files.check_there(known)
            self.index = Index(
                self._files.database if self._files is not None else None,
                readonly=readonly,
                migrations=MIGRATIONS,
                functions={"seal": row_checksum},
                advice=f"{ADVICE}; else restore it from a copy",
            )
            held.callback(self.index.close)
            # These have a few rows each, however much is kept.
            for table in ("register", "counter"):
                self.index.check(table)
            # So that none of these is missed: what is found through an index is all there is.
            check = TableCheck(self.index, ("session", "memory"))
            held.callback(check.close)
            super().__init__(self.index, DIALECT, Counters(self.index), check)
            self.key: bytes | None = secrets.token_bytes(32)
            """What signs exports, so that the state in them is known again. None where it may not be made."""
            if self._files is not None:
                own = next((row[0] for row in self.index.rows("SELECT id FROM register")), None)
                self._files.check_own(own, known, readonly=readonly)
                self.key = self._files.key(readonly=readonly)
            self._held = held.pop_all()

    def close(self) -> None:
        self._held.close()

    def transfers(self) -> Path | None:
        """The folder for files on their way in or out; None where the store has none, or may not be
        written."""
        return None if self._files is None or self.readonly else self._files.transfers()

    def take(self, session: SessionInfo) -> bool:
        """Have a session for a turn or a change; False where another process, or another runtime of this
        one, has it. Within a runtime, sessions see to that themselves."""
        return self._turn_locks is None or self._turn_locks.take(session.number)

    def release(self, session: SessionInfo) -> None:
        if self._turn_locks is not None:
            self._turn_locks.release(session.number)
