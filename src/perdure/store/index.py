"""What is in a store, in SQLite: numbered migrations, one writer, any number of readers."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perdure.errors import (
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreVersionError,
)

APPLICATION = 0x50455244
"""Marks the file as ours ("PERD")."""

MIGRATIONS: Sequence[str] = (
    """
    CREATE TABLE block (
        id BLOB PRIMARY KEY,
        parent BLOB NOT NULL,
        start INTEGER NOT NULL,
        tokens BLOB NOT NULL,
        has_rest INTEGER NOT NULL,
        nbytes INTEGER NOT NULL,
        used INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX block_parent ON block (parent);
    CREATE INDEX block_used ON block (used);
    CREATE TABLE record (
        number INTEGER PRIMARY KEY,
        namespace TEXT NOT NULL,
        tokens BLOB NOT NULL,
        kept INTEGER NOT NULL,
        leaf BLOB NOT NULL,
        UNIQUE (namespace, tokens)
    );
    CREATE TABLE label (
        record INTEGER NOT NULL REFERENCES record (number) ON DELETE CASCADE,
        name TEXT NOT NULL,
        PRIMARY KEY (record, name)
    ) WITHOUT ROWID;
    """,
)


class Index:
    """One connection to the index, used by one thread at a time.

    A change is on the disk when `writing` ends, or it never happened.
    """

    def __init__(self, path: Path, *, readonly: bool) -> None:
        self._path = path
        self._lock = threading.RLock()
        self.readonly = readonly
        mode = "ro" if readonly else "rwc"
        with self._typed():
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}",
                uri=True,
                check_same_thread=False,
                isolation_level=None,
                timeout=30,
            )
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def _prepare(self) -> None:
        if not self.readonly:
            self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA foreign_keys = ON")
        found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        known = len(MIGRATIONS)
        if found > known:
            raise StoreVersionError(
                f"{self._path} is of version {found}, this perdure knows up to {known}: update perdure",
                found=found,
                known=known,
            )
        mark = int(self._db.execute("PRAGMA application_id").fetchone()[0])
        if found and mark != APPLICATION:
            raise StoreError(f"{self._path} is a database, but not of a perdure store")
        if self.readonly and found < known:
            raise StoreReadOnlyError(f"{self._path} must be migrated first: open it once for writing")
        for number in range(found, known):
            with self.writing():
                for statement in MIGRATIONS[number].split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id = {APPLICATION}")
                self._db.execute(f"PRAGMA user_version = {number + 1}")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction: all of it, or on any error nothing."""
        if self.readonly:
            raise StoreReadOnlyError(f"{self._path} was opened for reading")
        with self._lock, self._typed():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def run(self, statement: str, *values: Any) -> None:
        """One statement of the transaction that `writing` has open."""
        with self._lock, self._typed():
            self._db.execute(statement, values)

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock, self._typed():
            return self._db.execute(query, values).fetchall()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "") or ""
            if name.startswith("SQLITE_FULL"):
                raise StoreFullError(f"no room left for {self._path}: free some space", needed=0) from error
            if name.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_CANTOPEN", "SQLITE_AUTH")):
                raise StoreReadOnlyError(f"cannot open {self._path}: {error}") from error
            if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
                raise StoreDamagedError(
                    f"the index {self._path} is damaged ({error}): `perdure cache verify` rebuilds it from "
                    "the files beside it"
                ) from error
            raise StoreError(f"the index {self._path} failed: {error}") from error
