"""The folder of a session store: its files, and the locks between the processes that use it."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from perdure import system
from perdure.atomic import (
    TABLE_BYTES,
    make_folder,
    read_file,
    read_text,
    sync_folder,
    translate_os_errors,
    write_file,
)
from perdure.errors import StoreDamagedError, StoreLockedError
from perdure.sessions.store.sqlite import FILE
from perdure.store.index import Index
from perdure.system import processes

MARK, MENDED, KEY = "sessions.id", "sessions.mended", "sessions.key"
"""Whose the database is; what a repair that was interrupted has left; what signs exports."""
TRANSFERS = "transfers"
"""The folder of files that are on their way in or out."""
_BEFORE = "sessions.version-{}.sqlite"
"""The database as it was before it was migrated from a version."""
_BEFORE_DAYS = 7
"""That it stays: sessions that are deleted meanwhile are still in it."""

logger = logging.getLogger("perdure.sessions")


@dataclass(frozen=True, slots=True)
class SessionFolder:
    """Where a session store lies. A database of another store is not taken for this one's."""

    path: Path

    @property
    def database(self) -> Path:
        return self.path / FILE

    def transfers(self) -> Path:
        """The folder for files on their way in or out."""
        folder = self.path / TRANSFERS
        make_folder(folder, ours=True)
        if system.is_root():
            # A backup that root makes must not keep the store's own user out.
            owner = self.path.stat()
            os.chown(folder, owner.st_uid, owner.st_gid)
        return folder

    def clear_leftovers(self) -> None:
        """Remove what killed processes have left, and copies of older versions that have been kept long
        enough."""
        shutil.rmtree(self.path / TRANSFERS, ignore_errors=True)
        with translate_os_errors(self.path):
            for path in self.path.glob(_BEFORE.format("*")):
                if path.stat().st_mtime < time.time() - _BEFORE_DAYS * 86400:
                    path.unlink(missing_ok=True)

    def keep_version(self, index: Index, version: int) -> None:
        """Copy the database before it is migrated from a version: whole, or not at all."""
        copy, kept = self.transfers() / _BEFORE.format(version), self.path / _BEFORE.format(version)
        index.copy_to(copy)
        with translate_os_errors(kept):
            os.replace(copy, kept)
        sync_folder(self.path)
        logger.warning(
            "the sessions in %s are migrated to this version of perdure; %s has them as they were and is "
            "deleted after %d days",
            self.path,
            kept.name,
            _BEFORE_DAYS,
        )

    def mark(self) -> str:
        """Whose the database must be; nothing is known of one that is new."""
        with translate_os_errors(self.path / MARK):
            try:
                return read_text(self.path / MARK, errors="replace").strip()
            except FileNotFoundError:
                return ""

    def check_there(self, known: str) -> None:
        """Raise where a database that was here is gone, or is being repaired."""
        if (self.path / MENDED).exists():
            raise StoreDamagedError(
                f"a repair of the sessions in {self.path} was interrupted: `perdure sessions verify` ends it"
            )
        with translate_os_errors(self.database):
            gone = known and not (self.database.exists() and self.database.stat().st_size)
        if gone:
            raise StoreDamagedError(
                f"{self.database} is gone: restore it from a copy, or delete {MARK} beside it to begin "
                "without any session"
            )

    def check_own(self, own: object, known: str, *, readonly: bool) -> None:
        """Raise where the database with the id `own` is another store's; one that is new is marked."""
        if not isinstance(own, str) or not own or (known and own != known):
            raise StoreDamagedError(
                f"{self.database} is not the one that was here: restore it from a copy, or if it is to take "
                f"its place, delete {MARK} beside it"
            )
        if not known and not readonly:
            self._write(MARK, own.encode())

    def key(self, *, readonly: bool) -> bytes | None:
        """The store's own secret: it never leaves the folder."""
        path = self.path / KEY
        with translate_os_errors(path):
            try:
                key = read_file(path, TABLE_BYTES)
            except FileNotFoundError:
                key = b""
        if len(key) == 32:
            return key
        if readonly:
            return None
        # Without it, or if it was damaged, older exports are still read, but their state is not known again.
        made = secrets.token_bytes(32)
        self._write(KEY, made)
        return made

    def _write(self, name: str, content: bytes) -> None:
        write_file(self.path / name, [content])
        sync_folder(self.path)


# Locks between the processes that use one store. The system drops them with a process, however it ends.

USERS, TURNS = "sessions.users", "sessions.turns"


class UseLock:
    """Held while a store's sessions are in use: by many at once, or by one that needs them `alone`.

    A process opens a store while no other does: `first` is whether nobody else had it then.
    """

    def __init__(self, folder: Path, *, alone: bool = False) -> None:
        from perdure.store.owner import described

        self._handle = _opened(folder / USERS)
        self.first = processes.lock_file(self._handle)
        # Windows shares no locks: there, one process has a store alone.
        if not (self.first if alone or not system.POSIX else processes.lock_file(self._handle, shared=True)):
            os.close(self._handle)
            raise StoreLockedError(
                f"the sessions in {folder} are in use by {described(folder)}: close that one, or choose "
                "another store"
            )

    def release(self) -> None:
        os.close(self._handle)


@dataclass(slots=True, eq=False)
class _LockFile:
    """The lock file of one store in this process. It is open once: the system would drop all locks on it as
    soon as any handle to it is closed."""

    handle: int
    users: int = 0
    taken: set[int] = field(default_factory=set)


_FILES: dict[str, _LockFile] = {}
_CHANGING = threading.RLock()
"""Reentrant: the garbage collector may drop a job, and so release its session, in the middle of a call."""


class TurnLocks:
    """Which sessions are answering a turn or are being changed, over all processes that use a store."""

    def __init__(self, folder: Path) -> None:
        self._path = os.path.realpath(folder / TURNS)
        with _CHANGING:
            if self._path not in _FILES:
                _FILES[self._path] = _LockFile(_opened(folder / TURNS))
            self._file = _FILES[self._path]
            self._file.users += 1
        self._taken: set[int] = set()
        """Those that were taken through this one: others of this process have theirs in the same file."""

    def take(self, session: int) -> bool:
        """Have the session of that number until `release`; False where another has it."""
        with _CHANGING:
            if session in self._file.taken or not processes.lock_byte(self._file.handle, session):
                return False
            self._file.taken.add(session)
            self._taken.add(session)
            return True

    def release(self, session: int) -> None:
        with _CHANGING:
            # A job may outlive the runtime that it was for, and release what another has taken since.
            if session in self._taken and _FILES.get(self._path) is self._file:
                self._taken.discard(session)
                self._file.taken.discard(session)
                processes.unlock_byte(self._file.handle, session)

    def close(self) -> None:
        with _CHANGING:
            for session in list(self._taken):
                self.release(session)
            self._file.users -= 1
            if not self._file.users:
                del _FILES[self._path]
                os.close(self._file.handle)


def _opened(path: Path) -> int:
    with translate_os_errors(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | system.BINARY, 0o600)


_OPENING, _PATIENCE = "sessions.opening", 60.0
"""Held while a database is created, migrated and checked; and how many seconds one waits for others."""


@contextmanager
def opening_lock(folder: Path) -> Iterator[None]:
    """While this is open, no other process opens the sessions in `folder` for writing."""
    lock = FileLock(folder / _OPENING, timeout=_PATIENCE, thread_local=False, mode=0o600)
    with ExitStack() as stack:
        with translate_os_errors(folder):
            stack.enter_context(lock)
        yield
