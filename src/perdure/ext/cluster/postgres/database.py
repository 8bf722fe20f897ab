"""A pool of connections to PostgreSQL: every wait is bounded, and the end of a transaction is known.

What a server that hangs would keep waiting is given up by a clock of this process: a stopped server says
nothing, and its own timeouts stop with it. A connection that was lost before COMMIT was sent has changed
nothing. One that was lost after that is in doubt: the server is asked by the transaction's number how it
ended, and only where nobody answers in time does the caller get an error that says that it is not known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import psycopg
from psycopg import errors as pg
from psycopg.abc import PQGen
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from perdure import (
    InvalidInputError,
    SessionExistsError,
    SessionNotFoundError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreVersionError,
)
from perdure.ext.cluster.postgres.place import PostgresPlace
from perdure.ext.cluster.postgres.schema import MIGRATIONS
from perdure.spi.base import check_may_wait

_CHECK = 2.0
"""Seconds for a connection that was idle to show that it lives."""
_SEARCH = 60.0
"""Seconds for a statement of a search, which reads everything that a namespace has."""
_IDLE = 5.0
"""Seconds after which the server ends a transaction whose process says nothing: a process that was stopped
within a change must not stop everybody else."""
_STALLED = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND usename = current_user AND application_name = 'perdure'
    AND state = 'active' AND wait_event = 'ClientRead' AND xact_start IS NOT NULL
    AND state_change < clock_timestamp() - make_interval(secs => %s)
"""
"""The same for a process that was stopped between statements of a pipeline: to the server it is not idle, and
none of the server's timeouts ends that."""
_DOUBT = 20.0
"""Seconds in which it must be found out how a transaction ended."""
_WAKEN = 0.25
_LOST = (None, "57P01", "57P02", "57P03", "08003", "08006")
"""What an error says whose connection is gone: nothing, or that the server is going down or coming up."""
_MIGRATING = 0x50455244
"""The advisory lock for creating and migrating tables."""

R = TypeVar("R")


class _NoAnswerError(psycopg.OperationalError):
    """The server said nothing in time."""


class _Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose every wait ends: `patience` seconds without an answer close it."""

    patience = _SEARCH

    def wait(self, gen: PQGen[R], interval: float = _WAKEN, timeout: float | None = None) -> R:
        more = {} if timeout is None else {"timeout": timeout}
        try:
            return super().wait(_bounded(gen, self.patience), min(interval, _WAKEN), **more)
        except _NoAnswerError:
            # What it would say later is an answer to something else.
            self.close()
            raise


def _bounded(gen: PQGen[R], patience: float) -> PQGen[R]:
    """What `gen` does, but for no longer than that without a sign of the server."""
    deadline = time.monotonic() + patience
    try:
        value = next(gen)
        while True:
            ready = yield value
            if ready:
                deadline = time.monotonic() + patience
            elif time.monotonic() > deadline:
                gen.close()
                raise _NoAnswerError(f"no answer for {patience:g} s")
            value = gen.send(ready)
    except StopIteration as stop:
        return cast(R, stop.value)


class PostgresDatabase:
    """A `Database` in PostgreSQL, for any thread.

    Always holds: a change is durable on the server when `writing` ends, or it never happened; where neither
    can be found out, the error says so. No call waits longer than its bound for a server that hangs.
    """

    def __init__(self, place: PostgresPlace, *, readonly: bool) -> None:
        self._place = place
        self.readonly = readonly
        self._closed = False
        self._own = threading.local()
        """The connection of the transaction that a thread has open."""
        self._options: dict[str, Any] = {
            "autocommit": True,
            "connect_timeout": max(2, int(place.timeout)),
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": int(place.timeout * 1000),
            "application_name": "perdure",
        }
        self._pool: ConnectionPool[_Connection] = ConnectionPool(
            place.conninfo,
            connection_class=_Connection,
            kwargs=self._options,
            min_size=1,
            max_size=place.pool,
            timeout=place.timeout,
            reconnect_timeout=0,
            configure=self._configure,
            open=False,
            name="perdure",
        )
        # Directly first: the pool would try for long, and say only that it could not.
        with self._typed(), self._connected() as connection:
            if readonly:
                self._check_version(connection)
            else:
                self._migrate(connection)
        with self._typed():
            self._pool.open()

    # Use.

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction: all of it, or on any error nothing."""
        if self.readonly:
            raise StoreReadOnlyError(f"{self._place.shown} was opened for reading")
        if getattr(self._own, "connection", None) is not None:
            raise StoreError("a transaction of this thread is open already")
        with self._typed(), self._checked_out("BEGIN") as connection:
            self._own.connection = connection
            try:
                # A statement whose result nobody reads does not wait for its answer.
                with connection.pipeline():
                    yield
                    # Asked for within the transaction, so that it has a number.
                    [number] = connection.execute("SELECT pg_current_xact_id()::text").fetchone() or ("",)
            except BaseException:
                self._own.connection = None
                with suppress(psycopg.Error):
                    connection.execute("ROLLBACK")
                raise
            self._own.connection = None
            self._commit(connection, number)

    def run(self, statement: str, *values: Any) -> None:
        """One statement of the transaction that `writing` has open."""
        connection = self._transaction()
        if connection is None:
            raise StoreError("a change of the sessions belongs into a transaction")
        with self._typed():
            self._execute(connection, statement, values)

    replace = run
    """The server erases nothing by itself."""

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What is there; inside a transaction, with its changes so far."""
        with self._typed():
            connection = self._transaction()
            if connection is not None:
                return self._fetched(connection, query, values)
            try:
                with self._checked_out() as connection:
                    return self._fetched(connection, query, values)
            except pg.OperationalError as error:
                if isinstance(error, _NoAnswerError) or error.sqlstate not in _LOST:
                    raise
            # The server was restarted meanwhile: to read again changes nothing.
            with self._checked_out("") as connection:
                return self._fetched(connection, query, values)

    def change(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """One statement that is a transaction by itself, and what it returns."""
        if self.readonly:
            raise StoreReadOnlyError(f"{self._place.shown} was opened for reading")
        with self._typed(), self._checked_out("") as connection:
            cursor = self._execute(connection, statement, values)
            return [] if cursor.description is None else _plain_rows(cursor)

    @contextmanager
    def reading_apart(self) -> Iterator[Callable[..., list[tuple[Any, ...]]]]:
        """`rows` over a separate connection, for long queries: nobody else waits for them."""
        check_may_wait("a store was touched")
        with self._typed(), self._connected() as connection:
            connection.patience = _SEARCH
            connection.execute(f"SET statement_timeout = {int(_SEARCH * 1000)}")

            def rows(query: str, *values: Any) -> list[tuple[Any, ...]]:
                with self._typed():
                    return self._fetched(connection, query, values)

            yield rows

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """One more connection, which the caller closes."""
        with self._typed():
            return self._connect()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.close(timeout=1.0)

    # Inside.

    def _transaction(self) -> _Connection | None:
        check_may_wait("a store was touched")
        if self._closed:
            raise StoreError(f"{self._place.shown} cannot be used: it was closed")
        return getattr(self._own, "connection", None)

    @contextmanager
    def _checked_out(self, first: str | None = None) -> Iterator[_Connection]:
        """A connection of the pool; with a `first` statement, one that has answered it."""
        self._transaction()
        deadline = time.monotonic() + self._place.timeout
        while True:
            connection = self._pool.getconn(max(0.1, deadline - time.monotonic()))
            try:
                if first is not None:
                    connection.patience = min(_CHECK, self._place.timeout)
                    connection.execute(first)
                    connection.patience = self._place.timeout
                break
            except psycopg.OperationalError:
                # It was idle while the server was restarted, or cannot be reached any more: try another.
                connection.close()
                self._pool.putconn(connection)
                if time.monotonic() > deadline:
                    raise
        try:
            yield connection
        finally:
            self._pool.putconn(connection)

    def _connect(self) -> _Connection:
        connection = _Connection.connect(self._place.conninfo, **self._options)
        try:
            self._configure(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _connected(self) -> Iterator[_Connection]:
        connection = self._connect()
        try:
            yield connection
        finally:
            connection.close()

    def _configure(self, connection: _Connection) -> None:
        connection.patience = self._place.timeout
        bound = int(self._place.timeout * 1000)
        # Names of tables are ours alone, whatever else is in the database.
        connection.execute(
            f'SET search_path = "{self._place.schema}";'
            f"SET statement_timeout = {bound};"
            f"SET lock_timeout = {bound};"
            f"SET idle_in_transaction_session_timeout = {int(_IDLE * 1000)};"
            f"SET default_transaction_read_only = {'on' if self.readonly else 'off'};"
            # A commit that is acknowledged is on the disk, whatever the server's own setting is.
            "SET synchronous_commit = on"
        )

    def _commit(self, connection: _Connection, number: str) -> None:
        try:
            connection.execute("COMMIT")
        except psycopg.OperationalError as error:
            if connection.closed or connection.broken:
                self._find_out(number, error)
            else:
                raise

    def _find_out(self, number: str, error: psycopg.OperationalError) -> None:
        """How a transaction ended whose COMMIT was sent; an error unless it was kept."""
        deadline = time.monotonic() + _DOUBT
        pause = threading.Event()
        while time.monotonic() < deadline:
            with suppress(psycopg.Error), self._connected() as connection:
                connection.patience = max(0.5, min(self._place.timeout, deadline - time.monotonic()))
                row = connection.execute("SELECT pg_xact_status(%s::xid8)", [number]).fetchone()
                if row == ("committed",):
                    return
                if row != ("in progress",):
                    raise StoreError(f"the change was not kept: the connection was lost ({_said(error)})")
            pause.wait(0.1)
        raise StoreError(
            "the connection was lost while a change was being kept, and the server did not say in "
            f"{_DOUBT:g} s whether it was: read the session again before you go on ({_said(error)})"
        )

    def _fetched(self, connection: _Connection, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return _plain_rows(self._execute(connection, query, values))

    def _execute(
        self, connection: _Connection, query: str, values: tuple[Any, ...]
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        statement = query.replace("%", "%%").replace("?", "%s") if values else query
        return connection.execute(statement.encode(), [_escaped(value) for value in values] or None)

    def _end_stalled(self) -> None:
        """End the transactions of processes that hang in the middle of them: a process that waited for one
        may try again."""
        with suppress(psycopg.Error), self._connected() as connection:
            connection.execute(_STALLED, [_IDLE])

    # Migrations.

    def _version(self, connection: _Connection) -> int | None:
        """The last migration; None where there are no tables of ours."""
        row = connection.execute(
            "SELECT to_regclass(%s) IS NOT NULL", [f'"{self._place.schema}".migration']
        ).fetchone()
        if row != (True,):
            return None
        row = connection.execute("SELECT coalesce(max(number), 0) FROM migration").fetchone()
        version = int(row[0]) if row else 0
        if version > len(MIGRATIONS):
            raise StoreVersionError(
                f"{self._place.shown} is of version {version}, this perdure knows up to {len(MIGRATIONS)}: "
                "update perdure",
                found=version,
                known=len(MIGRATIONS),
            )
        return version

    def _check_version(self, connection: _Connection) -> None:
        version = self._version(connection)
        if version is None:
            raise StoreError(f"there are no sessions in {self._place.shown} yet")
        if version < len(MIGRATIONS):
            raise StoreReadOnlyError(
                f"{self._place.shown} is of an older version and is migrated when it is opened for writing: "
                "start `perdure serve` or `perdure chat --session NAME` on it once"
            )

    def _migrate(self, connection: _Connection) -> None:
        if self._version(connection) == len(MIGRATIONS):
            return
        # Every replica may be the first: one of them migrates, and the others find it done.
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MIGRATING])
            connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{self._place.schema}"')
            version = self._version(connection)
            if version is None:
                connection.execute(
                    "CREATE TABLE migration (number INTEGER PRIMARY KEY, name TEXT NOT NULL,"
                    " at TIMESTAMPTZ NOT NULL DEFAULT now())"
                )
            for number, (name, statements) in enumerate(MIGRATIONS, 1):
                if number > (version or 0):
                    connection.execute(statements.encode())
                    connection.execute("INSERT INTO migration VALUES (%s, %s)", [number, name])

    @contextmanager
    def _typed(self) -> Iterator[None]:
        where = self._place.shown
        try:
            yield
        except pg.UniqueViolation as error:
            raise SessionExistsError(
                "a session of that name was made at the same moment: choose another name, or delete it"
            ) from error
        except pg.ForeignKeyViolation as error:
            raise SessionNotFoundError("the turn to go on from was deleted") from error
        except (pg.DiskFull, pg.OutOfMemory) as error:
            raise StoreFullError(f"{where} has no room: {_said(error)}", needed=0) from error
        except (pg.ReadOnlySqlTransaction, pg.InsufficientPrivilege) as error:
            raise StoreReadOnlyError(f"{where} may not be written: {_said(error)}") from error
        except (pg.DataCorrupted, pg.IndexCorrupted, pg.UndefinedTable, pg.UndefinedColumn) as error:
            raise StoreDamagedError(f"{where} is damaged ({_said(error)}): restore it from a copy") from error
        except (psycopg.DataError, psycopg.ProgrammingError, OverflowError) as error:
            raise InvalidInputError(f"this cannot be kept in PostgreSQL: {_said(error)}") from error
        except (pg.LockNotAvailable, pg.QueryCanceled) as error:
            self._end_stalled()
            raise StoreError(
                f"{where} did not get to it in {self._place.timeout:g} s, nothing was done: try again "
                f"({_said(error)})"
            ) from error
        except (psycopg.Error, PoolTimeout, PoolClosed, TooManyRequests) as error:
            raise StoreError(
                f"{where} cannot be reached, nothing was done: try again ({_said(error)})"
            ) from error


def _said(error: BaseException) -> str:
    """The first line of what PostgreSQL says: the rest repeats the statement."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# PostgreSQL's text has no NUL in it. A text with one, or with the sign that stands for it, is written in
# other control characters, and read back as it was.

_SIGN = "\x01"


def _plain_rows(cursor: psycopg.Cursor[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [tuple(_unescaped(value) for value in row) for row in cursor.fetchall()]


def _escaped(value: Any) -> Any:
    if isinstance(value, str) and ("\0" in value or _SIGN in value):
        return value.replace(_SIGN, _SIGN * 2).replace("\0", f"{_SIGN}\x02")
    return value


def _unescaped(value: Any) -> Any:
    if isinstance(value, str) and _SIGN in value:
        return "".join(_plain(value))
    return value


def _plain(text: str) -> Generator[str, None, None]:
    signs = iter(text)
    for sign in signs:
        yield ("\0" if next(signs, "") == "\x02" else _SIGN) if sign == _SIGN else sign
