"""What namespaces store: a row each, changed with every row that counts, and compared with their quotas.

ada    2 sessions    1,890 bytes    2 sessions, 3 turns and a memory: their texts, and 256 a row
"""

from __future__ import annotations

from perdure.errors import CorruptStateError, QuotaError
from perdure.sessions.info import NamespaceSize, Quota
from perdure.sessions.store.sql.database import Database, Dialect
from perdure.sessions.store.sql.tables import ADVICE


class UsageTable:
    """The table of what each namespace stores.

    Always holds: it is what `Dialect.usage` counts, since a row of a session, a record, a turn or a memory is
    added in the transaction that writes it, and removed in the one that deletes it.
    """

    def __init__(self, database: Database, dialect: Dialect) -> None:
        self._db = database
        self._sql = dialect
        self._quotas: dict[str, Quota] = {}

    def limit(self, namespace: str, quota: Quota | None) -> None:
        """What a namespace may store from now on; None lifts the bound."""
        if quota is None:
            self._quotas.pop(namespace, None)
        else:
            self._quotas[namespace] = quota

    def add(self, namespace: str, table: str, number: int, *, bounded: bool = True) -> None:
        """Count a row that was written; `QuotaError` beyond the quota, unless it is not `bounded`."""
        self._db.run(
            f"INSERT INTO usage SELECT ?, {self._sql.counted(table)}, {self._sql.row_bytes(table)}"
            f" FROM {table} WHERE number = ? ON CONFLICT (namespace) DO UPDATE"
            " SET sessions = usage.sessions + excluded.sessions, nbytes = usage.nbytes + excluded.nbytes",
            namespace,
            number,
        )
        quota = self._quotas.get(namespace)
        if quota is None or not bounded:
            return
        [(sessions, nbytes)] = self._db.rows(
            "SELECT sessions, nbytes FROM usage WHERE namespace = ?", namespace
        )
        most = quota.sessions if table in ("session", "record") else None
        for what, total, limit in (("sessions", sessions, most), ("bytes", nbytes, quota.nbytes)):
            if limit is not None and total > limit:
                raise QuotaError(
                    f"this key may store {limit} {what}, and with this it would be {total}: delete sessions, "
                    "responses or memories, or raise its limit",
                    needed=total,
                    limit=limit,
                )

    def remove(self, namespace: str, table: str, number: int) -> None:
        """Count a row no more that is about to go."""
        size = f"(SELECT {self._sql.row_bytes(table)} FROM {table} WHERE number = ?)"
        counts = f"(SELECT {self._sql.counted(table)} FROM {table} WHERE number = ?)"
        self._db.run(
            f"UPDATE usage SET sessions = CASE WHEN sessions > {counts} THEN sessions - {counts} ELSE 0 END,"
            f" nbytes = CASE WHEN nbytes > {size} THEN nbytes - {size} ELSE 0 END WHERE namespace = ?",
            *(number, number, number, number, namespace),
        )

    def sizes(self) -> list[NamespaceSize]:
        """What every namespace that has sessions stores, by its name."""
        rows = self._db.rows(
            "WITH RECURSIVE up (namespace, number) AS ("
            " SELECT namespace, head FROM session UNION SELECT namespace, head FROM record"
            " UNION SELECT up.namespace, t.parent FROM up JOIN turn t ON t.number = up.number"
            " WHERE t.parent IS NOT NULL"
            "), said (namespace, turns) AS ("
            " SELECT up.namespace, sum(CASE WHEN t.kind != 'start' THEN 1 ELSE 0 END)"
            " FROM up JOIN turn t ON t.number = up.number GROUP BY up.namespace"
            ") SELECT usage.namespace, usage.sessions, coalesce(said.turns, 0), usage.nbytes"
            " FROM usage LEFT JOIN said ON said.namespace = usage.namespace"
            " WHERE usage.sessions > 0 ORDER BY usage.namespace"
        )
        return [
            NamespaceSize(namespace=str(name), sessions=int(sessions), turns=int(turns), nbytes=int(nbytes))
            for name, sessions, turns, nbytes in rows
        ]

    def check(self) -> None:
        """Raise unless it is what is written."""
        stored = {row for row in self._db.rows("SELECT * FROM usage") if row[1] or row[2]}
        if stored != set(self._db.rows(self._sql.usage)):
            raise CorruptStateError(f"what namespaces store is not what was written down: {ADVICE}")
