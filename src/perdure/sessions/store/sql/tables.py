"""Sessions, turns and memories in a database: how rows are written, read and proved.

The same in every database. A turn is proved by the digest of the next, and written once.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perdure.chat.message import Message
from perdure.chat.transcript import Transcript
from perdure.checks import is_whole
from perdure.errors import CorruptStateError, InvalidInputError, SessionNotFoundError
from perdure.sessions.history import TurnPage, TurnReference
from perdure.sessions.info import PENDING, Record, SessionInfo, SessionMemory, is_record
from perdure.sessions.store.sql.database import Database, Dialect, Numbers
from perdure.sessions.turn import FIRST, Turn, pack_tokens

Rows = Callable[..., list[tuple[Any, ...]]]
"""Runs a query with its values."""
Value = str | int | float | bytes | None
"""What a column can hold."""


_with_bytes = json.JSONEncoder(default=lambda value: ["bytes", value.hex()]).encode
_strict = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_decode = json.JSONDecoder().raw_decode


def row_checksum(*values: Value) -> bytes:
    """What proves a row: SQLite has no checksums, so a bit that turns over on the disk is read as it lies.

    It lies in the column `seal`, and the SQL of migrations knows it by that name.
    """
    return hashlib.sha256(b"perdure/row/1\0" + _with_bytes(values).encode()).digest()


def turn_checksum(number: int, parent: int | None, depth: int, digest: Value) -> bytes:
    """The `row_checksum` of a turn, made faster: on the way to a start, every turn's is checked."""
    if not isinstance(digest, bytes):
        return b""
    above = "null" if parent is None else parent
    place = f'[{number}, {above}, {depth}, ["bytes", "{digest.hex()}"]]'
    return hashlib.sha256(b"perdure/row/1\0" + place.encode()).digest()


TURN_COLUMNS = ("number", "parent", "depth", "digest")
"""Its place. What was said is proved by the digest, which is also over all that led there."""
SESSION_COLUMNS = ("number", "namespace", "name", "kind", "head", "settings", "origin", "created", "updated")
"""And then the depth and the digest of the turn at which it stands."""
MEMORY_COLUMNS = (
    "number",
    "namespace",
    "session",
    "turn",
    "depth",
    "label",
    "kind",
    "note",
    "digest",
    "created",
)

_STANDING = (
    f"SELECT {', '.join(f's.{column}' for column in SESSION_COLUMNS)}, t.depth, t.digest, s.seal, t.usage"
    " FROM {} s LEFT JOIN turn t ON t.number = s.head"
)
SESSION, RECORD = _STANDING.format("session"), _STANDING.format("record")
"""A record has the columns of a session, and may stand at no turn."""
PENDING_NUMBER = (
    "(SELECT p.number FROM record p WHERE p.namespace = s.namespace"
    f" AND p.kind = '{PENDING}' AND p.name = CAST(s.number AS TEXT))"
)
"""The number of the record of the pending turn of a session `s`."""
INSERT_SESSION = (
    f"INSERT INTO {{}} ({', '.join(SESSION_COLUMNS)}, seal)"
    f" VALUES ({', '.join('?' * (len(SESSION_COLUMNS) + 1))})"
)
TURN = (
    "t.number, t.kind, t.messages, t.reply, t.keep_chars, t.keep_tokens, t.text, t.tokens, t.cuts,"
    " t.settings, t.seed, t.finish_reason, t.usage, t.dropped, t.model, t.created, t.digest"
)
_FIELDS = (
    "kind, messages, reply, keep_chars, keep_tokens, text, tokens, cuts, settings, seed, finish_reason,"
    " usage, dropped, model, created, digest"
)
MEMORY = (
    f"SELECT {', '.join(f'm.{column}' for column in MEMORY_COLUMNS)}, m.seal"
    " FROM memory m LEFT JOIN turn t ON t.number = m.turn"
)
INSERT_TURN = (
    f"INSERT INTO turn (number, parent, depth, {_FIELDS}, seal)"
    f" VALUES ({', '.join('?' * (len(_FIELDS.split(',')) + 4))})"
)
ADVICE = "`perdure sessions verify` keeps what can be proved and puts the rest aside"


def text_rows(rows: Rows, query: str, *values: Value) -> list[tuple[Any, ...]]:
    """Rows found by what a caller gave, which may be no text at all."""
    try:
        return rows(query, *values)
    except UnicodeEncodeError as error:
        raise invalid_text(error) from None


def check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid_text(error) from None


def invalid_text(error: UnicodeEncodeError) -> InvalidInputError:
    return InvalidInputError(f"this is not valid Unicode text: {error}")


def row_limit(limit: int | None) -> int:
    """How many rows a query returns at most: every database takes the largest number for all."""
    if limit is None:
        return 2**63 - 1
    if not is_whole(limit) or not 0 < limit < 2**31:
        raise InvalidInputError(f"limit is None or a number from 1, got {limit!r}")
    return limit


def table_of(kind: str) -> str:
    """The table that has sessions, or records, of a kind."""
    return "record" if is_record(kind) else "session"


def read_record(row: Sequence[Any], advice: str = "") -> Record:
    """The session or record in a row of `SESSION` or `RECORD`, if it is what its checksum says."""
    check_session(row, advice)
    columns = dict(zip(SESSION_COLUMNS, row, strict=False))
    *_, depth, digest, _, usage = row
    # What is proved was once written by us.
    columns["origin"] = _decode(columns["origin"])[0]
    settings = _decode(columns.pop("settings"))[0]
    if columns["head"] is None:
        del columns["head"]
        return Record(**columns)
    return SessionInfo(**columns, settings=settings, depth=depth, digest=digest, **_last_use(usage))


def read_session(row: Sequence[Any], advice: str = "") -> SessionInfo:
    """The same of a row that stands at a turn."""
    record = read_record(row, advice)
    assert isinstance(record, SessionInfo)
    return record


def check_session(row: Sequence[Value], advice: str = "") -> None:
    """Raise unless a row of `SESSION` or `RECORD` is what its checksum says."""
    *columns, checksum, _ = row
    if row_checksum(*columns) != checksum:
        message = f"the entry of session {row[2]!r} is damaged, or the turn it names is gone"
        raise CorruptStateError(message + advice)


def _last_use(usage: Value) -> dict[str, Any]:
    """What the last turn of a session says of its model and its length. The turn's own digest proves it where
    the turn is read; a list shows it as it lies."""
    try:
        facts = _decode(usage)[0]  # type: ignore[arg-type]
        model, counts = facts.get("model"), (facts.get("prompt_tokens"), facts.get("completion_tokens"))
    except (TypeError, ValueError, AttributeError):
        return {}
    return {"model": model if isinstance(model, str) else "", "tokens": sum(filter(is_whole, counts))}


def proved_record(row: Sequence[Any]) -> Record:
    """`read_record`, with what to do where it is damaged."""
    return read_record(row, f": {ADVICE}")


def proved_session(row: Sequence[Any]) -> SessionInfo:
    """`read_session`, with what to do where it is damaged."""
    return read_session(row, f": {ADVICE}")


def read_memory(row: Sequence[Any]) -> SessionMemory:
    """The memory in a row of `MEMORY`, if it is what its checksum says."""
    columns = dict(zip(MEMORY_COLUMNS, row, strict=False))
    if row_checksum(*row[:-1]) != row[-1]:
        raise CorruptStateError(
            f"the memory {columns['label']!r} of session {columns['session']!r} is damaged"
        )
    del columns["turn"]
    return SessionMemory(turn=columns.pop("depth"), **columns)


def read_turn(row: Sequence[Any], before: bytes) -> Turn:
    """The turn in a row of `TURN`, if it is what its digest says."""
    turn = parse_turn(row, before)
    if turn.digest != row[-1]:
        raise CorruptStateError("is not what its digest says: it was damaged or replaced")
    return turn


def parse_turn(row: Sequence[Any], before: bytes) -> Turn:
    """What a row of `TURN` says, proved by nothing yet."""
    _, kind, messages, reply, chars, tokens, text, ids, cuts, settings, seed, *rest = row
    reason, usage, dropped, model, created, _ = rest
    try:
        figures = array("q", cuts)
        turn = Turn(
            kind=kind,
            messages=tuple(Message.parse(message) for message in json.loads(messages)),
            reply=Message.parse(json.loads(reply)) if reply is not None else None,
            keep=(chars, tokens),
            added=Transcript(text, array("i", ids), tuple(zip(figures[::2], figures[1::2], strict=True))),
            settings=json.loads(settings),
            seed=seed,
            finish_reason=reason,
            usage=json.loads(usage),
            dropped=dropped,
            model=model,
            created=created,
            before=before,
        )
        turn.digest  # noqa: B018
    except (TypeError, ValueError, AttributeError, RecursionError, InvalidInputError) as error:
        raise CorruptStateError(f"is damaged ({error})") from error
    return turn


def json_text(value: Mapping[str, Any]) -> str:
    """A column of JSON that anybody can be shown; `InvalidInputError` where it could not be."""
    try:
        _strict(value).encode()
        return json.dumps(value)
    except UnicodeEncodeError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"this cannot be written as JSON: {error}") from None


def turn_values(number: int, parent: int | None, depth: int, turn: Turn) -> list[Value]:
    """What `INSERT_TURN` writes."""
    cuts = array("q", [figure for cut in turn.added.cuts for figure in cut])
    digest = turn.digest
    return [
        number,
        parent,
        depth,
        turn.kind,
        json.dumps([message.to_dict() for message in turn.messages]),
        json.dumps(turn.reply.to_dict()) if turn.reply is not None else None,
        *turn.keep,
        turn.added.text,
        pack_tokens(turn.added.tokens),
        cuts.tobytes(),
        json.dumps(dict(turn.settings)),
        turn.seed,
        turn.finish_reason,
        json.dumps(dict(turn.usage)),
        turn.dropped,
        turn.model,
        turn.created,
        digest,
        turn_checksum(number, parent, depth, digest),
    ]


class TurnTable:
    """Turns, a row each.

    Always holds: a turn is written once and whole, after the one before it, and is proved when it is read.
    """

    def __init__(self, database: Database, dialect: Dialect, numbers: Numbers) -> None:
        self._db = database
        self._sql = dialect
        self._numbers = numbers

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
            sized = self._db.rows(
                f"SELECT {self._sql.turn_bytes}, {TURN} FROM turn t WHERE t.number = ?", number
            )
            if not sized:
                raise CorruptStateError(
                    f"turn {after + 1 + len(turns)} of session {name!r} is gone: {ADVICE}"
                )
            [(size, *row)] = sized
            taken += size
            if turns and nbytes is not None and taken > nbytes:
                break
            before = turns[-1].digest if turns else FIRST if parent is None else self._digest(parent)
            turns.append(self._proved(row, before, after + 1 + len(turns), f"of session {name!r}"))
        return turns

    def nbytes(self, head: int) -> int:
        """What the turns that lead to `head` take, without the overhead of the database."""
        [(total,)] = self._db.rows(
            "WITH RECURSIVE up (number, parent) AS ("
            " SELECT number, parent FROM turn WHERE number = ?"
            " UNION ALL SELECT t.number, t.parent FROM turn t JOIN up ON t.number = up.parent"
            " WHERE t.number < up.number"
            f") SELECT coalesce(sum({self._sql.turn_bytes}), 0) FROM up JOIN turn t ON t.number = up.number",
            head,
        )
        return int(total)

    def check(self, number: int, digest: bytes) -> TurnReference:
        """A turn, which must be there and be that very one."""
        rows = self._db.rows(f"SELECT {', '.join(TURN_COLUMNS)}, seal FROM turn WHERE number = ?", number)
        if not rows:
            raise SessionNotFoundError("the turn to go on from was deleted")
        [(*place, checksum)] = rows
        if turn_checksum(*place) != checksum or place[3] != digest:
            raise CorruptStateError(f"the turn that this one goes on from is damaged: {ADVICE}")
        return TurnReference(number, digest, place[2])

    def add(self, parent: TurnReference | None, turn: Turn) -> TurnReference:
        """Write a turn behind another. The only way into the table."""
        if parent is not None and parent.digest != turn.before:
            raise CorruptStateError(f"a turn does not go on from the one before it: {ADVICE}")
        number, depth = self._numbers.next("turn"), 0 if parent is None else parent.depth + 1
        turn.check_readable()
        self._db.run(INSERT_TURN, *turn_values(number, parent.head if parent else None, depth, turn))
        return TurnReference(number, turn.digest, depth)

    def _chunk(self, head: int, place: TurnReference | None, count: int, name: str) -> TurnPage:
        rows = self._db.rows(
            "WITH RECURSIVE up (number, parent, level) AS ("
            " SELECT number, parent, 0 FROM turn WHERE number = ?"
            # A turn is younger than the one before it: whatever was damaged, this ends.
            " UNION ALL SELECT t.number, t.parent, level + 1 FROM turn t JOIN up ON t.number = up.parent"
            " WHERE t.number < up.number AND (? < 0 OR level + 1 < ?)"
            f") SELECT up.parent, {TURN} FROM up JOIN turn t ON t.number = up.number ORDER BY up.level DESC",
            head,
            count,
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
        rows = self._db.rows(
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
        rows = self._db.rows("SELECT digest FROM turn WHERE number = ?", turn)
        return rows[0][0] if rows and isinstance(rows[0][0], bytes) else b""
