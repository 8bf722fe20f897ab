"""The turns of a database: each is proved by the digest of the next, and written once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.errors import CorruptStateError, SessionNotFoundError
from perdure.sessions.history import TurnPage, TurnReference
from perdure.sessions.store.sqlite.schema import (
    ADVICE,
    INSERT_TURN,
    TURN,
    TURN_BYTES,
    TURN_COLUMNS,
    Counters,
    read_turn,
    row_checksum,
    turn_checksum,
    turn_values,
)
from perdure.sessions.turn import FIRST, Turn
from perdure.store.index import Index


class TurnTable:
    """Turns, a row each.

    Always holds: a turn is written once and whole, after the one before it, and is proved when it is read.
    """

    def __init__(self, index: Index, counters: Counters) -> None:
        self._index = index
        self._counters = counters

    def chain(self, head: int, name: str = "") -> tuple[Sequence[int], Sequence[Turn]]:
        """The turns that lead to `head`, with it, each proved by its digest. `name` is whose they are."""
        chunk = self._chunk(head, None, -1, name)
        return chunk.numbers, chunk.turns

    def read(self, place: TurnReference, count: int, name: str) -> TurnPage:
        """The turn at `place` and those before it, up to `count`, each proved by the digest of the next."""
        return self._chunk(place.head, place, count, name)

    def start(self, head: int, name: str) -> Turn:
        """The start of the session that stands at `head`. Of the turns between, only the places are read."""
        return self.chain(self._path(head, name, 0)[0][0], name)[1][0]

    def page(self, head: int, name: str, *, after: int, limit: int | None, nbytes: int | None) -> list[Turn]:
        """The turns that lead to `head`, behind depth `after`: up to `limit`, and to `nbytes` together."""
        rows = [row for row in self._path(head, name, max(0, after)) if row[2] > after]
        rows = rows[:limit]
        turns: list[Turn] = []
        taken = 0
        for number, parent, *_ in rows:
            found = self._index.rows(f"SELECT {TURN_BYTES}, {TURN} FROM turn t WHERE t.number = ?", number)
            if not found:
                raise CorruptStateError(
                    f"turn {after + 1 + len(turns)} of session {name!r} is gone: {ADVICE}"
                )
            [(size, *row)] = found
            taken += size
            if turns and nbytes is not None and taken > nbytes:
                break
            before = turns[-1].digest if turns else FIRST if parent is None else self._digest(parent)
            turns.append(self._proved(row, before, after + 1 + len(turns), f"of session {name!r}"))
        return turns

    def nbytes(self, head: int) -> int:
        """What the turns that lead to `head` take, without the overhead of the database."""
        [(total,)] = self._index.rows(
            "WITH RECURSIVE up (number, parent) AS ("
            " SELECT number, parent FROM turn WHERE number = ?"
            " UNION ALL SELECT t.number, t.parent FROM turn t JOIN up ON t.number = up.parent"
            " WHERE t.number < up.number"
            f") SELECT coalesce(sum({TURN_BYTES}), 0) FROM up JOIN turn t ON t.number = up.number",
            head,
        )
        return int(total)

    def size(self, number: int) -> int:
        """What one turn takes."""
        rows = self._index.rows(f"SELECT {TURN_BYTES} FROM turn t WHERE number = ?", number)
        return int(rows[0][0]) if rows else 0

    def check(self, number: int, digest: bytes) -> int:
        """The depth of a turn, which must be there and be that very one."""
        found = self._index.rows(f"SELECT {', '.join(TURN_COLUMNS)}, seal FROM turn WHERE number = ?", number)
        if not found:
            raise SessionNotFoundError("the turn to go on from was deleted")
        if row_checksum(*found[0][:-1]) != found[0][-1] or found[0][3] != digest:
            raise CorruptStateError(f"the turn that this one goes on from is damaged: {ADVICE}")
        return int(found[0][2])

    def add(self, parent: int | None, turn: Turn) -> int:
        """Write a turn behind turn number `parent`; its own number. The only way into the table."""
        depth = 0 if parent is None else self.check(parent, turn.before) + 1
        number = self._counters.next("turn")
        turn.check_readable()
        self._index.run(INSERT_TURN, *turn_values(number, parent, depth, turn))
        return number

    def _chunk(self, head: int, place: TurnReference | None, count: int, name: str) -> TurnPage:
        rows = self._index.rows(
            "WITH RECURSIVE up (number, parent, level) AS ("
            " SELECT number, parent, 0 FROM turn WHERE number = ?"
            # A turn is younger than the one before it: whatever was damaged, this ends.
            " UNION ALL SELECT t.number, t.parent, level + 1 FROM turn t JOIN up ON t.number = up.parent"
            " WHERE t.number < up.number LIMIT ?"
            f") SELECT up.parent, {TURN} FROM up JOIN turn t ON t.number = up.number ORDER BY up.level DESC",
            head,
            count,
        )
        of = f"of session {name!r}" if name else "of a session"
        parent = rows[0][0] if rows else None
        first = 0 if parent is None or place is None else place.depth + 1 - len(rows)
        before = FIRST if parent is None else self._digest(parent)
        numbers: list[int] = []
        turns: list[Turn] = []
        for _, *row in rows:
            turn = self._proved(row, before, first + len(turns), of)
            numbers.append(int(row[0]))
            turns.append(turn)
            before = turn.digest
        if not turns or (parent is None) != (turns[0].kind == "start") or (parent is not None and first < 1):
            raise CorruptStateError(f"the turns {of} do not lead back to its start: {ADVICE}")
        whole = place is None or parent is not None or len(turns) == place.depth + 1
        if not whole or (place is not None and before != place.digest):
            raise CorruptStateError(f"the turns {of} are not those that led to it: {ADVICE}")
        return TurnPage(
            numbers, turns, None if parent is None else TurnReference(parent, turns[0].before, first - 1)
        )

    def _path(self, head: int, name: str, depth: int) -> list[tuple[Any, ...]]:
        """Number, parent, depth and digest of the turns that lead to `head`, from a depth on, each proved by
        its checksum."""
        columns = ", ".join(f"t.{column}" for column in (*TURN_COLUMNS, "seal"))
        rows = self._index.rows(
            f"WITH RECURSIVE up ({', '.join((*TURN_COLUMNS, 'seal'))}) AS ("
            f" SELECT {columns} FROM turn t WHERE number = ?"
            f" UNION ALL SELECT {columns} FROM turn t JOIN up ON t.number = up.parent"
            " WHERE t.number < up.number AND up.depth > ?) SELECT * FROM up",
            head,
            depth,
        )
        whole = bool(rows) and all(turn_checksum(*row[:-1]) == row[-1] for row in rows)
        if not whole or (rows[-1][1] is None) != (rows[-1][2] == 0) or rows[-1][2] > depth:
            raise CorruptStateError(f"the turns of session {name!r} do not lead back to its start: {ADVICE}")
        return rows[::-1]

    def _proved(self, row: Sequence[Any], before: bytes, depth: int, of: str) -> Turn:
        try:
            return read_turn(row, before)
        except CorruptStateError as error:
            raise CorruptStateError(f"turn {depth} {of} {error}: {ADVICE}") from error

    def _digest(self, turn: int) -> bytes:
        """What the turn after it was made behind, as it lies: that one proves it."""
        found = self._index.rows("SELECT digest FROM turn WHERE number = ?", turn)
        return found[0][0] if found and isinstance(found[0][0], bytes) else b""
