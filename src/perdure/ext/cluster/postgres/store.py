"""The session store in PostgreSQL: for the replicas of several machines."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from pathlib import Path

from perdure import StoreError
from perdure.ext.cluster.postgres.accounts import Accounts
from perdure.ext.cluster.postgres.database import PostgresDatabase
from perdure.ext.cluster.postgres.leases import Leases
from perdure.ext.cluster.postgres.place import PostgresPlace
from perdure.ext.cluster.postgres.schema import DIALECT, Sequences
from perdure.spi.base import make_folder
from perdure.spi.sessions import NeverDamaged, Record, SqlStore


class PostgresStore(SqlStore):
    """`SessionStore` in a schema of a PostgreSQL database. For any thread.

    Changes of one namespace follow each other: each has the namespace's row until it is committed, and so
    sees all that those before it have done. Changes of different namespaces do not wait for each other.
    """

    def __init__(self, place: PostgresPlace, *, readonly: bool = False) -> None:
        self.readonly = readonly
        self.is_shared = True
        self.place = place
        with ExitStack() as stack:
            self.database = PostgresDatabase(place, readonly=readonly)
            stack.callback(self.database.close)
            super().__init__(self.database, DIALECT, Sequences(self.database), NeverDamaged())
            self.key: bytes | None = self._cluster_key()
            """What signs exports and shared state, the same for all replicas."""
            self.accounts = Accounts(self.database)
            """Keys of clients, and what they have used, over all replicas."""
            self._leases: Leases | None = None
            if not readonly:
                self._leases = Leases(self.database, place.lease, place.schema)
                stack.callback(self._leases.close)
            self._held = stack.pop_all()

    @property
    def key_store(self) -> object:
        # The server's: not there for programs that only use the library.
        from perdure.ext.cluster.shared_keys import SharedKeyStore

        return SharedKeyStore(self.accounts)

    def close(self) -> None:
        self._held.close()

    def own_folder(self) -> Path | None:
        """The folder of this machine."""
        return None if self.readonly else self.place.folder

    def transfers(self) -> Path | None:
        """The folder for files on their way in or out: in that of this machine."""
        if self.readonly:
            return None
        folder = self.place.folder / "transfers"
        make_folder(folder, ours=True)
        return folder

    def take(self, session: Record) -> bool:
        """Have a session for a turn or a change; False where another replica, or another runtime of this
        one, has it."""
        return self._leases is None or self._leases.take(session)

    def release(self, session: Record) -> None:
        if self._leases is not None:
            self._leases.release(session)

    # Inside.

    def _lock_namespace(self, namespace: str) -> None:
        self._db.run("INSERT INTO usage VALUES (?, 0, 0) ON CONFLICT (namespace) DO NOTHING", namespace)
        self._db.run("SELECT 1 FROM usage WHERE namespace = ? FOR UPDATE", namespace)

    def _fence(self, session: Record) -> None:
        if self._leases is not None:
            self._leases.fence(session)

    def _delete(self, session: Record) -> None:
        super()._delete(session)
        if self._leases is not None:
            self._leases.forget(session)

    def _cluster_key(self) -> bytes:
        if not self.readonly:
            self.database.change(
                "INSERT INTO register (id, key) VALUES (?, ?) ON CONFLICT (one) DO NOTHING",
                secrets.token_hex(16),
                secrets.token_bytes(32),
            )
        rows = self.database.rows("SELECT key FROM register")
        if not rows or len(rows[0][0]) != 32:
            raise StoreError(f"{self.place.shown} has no key: open it once for writing")
        return bytes(rows[0][0])
