"""A database below a session store: its calls, and what it says in SQL of its own.

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
    """The `Check` of a database that has checksums of its own."""

    def wait(self) -> None:
        pass

    def refuse_damaged(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Dialect:
    """Expressions that databases write differently. `t` is a turn."""

    turn_bytes: str
    """What a turn takes, without the overhead of the database."""
    saying: str
    """Whether a text was said in a turn; the text is given twice."""
    last_said: str
    """The content of the last message of a turn."""
    replied: str
    """The content of its reply."""
    contains: str
    """Whether a column has a text in it, in any case of ASCII letters; `{}` is the column."""

    @property
    def usage(self) -> str:
        """What each namespace stores: sessions, and bytes of the turns that they and its memories lead to."""
        return f"""
    WITH RECURSIVE up (namespace, number) AS (
        SELECT namespace, head FROM session UNION SELECT namespace, turn FROM memory
        UNION SELECT up.namespace, t.parent FROM up JOIN turn t ON t.number = up.number
        WHERE t.parent IS NOT NULL
    )
    SELECT up.namespace, (SELECT count(*) FROM session s WHERE s.namespace = up.namespace),
    sum({self.turn_bytes}) FROM up JOIN turn t ON t.number = up.number GROUP BY up.namespace
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
