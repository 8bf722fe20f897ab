"""A database below a session store: its calls, and its dialect of SQL.

    rows(query, *values)      what is there; within `writing` of the same thread, with its changes so far
    run(statement, *values)   one statement of the transaction that `writing` has open
    writing()                 a transaction: all of it, or on any error nothing
    reading_apart()           `rows` for what takes long: nobody waits for it

Values are marked by `?`. Who may call: any thread. Errors are those of `perdure.errors`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


class Database(Protocol):
    """Where the rows of sessions are."""

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]: ...

    def run(self, statement: str, *values: Any) -> None: ...

    def replace(self, statement: str, *values: Any) -> None:
        """`run` for a deletion of words that are kept elsewhere: nothing is erased for it."""
        ...

    def writing(self) -> AbstractContextManager[None]: ...

    def reading_apart(self) -> AbstractContextManager[Callable[..., list[tuple[Any, ...]]]]: ...


class Numbers(Protocol):
    """Numbers of sessions, turns and memories."""

    def next(self, table: str) -> int:
        """A number that nothing in `table` has or ever had, and larger than those before."""
        ...

    def check(self) -> None:
        """Prove what says which numbers were given out: `CorruptStateError` where it is damaged."""
        ...


class Check(Protocol):
    """Whether rows can be missed: what is found proves itself, what is missed does not."""

    def wait(self) -> None: ...

    def refuse_damaged(self) -> None: ...


class NeverDamaged:
    """The `Check` of a database with built-in checksums, or in memory."""

    def wait(self) -> None:
        pass

    def refuse_damaged(self) -> None:
        pass


COUNTED = {
    "turn": ("messages", "reply", "text", "tokens", "cuts", "settings", "usage", "model"),
    "session": ("namespace", "name", "kind", "settings", "origin"),
    "record": ("namespace", "name", "kind", "settings", "origin"),
    "memory": ("namespace", "session", "label", "kind", "note"),
    "file": ("namespace", "digest", "data"),
}
"""The columns of each table whose length a client has a say in. The rest of a row is of a fixed length."""
ROW_BYTES = 256
"""What a row counts besides: its numbers, checksums and entries in indexes. Else many short rows would fill a
disk and count for nothing."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Expressions that databases write differently. `t` is a turn."""

    length: str
    """The bytes of a column, of which `{}` is the name; 0 where it has nothing."""
    saying: str
    """Whether a text was said in a turn; the text is given twice."""
    last_said: str
    """The content of the last message of a turn."""
    replied: str
    """The content of its reply."""
    contains: str
    """Whether a column has a text in it, in any case of ASCII letters; `{}` is the column."""

    @property
    def turn_bytes(self) -> str:
        """What a turn takes, without the overhead of the database."""
        return " + ".join(self.length.format(f"t.{column}") for column in COUNTED["turn"])

    def row_bytes(self, table: str) -> str:
        """What a row of a table counts in the usage of its namespace; the table has its own name."""
        return " + ".join(
            [str(ROW_BYTES), *(self.length.format(f"{table}.{column}") for column in COUNTED[table])]
        )

    def counted(self, table: str) -> str:
        """What a row of a table counts among sessions. A pending turn is part of one, and a record of an
        extension has a colon in its kind."""
        plain = "record.kind = replace(record.kind, ':', '')"
        record = f"CASE WHEN record.kind != 'pending' AND {plain} THEN 1 ELSE 0 END"
        counts = {"session": "1", "record": record}
        return counts.get(table, "0")

    @property
    def usage(self) -> str:
        """What each namespace stores: sessions and records, and bytes of their rows, of those of its
        memories and files, and of the turns that they lead to."""
        files = f"UNION ALL SELECT namespace, 0, {self.row_bytes('file')} FROM file"
        return self._counting(files)

    @property
    def usage_without_files(self) -> str:
        """The same, for migrations of a version that had none."""
        return self._counting("")

    def _counting(self, more: str) -> str:
        return f"""
    WITH RECURSIVE up (namespace, number) AS (
        SELECT namespace, head FROM session UNION SELECT namespace, turn FROM memory
        UNION SELECT namespace, head FROM record WHERE head IS NOT NULL
        UNION SELECT up.namespace, t.parent FROM up JOIN turn t ON t.number = up.number
        WHERE t.parent IS NOT NULL
    ), counted (namespace, sessions, nbytes) AS (
        SELECT namespace, 1, {self.row_bytes("session")} FROM session
        UNION ALL SELECT namespace, {self.counted("record")}, {self.row_bytes("record")} FROM record
        UNION ALL SELECT namespace, 0, {self.row_bytes("memory")} FROM memory
        UNION ALL SELECT up.namespace, 0, {self.row_bytes("turn")}
        FROM up JOIN turn ON turn.number = up.number
        {more}
    )
    SELECT namespace, sum(sessions), sum(nbytes) FROM counted GROUP BY namespace
"""

    @property
    def spoken(self) -> str:
        """The turns that lead to some heads (`{heads}`), those before others first, and whether a text was
        said in each."""
        return f"""
    WITH RECURSIVE own (number, parent) AS (
        SELECT t.number, t.parent FROM turn t WHERE t.number IN ({{heads}})
        UNION SELECT t.number, t.parent FROM own JOIN turn t ON t.number = own.parent
    )
    SELECT own.number, own.parent, {self.saying}
    FROM own JOIN turn t ON t.number = own.number ORDER BY own.number
"""
