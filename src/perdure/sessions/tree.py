"""Trees: the turns of a conversation and its branches, and sessions below those that started them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perdure.errors import InvalidInputError
from perdure.sessions.info import SessionInfo, SessionMemory

ID_BYTES = 16
"""Of a turn's digest, by which it is known in a tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeTurn:
    """A turn as it is shown in a tree: its place, which is proved, and the first words of it."""

    id: str
    parent: str | None
    depth: int
    kind: str
    said: str
    reply: str
    finish_reason: str
    created: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Turns that start alike, each after the one it follows, and what stands at them."""

    turns: Sequence[TreeTurn]
    sessions: Sequence[SessionInfo] = ()
    memories: Sequence[SessionMemory] = ()


def turn_id(digest: bytes) -> str:
    return digest[:ID_BYTES].hex()


def parse_turn_id(text: str) -> bytes:
    """The beginning of the digest of the turn that is known by that id."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != ID_BYTES:
        raise InvalidInputError(f"after is the id of a turn, {2 * ID_BYTES} hexadecimal digits, got {text!r}")
    return digest


def as_tree(rows: Sequence[SessionInfo]) -> Iterator[tuple[int, SessionInfo]]:
    """Sessions in their order, each followed by those that it started; and how deep each stands."""
    known = {(row.namespace, row.name) for row in rows}
    below: dict[tuple[str, str], list[SessionInfo]] = {}
    first = []
    for row in rows:
        parent = (row.namespace, str(row.origin.get("parent", "")))
        if parent in known and parent[1] != row.name:
            below.setdefault(parent, []).append(row)
        else:
            first.append(row)
    waiting = [(0, row) for row in reversed(first)]
    while waiting:
        level, row = waiting.pop()
        yield level, row
        children = below.pop((row.namespace, row.name), ())
        waiting += [(level + 1, child) for child in reversed(children)]
    # Parents that name each other in a circle stand below nobody.
    for rest in below.values():
        yield from ((0, row) for row in rest)
