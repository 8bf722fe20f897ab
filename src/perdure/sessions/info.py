"""What is listed of sessions and memories, and the addresses of memories."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from perdure.errors import InvalidInputError

_SCHEME = "perdure://"
_DIGITS = 9
"""Of the number of a turn in an address, at most."""
NAME_LENGTH = 200
"""Characters of a session's name, at most."""
TITLE_LENGTH = 200
"""Characters of a session's title, at most."""
NOTE_CHARACTERS = 4096
"""Of a memory's note, at most."""
FILED = frozenset({"title", "folder", "pinned"})
"""Entries of a session's origin that a person sets: what it is called in lists, and where it stands there."""
RESPONSE = "response"
"""The kind of a record that is a stored response: it stands at a turn, as a session does."""
STREAM = "stream"
"""The kind of a record of a stream (`server/core/event_log.py`): it stands at none."""
PENDING = "pending"
"""The kind of a record of a pending turn (`sessions/pending_turn.py`): its name is its session's number."""
RECORDS = (RESPONSE, STREAM, PENDING)
"""Kinds that are kept apart from sessions: a record is found by its kind and name, and never listed."""
_CONTROL, _SURROGATE = re.compile("[\x00-\x1f\x7f]"), re.compile("[\ud800-\udfff]")


def is_record(kind: str) -> bool:
    """Whether what has that kind is a record. Those of extensions have a colon in it (`batches:file`), and
    count by their bytes alone."""
    return kind in RECORDS or ":" in kind


def name_problem(name: str) -> str | None:
    """Why a new session cannot be called that; None where it can. One rule for the library, the command, the
    server and the page: a name is part of an address on the web, where a slash would end it."""
    if not name:
        return "a session's name must not be empty"
    if len(name) > NAME_LENGTH:
        return f"a session's name has at most {NAME_LENGTH} characters, this one has {len(name)}"
    if "/" in name:
        other = name[:60].replace("/", "-")
        return f"a session's name has no slash, which would end it in an address: {other!r} would do"
    if name in (".", ".."):
        return "a session's name is not . or .., which stand for folders in an address"
    if _CONTROL.search(name):
        return "a session's name is one line without control characters"
    if _SURROGATE.search(name):
        return "a session's name is valid Unicode"
    return None


def check_session_name(name: object) -> None:
    """Refuse what no new session can be called. Older ones keep the names that they have."""
    if not isinstance(name, str):
        raise InvalidInputError(f"a session's name is a text, got {name!r}")
    if (problem := name_problem(name)) is not None:
        raise InvalidInputError(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is written down under a kind and a name. Its number is never given to another one."""

    number: int
    namespace: str
    name: str
    kind: str
    origin: Mapping[str, Any]
    """What it says: of a session, where it comes from."""
    created: float
    updated: float


Noted = TypeVar("Noted", bound=Record)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo(Record):
    """A session as it is listed, or a stored response: it stands at a turn."""

    head: int
    depth: int
    settings: Mapping[str, Any]
    digest: bytes
    """Of the turn at which it stands."""
    model: str = ""
    """The model that answered last, by its name; empty where that is not known."""
    tokens: int = 0
    """Of its last prompt and the reply to it: about what the conversation has."""

    @property
    def title(self) -> str:
        return str(self.origin.get("title", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMemory:
    """A labelled turn of a session, to come back to. `digest` proves what led there."""

    session: str
    turn: int
    label: str
    kind: str
    note: str
    digest: bytes
    created: float
    namespace: str = ""
    number: int = 0

    @property
    def address(self) -> str:
        return make_address(self.session, self.turn, self.label)

    @property
    def nbytes(self) -> int:
        """Of its texts."""
        return sum(len(each.encode()) for each in (self.session, self.label, self.kind, self.note))


def make_address(session: str, turn: int, label: str) -> str:
    return f"{_SCHEME}{quote(session, safe='')}/{turn}#{quote(label, safe='')}"


def parse_address(address: str) -> tuple[str, int, str]:
    """The session, turn and label of an address."""
    rest = address.removeprefix(_SCHEME)
    place, hash_, label = rest.partition("#")
    name, slash, turn = place.rpartition("/")
    numbered = turn.isascii() and turn.isdigit() and len(turn) <= _DIGITS
    if rest == address or not (hash_ and slash and name and label and numbered):
        raise InvalidInputError(f"{address!r} is no address: one looks like perdure://session/turn#label")
    return unquote(name), int(turn), unquote(label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What a namespace may store; None is without a bound."""

    sessions: int | None = None
    """Sessions, stored responses among them."""
    nbytes: int | None = None
    """Of sessions, turns and memories: all that they have, with a fixed part for each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSize:
    """What is kept for a namespace that has sessions. Turns that several of them share are counted once."""

    namespace: str
    sessions: int
    turns: int
    nbytes: int
    """What its quota counts. State beside them is bounded for all together."""
