"""What is listed of sessions and memories, and the addresses of memories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from perdure.errors import InvalidInputError

_SCHEME = "perdure://"
_DIGITS = 9
"""Of the number of a turn in an address, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A session as it is listed. Its number is never given to another one."""

    number: int
    namespace: str
    name: str
    kind: str
    head: int
    depth: int
    settings: Mapping[str, Any]
    origin: Mapping[str, Any]
    created: float
    updated: float
    digest: bytes
    """Of the turn at which it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMemory:
    """A labelled turn of a session that somebody wants to come back to. `digest` proves what led there."""

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
