"""Media: images and sounds among the tokens of a sequence.

    [1, 261, -1871245313, -203117, … -771, 262, 9112]     text, a medium of 64 tokens, text

A medium stands as ids below zero, which are drawn from a digest of all that a decoder gets of it: so what
compares, names or stores tokens needs to know of none. Its first id has bit 30 clear, the others have it set.
What computes tokens has its rows from a `MediaSource`. A step has a medium's rows or tokens, never both.

Where positions have two dimensions (M-RoPE), an image of 10 by 8 tokens takes up 10 positions: all its tokens
are at the first of them in time, and the text behind it goes on 10 later. Its first id says so
(`positions_of`), so the position of each token follows from the tokens alone, with or without the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats, Outcome
from perdure.errors import InvalidInputError

NEXT_ID = 0xC0000000
"""The bits of an id of a medium, all of which are set but in the first."""
FIRST_ID = 0x80000000
_POSITIONS = 14
"""Bits of the digest behind the positions in a first id."""


class MediumRows(Protocol):
    """What a decoder gets of a medium."""

    @property
    def rows(self) -> Floats:
        """A row for each token."""
        ...

    @property
    def n_pos(self) -> int:
        """Positions that it takes up."""
        ...

    @property
    def grid(self) -> tuple[int, int]:
        """Tokens across and down, where its positions have two dimensions; else zeros."""
        ...

    @property
    def causal(self) -> bool:
        """Whether its tokens see only those before them. If not, all of them are read in one step."""
        ...


class MediaSource(Protocol):
    """Where the rows of media are."""

    def medium(self, ids: NDArray[np.int32]) -> MediumRows:
        """The medium whose ids these begin with. InvalidInputError where they are none's, CorruptStateError
        where its rows are gone or damaged."""
        ...


@runtime_checkable
class MediaCore(Protocol):
    """A core that can take rows in place of tokens."""

    @property
    def row_width(self) -> int:
        """Numbers of a row; 0 where it takes none, for another reason."""
        ...

    @property
    def two_dimensions(self) -> bool:
        """Whether positions have two dimensions besides time (M-RoPE)."""
        ...

    def decode_rows(self, seq: int, positions: NDArray[np.int32], rows: Floats, *, causal: bool) -> Outcome:
        """Append rows to a sequence, at these positions: one a row, or three (time, row, column). No logits
        are given."""
        ...


def positions_of(first: int) -> int:
    """How many positions the medium with this first id takes up, all of them where it begins in time; 0: each
    of its tokens has the next one, as text has."""
    return first >> _POSITIONS & 0xFFFF


def positions_in(medium: MediumRows, first: int, start: int, stop: int) -> NDArray[np.int32]:
    """The positions of the tokens `start` to `stop` of a medium that begins at position `first`: one each, or
    three where they have two dimensions."""
    at = np.arange(start, stop, dtype=np.int32)
    across = medium.grid[0]
    if not across:
        return first + at
    return np.stack([np.full_like(at, first), first + at // across, first + at % across])


def is_inside(token: int) -> bool:
    """Whether an id is one of a medium, and not its first."""
    return token < 0 and token & (NEXT_ID ^ FIRST_ID) != 0


def are_first(tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which ids are the first of a medium."""
    first: NDArray[np.bool_] = tokens.view(np.uint32) & np.uint32(NEXT_ID) == np.uint32(FIRST_ID)
    return first


def first_of(tokens: NDArray[np.int32], at: int) -> int:
    """Where the medium begins of which one id is at `at`."""
    starts = np.flatnonzero(are_first(tokens[: at + 1]))
    if not len(starts):
        raise InvalidInputError("ids below zero stand for images, and these begin inside of one")
    return int(starts[-1])


def spans(tokens: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Where media stand in tokens: the first token of each, and the one behind its last."""
    places = np.flatnonzero(tokens < 0)
    if not len(places):
        return []
    starts = places[are_first(tokens[places])]
    if not len(starts) or starts[0] != places[0]:
        raise InvalidInputError("ids below zero stand for images, and these begin inside of one")
    before = np.searchsorted(places, starts)
    ends = [*before[1:], len(places)]
    found = []
    for start, first, last in zip(starts.tolist(), before, ends, strict=True):
        end = int(places[last - 1]) + 1
        if end - start != last - first:
            raise InvalidInputError("ids below zero stand for images, and these are of no whole one")
        found.append((start, end))
    return found


def step_within(media: Sequence[tuple[int, int]], at: int, count: int, most: int) -> int:
    """How many of the `count` tokens from `at` on one step takes: text up to the next medium, or of a medium
    all that a step of `most` tokens can have, cut at places that do not depend on where reading began."""
    for start, end in media:
        if at < start:
            return min(count, start - at)
        if at < end:
            return min(end, start + ((at - start) // most + 1) * most) - at
    return count
