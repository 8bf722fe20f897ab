"""Rows of sessions, turns and memories: how they are written, read and proved. The same in every database."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from perdure.chat.message import Message
from perdure.chat.transcript import Transcript
from perdure.checks import is_whole
from perdure.errors import CorruptStateError, InvalidInputError
from perdure.sessions.info import SessionInfo, SessionMemory
from perdure.sessions.store.sql.database import Database
from perdure.sessions.turn import Turn, pack_tokens

Rows = Callable[..., list[tuple[Any, ...]]]
"""Runs a query with its values."""
Value = str | int | float | bytes | None
"""What a column can hold."""


def row_checksum(*values: Value) -> bytes:
    """What proves a row: SQLite has no checksums, so a bit that turns over on the disk is read as it lies.

    It lies in the column `seal`, and the SQL of migrations knows it by that name.
    """
    plain = [["bytes", value.hex()] if isinstance(value, bytes) else value for value in values]
    return hashlib.sha256(b"perdure/row/1\0" + json.dumps(plain).encode()).digest()


def turn_checksum(number: int, parent: int | None, depth: int, digest: Value) -> bytes:
    """The `row_checksum` of a turn, made faster: on the way to a start, every turn's is checked."""
    if not isinstance(digest, bytes):
        return b""
    above = "null" if parent is None else parent
    place = f'[{number}, {above}, {depth}, ["bytes", "{digest.hex()}"]]'
    return hashlib.sha256(b"perdure/row/1\0" + place.encode()).digest()


TURN_COLUMNS = ("number", "parent", "depth", "digest")
"""Its place. What was said is proved by the digest, which is also over all that led there."""
SESSION_COLUMNS = (
    "number",
    "namespace",
    "name",
    "kind",
    "head",
    "settings",
    "origin",
    "created",
    "updated",
)
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

SESSION = (
    f"SELECT {', '.join(f's.{column}' for column in SESSION_COLUMNS)}, t.depth, t.digest, s.seal, t.usage"
    " FROM session s LEFT JOIN turn t ON t.number = s.head"
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


def text_rows(database: Database, query: str, *values: Value) -> list[tuple[Any, ...]]:
    """Rows found by what a caller gave, which may be no text at all."""
    with valid_text():
        return database.rows(query, *values)


@contextmanager
def valid_text() -> Iterator[None]:
    """Within it, text that UTF-8 cannot write is told as the caller's mistake."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"this is not valid Unicode text: {error}") from None


def row_limit(limit: int | None) -> int:
    """How many rows a query returns at most: every database takes the largest number for all."""
    if limit is None:
        return 2**63 - 1
    if not is_whole(limit) or not 0 < limit < 2**31:
        raise InvalidInputError(f"limit is None or a number from 1, got {limit!r}")
    return limit


def read_session(row: Sequence[Value]) -> SessionInfo:
    """The session in a row of `SESSION`."""
    *said, depth, digest, found, usage = row
    number, namespace, name, kind, head, settings, origin, created, updated = said
    if row_checksum(*said, depth, digest) != found:
        raise CorruptStateError(f"the entry of session {name!r} is damaged, or the turn it names is gone")
    # What is proved was once written by us.
    return SessionInfo(
        number=number,  # type: ignore[arg-type]
        namespace=namespace,  # type: ignore[arg-type]
        name=name,  # type: ignore[arg-type]
        kind=kind,  # type: ignore[arg-type]
        head=head,  # type: ignore[arg-type]
        depth=depth,  # type: ignore[arg-type]
        settings=json.loads(settings),  # type: ignore[arg-type]
        origin=json.loads(origin),  # type: ignore[arg-type]
        created=created,  # type: ignore[arg-type]
        updated=updated,  # type: ignore[arg-type]
        digest=digest,  # type: ignore[arg-type]
        **_last_use(usage),
    )


def _last_use(usage: Value) -> dict[str, Any]:
    """What the last turn of a session says of its model and its length. The turn's own digest proves it where
    the turn is read; a list shows it as it lies."""
    try:
        facts = json.loads(usage) if isinstance(usage, str) else {}
    except ValueError:
        return {}
    if not isinstance(facts, dict):
        return {}
    counts = [facts.get(name) for name in ("prompt_tokens", "completion_tokens")]
    model = facts.get("model")
    return {
        "model": model if isinstance(model, str) else "",
        "tokens": sum(count for count in counts if is_whole(count)),
    }


def proved_session(row: Sequence[Any]) -> SessionInfo:
    """`read_session`, with what to do where it is damaged."""
    try:
        return read_session(row)
    except CorruptStateError as error:
        raise CorruptStateError(f"{error}: {ADVICE}") from error


def read_memory(row: Sequence[Any]) -> SessionMemory:
    """The memory in a row of `MEMORY`, if it is what its checksum says."""
    said = dict(zip(MEMORY_COLUMNS, row, strict=False))
    if row_checksum(*row[:-1]) != row[-1]:
        raise CorruptStateError(f"the memory {said['label']!r} of session {said['session']!r} is damaged")
    del said["turn"]
    return SessionMemory(turn=said.pop("depth"), **said)


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
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
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
        row_checksum(number, parent, depth, digest),
    ]
