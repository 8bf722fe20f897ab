"""Checkpoints of a slot whose memory cannot be cut: points that its sequence can go back to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure.cache.siblings import key_of

Ids = NDArray[np.int32]

_OVERHEAD = 256
"""What a point costs besides its state."""


@dataclass(frozen=True, slots=True)
class Point:
    """The tail state of a sequence as it was after `length` tokens, named by a hash of just those."""

    length: int
    digest: bytes
    state: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + _OVERHEAD


class Checkpoints:
    """The points of one slot, the shortest first.

    They hold no tokens, only a length and a hash: which of them belong to what a slot holds is found in one
    pass over its tokens.
    """

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self._points = list(points)
        self.nbytes = sum(point.nbytes for point in self._points)

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    @property
    def last(self) -> Point | None:
        return self._points[-1] if self._points else None

    def has(self, length: int) -> bool:
        return any(point.length == length for point in self._points)

    def along(self, identity: bytes, tokens: Ids) -> Checkpoints:
        """Those of them that a sequence of `tokens` has passed."""
        passed, found = PrefixHash(identity), []
        for point in self._points:
            if point.length > len(tokens):
                break
            if passed.advance(tokens[passed.length : point.length]) == point.digest:
                found.append(point)
        return Checkpoints(found)

    def add(self, point: Point) -> None:
        self._points = sorted([*self._points, point], key=lambda each: each.length)
        self.nbytes += point.nbytes

    def thin_out(self, pinned: Callable[[bytes], bool] = lambda digest: False) -> None:
        """Drop every second one, of those that are not `pinned` if there are others. The newest stays: it is
        where the next regeneration starts."""
        held = [point for point in self._points if pinned(point.digest)]
        free = [point for point in self._points if not pinned(point.digest)]
        if not free:
            held, free = [], self._points
        kept = free[::-1][::2][::-1] if len(free) > 1 else []
        self._points = sorted([*held, *kept], key=lambda each: each.length)
        self.nbytes = sum(point.nbytes for point in self._points)


class PrefixHash:
    """A running hash over the tokens of a sequence, from the first on."""

    def __init__(self, identity: bytes) -> None:
        self.length = 0
        self._hash = hashlib.sha256(identity)

    def advance(self, tokens: Ids) -> bytes:
        """The hash with these tokens behind those before them."""
        self._hash.update(key_of(tokens))
        self.length += len(tokens)
        return self._hash.digest()
