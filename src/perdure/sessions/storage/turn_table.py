"""The turns of a database: each is proved by the digest of the next, and written once."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.errors import CorruptStateError, SessionNotFoundError
from perdure.sessions.history import Chunk, Place
from perdure.sessions.storage.schema import (
    ADVICE,
    INSERT_TURN,
    TURN,
    TURN_SEAL,
    Counters,
    check_readable,
    read_turn,
    seal,
    turn_seal,
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

    def read(self, place: Place, count: int, name: str) -> Chunk:
        """The turn at `place` and those before it, up to `count`, each proved by the digest of the next."""
        return self._chunk(place.head, place, count, name)

    def start(self, head: int, name: str) -> Turn:
        """The start of the session that stands at `head`. Of the turns between, only the places are read."""
        columns = ", ".join(f"t.{column}" for column in (*TURN_SEAL, "seal"))
        rows = self._index.rows(
            f"WITH RECURSIVE up ({', '.join((*TURN_SEAL, 'seal'))}) AS ("
            f" SELECT {columns} FROM turn t WHERE number = ?"
            f" UNION ALL SELECT {columns} FROM turn t JOIN up ON t.number = up.parent"
            " WHERE t.number < up.number) SELECT * FROM up",
            head,
        )
        whole = bool(rows) and rows[-1][1] is None and all(turn_seal(*row[:-1]) == row[-1] for row in rows)
        if not whole:
            raise CorruptStateError(f"the turns of session {name!r} do not lead back to its start: {ADVICE}")
        return self.chain(rows[-1][0], name)[1][0]

    def nbytes(self, head: int) -> int:
        """What the turns that lead to `head` take, without the overhead of the database."""
        [(total,)] = self._index.rows(
            "WITH RECURSIVE up (number, parent) AS ("
            " SELECT number, parent FROM turn WHERE number = ?"
            " UNION ALL SELECT t.number, t.parent FROM turn t JOIN up ON t.number = up.parent"
            " WHERE t.number < up.number"
            ") SELECT coalesce(sum(length(t.messages) + coalesce(length(t.reply), 0) + length(t.text)"
            " + length(t.tokens) + length(t.cuts) + length(t.settings) + length(t.usage)), 0)"
            " FROM up JOIN turn t ON t.number = up.number",
            head,
        )
        return int(total)

    def check(self, number: int, digest: bytes) -> int:
        """The depth of a turn, which must be there and be that very one."""
        found = self._index.rows(f"SELECT {', '.join(TURN_SEAL)}, seal FROM turn WHERE number = ?", number)
        if not found:
            raise SessionNotFoundError("the turn to go on from was deleted")
        if seal(*found[0][:-1]) != found[0][-1] or found[0][3] != digest:
            raise CorruptStateError(f"the turn that this one goes on from is damaged: {ADVICE}")
        return int(found[0][2])

    def add(self, parent: int | None, turn: Turn) -> int:
        """Write a turn behind turn number `parent`; its own number. The only way into the table."""
        depth = 0 if parent is None else self.check(parent, turn.before) + 1
        number = self._counters.next("turn")
        values = turn_values(number, parent, depth, turn)
        check_readable(values, turn)
        self._index.run(INSERT_TURN, *values)
        return number

    def _chunk(self, head: int, place: Place | None, count: int, name: str) -> Chunk:
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
            try:
                turn = read_turn(row, before)
            except CorruptStateError as error:
                raise CorruptStateError(f"turn {first + len(turns)} {of} {error}: {ADVICE}") from error
            numbers.append(int(row[0]))
            turns.append(turn)
            before = turn.digest
        if not turns or (parent is None) != (turns[0].kind == "start") or (parent is not None and first < 1):
            raise CorruptStateError(f"the turns {of} do not lead back to its start: {ADVICE}")
        whole = place is None or parent is not None or len(turns) == place.depth + 1
        if not whole or (place is not None and before != place.digest):
            raise CorruptStateError(f"the turns {of} are not those that led to it: {ADVICE}")
        return Chunk(numbers, turns, None if parent is None else Place(parent, turns[0].before, first - 1))

    def _digest(self, turn: int) -> bytes:
        """What the turn after it was made behind, as it lies: that one proves it."""
        found = self._index.rows("SELECT digest FROM turn WHERE number = ?", turn)
        return found[0][0] if found and isinstance(found[0][0], bytes) else b""
