"""Numbers of sessions, turns and memories."""

from __future__ import annotations

from perdure.errors import CorruptStateError
from perdure.sessions.storage.rows import ADVICE
from perdure.sessions.storage.schema import seal
from perdure.store.index import Index


class Counters:
    """The last number of each table. A number is never given out again."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def next(self, table: str) -> int:
        """A number that nothing in `table` has or ever had."""
        number = self._last(table) + 1
        self._index.run(
            "UPDATE counter SET last = ?, seal = ? WHERE name = ?", number, seal(table, number), table
        )
        return number

    def check(self) -> None:
        """Prove what says which numbers were given out: `CorruptStateError` where it is damaged."""
        for table in ("session", "turn", "memory"):
            self._last(table)

    def _last(self, table: str) -> int:
        rows = self._index.rows("SELECT last, seal FROM counter WHERE name = ?", table)
        if not rows or seal(table, rows[0][0]) != rows[0][1]:
            raise CorruptStateError(f"the last number of a {table} is damaged: {ADVICE}")
        return int(rows[0][0])
