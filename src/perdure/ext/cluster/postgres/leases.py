"""Leases of sessions over all replicas: each runs out, and has a fencing token.

A replica says every third of a lease that it is there. One that says nothing for a whole lease loses its
sessions to the next that asks, and so does one whose connection the server has seen break: a process that was
killed is missed at once. Each `take` counts the token up, and a change compares it within its transaction: a
replica that was thought dead and comes back is refused, and has changed nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import zlib
from contextlib import suppress
from queue import Empty, SimpleQueue

import psycopg

from perdure import PerdureError, SessionError, SessionNotFoundError
from perdure.ext.cluster.postgres.database import PostgresDatabase
from perdure.spi.runtime import BackgroundThread
from perdure.spi.sessions import Record, table_of

log = logging.getLogger("perdure.sessions")

# Nobody deletes the session before the lease is written, and a deletion takes the lease along.
_TAKE = """
    WITH there AS (SELECT number FROM {} WHERE number = ? FOR KEY SHARE)
    INSERT INTO lease AS l (session, token, holder, expires)
    SELECT number, 1, ?, clock_timestamp() + make_interval(secs => ?) FROM there
    ON CONFLICT (session) DO UPDATE
    SET token = l.token + 1, holder = excluded.holder, expires = excluded.expires
    WHERE l.holder IS NULL OR l.expires < clock_timestamp() OR l.holder = ?
    RETURNING token
"""


class Leases:
    """The leases of one store object. For any thread.

    Always holds: what `fence` lets pass is committed before another can take the session.
    """

    def __init__(self, database: PostgresDatabase, seconds: float, schema: str) -> None:
        self._db = database
        self._seconds = seconds
        self._holders = zlib.crc32(f"perdure {schema}".encode()) >> 1
        """The first number of the lock that a holder keeps for as long as its connection lives; the second is
        its own. Locks are of a database, and each schema in it counts its holders from 1."""
        self._tokens: dict[int, int] = {}
        """By session, what was given at `take`; kept when a lease is lost, so that it is refused."""
        self._taking: set[int] = set()
        """Sessions whose lease is being asked for."""
        self._changing = threading.RLock()
        """Reentrant: the garbage collector may drop a job, and so release its session, in a call."""
        self._ending = threading.Event()
        self._left: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        """Leases that the thread is to give back, by session and token; None to wake it."""
        [(number,)] = database.rows("SELECT nextval('holder_number') % 2147483647")
        self._holder = int(number)
        self._presence: psycopg.Connection[tuple[object, ...]] | None = None
        self._be_present()
        self._thread = BackgroundThread(self._keep_leases, name="perdure-leases", restart=True)
        self._thread.start()

    def take(self, session: Record) -> bool:
        """Have a session or a record until `release`; False where another has it."""
        number = session.number
        with self._changing:
            if number in self._taking:
                return False
            self._taking.add(number)
        try:
            if number in self._tokens and not self._is_lost(number):
                return False
            # A lease that is written down as this one's, and was not given, is one whose answer was lost.
            token = self._take(session, nobody=self._holder)
            if token is None and (gone := self._holder_gone(number)) is not None:
                token = self._take(session, nobody=gone)
            if token is not None:
                self._tokens[number] = token
            elif not self._db.rows("SELECT 1 FROM lease WHERE session = ?", number):
                raise SessionNotFoundError(f"session {session.name!r} was deleted")
            return token is not None
        finally:
            with self._changing:
                self._taking.discard(number)

    def release(self, session: Record) -> None:
        with self._changing:
            token = self._tokens.pop(session.number, None)
        if token is None or self._ending.is_set():
            return
        if _in_event_loop():
            # A job that its client has left is dropped there: nobody waits for the server then.
            self._left.put((session.number, token))
        else:
            self._give_back(session.number, token)

    def fence(self, session: Record) -> None:
        """Within a transaction: refuse a holder whose lease another has taken since. Nobody takes it before
        the transaction ends."""
        with self._changing:
            token = self._tokens.get(session.number)
        if token is None:
            return
        rows = self._db.rows("SELECT token FROM lease WHERE session = ? FOR SHARE", session.number)
        if rows and rows[0][0] != token:
            raise SessionError(f"session {session.name!r} was taken over by another: nothing was done")

    def forget(self, session: Record) -> None:
        """Within the transaction that deletes a session: drop its lease."""
        self._db.run("DELETE FROM lease WHERE session = ?", session.number)

    def close(self) -> None:
        self._ending.set()
        self._left.put(None)
        self._thread.join(self._seconds)
        with suppress(PerdureError):
            self._db.change(
                "UPDATE lease SET holder = NULL, expires = '-infinity' WHERE holder = ?", self._holder
            )
        if self._presence is not None:
            self._presence.close()

    # Inside.

    def _take(self, session: Record, *, nobody: int) -> int | None:
        """The token of a lease that was free, run out, or of the holder `nobody`."""
        take = _TAKE.format(table_of(session.kind))
        rows = self._db.change(take, session.number, self._holder, self._seconds, nobody)
        return int(rows[0][0]) if rows else None

    def _holder_gone(self, session: int) -> int | None:
        """The holder of a lease, where the server has seen its connection break."""
        rows = self._db.rows(
            "SELECT l.holder FROM lease l WHERE l.session = ? AND NOT EXISTS ("
            " SELECT 1 FROM pg_locks k WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2"
            " AND k.classid = ? AND k.objid = l.holder"
            " AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database()))",
            session,
            self._holders,
        )
        return int(rows[0][0]) if rows and rows[0][0] is not None else None

    def _is_lost(self, session: int) -> bool:
        """Whether a lease that was taken here is another's by now, or ran out."""
        rows = self._db.rows(
            "SELECT token, holder, expires < clock_timestamp() FROM lease WHERE session = ?", session
        )
        return not rows or rows[0][0] != self._tokens.get(session) or rows[0][1] != self._holder

    def _give_back(self, session: int, token: int) -> None:
        # A server that cannot be reached now lets it run out.
        with suppress(PerdureError):
            self._db.change(
                "UPDATE lease SET holder = NULL, expires = '-infinity'"
                " WHERE session = ? AND token = ? AND holder = ?",
                session,
                token,
                self._holder,
            )

    def _keep_leases(self) -> None:
        """Renew the leases every third of their time, and give back those that were left."""
        due, failing = time.monotonic() + self._seconds / 3, False
        while not self._ending.is_set():
            with suppress(Empty):
                if (left := self._left.get(timeout=max(0.0, due - time.monotonic()))) is not None:
                    self._give_back(*left)
            if time.monotonic() >= due:
                due, failing = time.monotonic() + self._seconds / 3, not self._renew(failing=failing)

    def _renew(self, *, failing: bool) -> bool:
        """Whether the lease was renewed; only the first failure is logged."""
        try:
            self._be_present()
            self._db.change(
                "UPDATE lease SET expires = clock_timestamp() + make_interval(secs => ?)"
                " WHERE holder = ? AND session = ANY(?)",
                self._seconds,
                self._holder,
                list(self._tokens),
            )
            return True
        except PerdureError as error:
            if not failing:
                log.warning("leases cannot be renewed: %s", error)
        except Exception:
            log.exception("leases cannot be renewed")
        return False

    def _be_present(self) -> None:
        """Have a connection that the server sees break when this process ends, however it ends."""
        if self._presence is not None:
            with suppress(psycopg.Error):
                self._presence.execute("SELECT 1")
                return
            self._presence.close()
            self._presence = None
        made = self._db.connect()
        try:
            made.execute("SET idle_session_timeout = 0")
            made.execute("SELECT pg_advisory_lock(%s, %s)", [self._holders, self._holder])
        except BaseException:
            made.close()
            raise
        self._presence = made


def _in_event_loop() -> bool:
    """Whether this thread is one that must not wait."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
