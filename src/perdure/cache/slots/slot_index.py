"""What the slots hold, sorted: how much of a prompt each of them has, found with two comparisons."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from perdure.cache.siblings import common, key_of

Ids = NDArray[np.int32]


class SlotIndex:
    """The tokens of each slot, by namespace and sorted, with what each shares with the one before it.

    A prompt shares with a slot what it shares with the nearest one, or less where two between them part. So
    its part in all of them is a running minimum, however many there are.
    """

    def __init__(self, n_seq: int) -> None:
        self.lengths = np.zeros(n_seq, np.int64)
        """How many tokens of each slot are known here."""
        self._n_seq = n_seq
        self._spaces: dict[str, _Space] = {}
        self._where: list[tuple[str, bytes] | None] = [None] * n_seq

    def put(self, seq: int, namespace: str, tokens: Ids) -> None:
        """Slot `seq` holds these, or is about to."""
        self.remove(seq)
        if len(tokens):
            key = key_of(tokens)
            self._spaces.setdefault(namespace, _Space()).add(key, seq)
            self._where[seq] = namespace, key
            self.lengths[seq] = len(tokens)

    def remove(self, seq: int) -> None:
        where, self._where[seq] = self._where[seq], None
        self.lengths[seq] = 0
        if where is not None:
            namespace, key = where
            space = self._spaces[namespace]
            space.remove(key, seq)
            if not space.seqs:
                # A namespace that nobody serves any more leaves nothing behind.
                del self._spaces[namespace]

    def shared(self, namespace: str, tokens: Ids) -> NDArray[np.int64]:
        """How many of `tokens` each slot starts with."""
        found = np.zeros(self._n_seq, np.int64)
        space = self._spaces.get(namespace)
        if space is not None and len(tokens):
            space.fill(found, key_of(tokens), tokens)
        return found


class _Space:
    """The slots of one namespace: keys in order, whose they are, and what each shares with the one before."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self.seqs: list[int] = []
        self._gaps: list[int] = []

    def add(self, key: bytes, seq: int) -> None:
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self.seqs.insert(at, seq)
        self._gaps.insert(at, 0)
        self._measure(at)
        self._measure(at + 1)

    def remove(self, key: bytes, seq: int) -> None:
        at = self.seqs.index(seq, bisect_left(self._keys, key))
        del self._keys[at], self.seqs[at], self._gaps[at]
        self._measure(at)

    def fill(self, found: NDArray[np.int64], key: bytes, tokens: Ids) -> None:
        at = bisect_left(self._keys, key)
        seqs, steps = np.array(self.seqs), np.array(self._gaps)
        if at:
            steps[0] = common(_ids(self._keys[at - 1]), tokens)
            # From the nearest back: what they share among themselves, but for the first.
            before = np.concatenate((steps[:1], steps[at - 1 : 0 : -1]))
            found[seqs[at - 1 :: -1]] = np.minimum.accumulate(before)
        if at < len(seqs):
            steps[at] = common(_ids(self._keys[at]), tokens)
            found[seqs[at:]] = np.minimum.accumulate(steps[at:])

    def _measure(self, at: int) -> None:
        if 0 < at < len(self._keys):
            self._gaps[at] = common(_ids(self._keys[at - 1]), _ids(self._keys[at]))
        elif at == 0 and self._keys:
            self._gaps[0] = 0


def _ids(key: bytes) -> Ids:
    return np.frombuffer(key, "<i4")
