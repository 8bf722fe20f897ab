"""Slot table: the sequences of a context, which of them are idle, and what they hold, by their tokens."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure.cache.siblings import common, key_of
from perdure.engine.context import Context

Ids = NDArray[np.int32]

_SHORT = 1024
"""Bytes of a key that are compared as one number."""


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence of the context. What it holds outlives its request."""

    seq: int
    busy: bool = False
    namespace: str = ""
    exact: int = 0
    """Tokens of it, from the first on, that were or will be computed in the steps of exact mode."""
    forget: bool = False
    """What it holds was cleared while it was busy: it goes when that is over."""


class SlotTable:
    """All slots of a context. The last ones may be swap slots, which serve no request.

    Always holds: `idle` are those that serve requests and have none.
    """

    def __init__(self, context: Context, *, swap_slots: int) -> None:
        self._context = context
        self.count = context.n_seq - swap_slots
        """How many of them serve requests."""
        self.all = [Slot(seq) for seq in range(context.n_seq)]
        self.serving = np.arange(context.n_seq) < self.count
        self.idle = self.serving.copy()
        self.used = np.zeros(context.n_seq, np.int64)
        """The larger, the later."""
        self._clock = 0

    def acquire(self, slot: Slot, namespace: str) -> None:
        slot.busy, slot.namespace = True, namespace
        self.idle[slot.seq] = False
        self._clock += 1
        self.used[slot.seq] = self._clock

    def release(self, slot: Slot) -> None:
        slot.busy = False
        self.idle[slot.seq] = True
        self._clock += 1
        self.used[slot.seq] = self._clock

    def along(self, tokens: Ids, namespace: str) -> list[Slot]:
        """The slots that hold nothing but a beginning of `tokens`, or go on from them."""
        found = []
        for slot in self.all:
            if slot.namespace == namespace:
                shared = self._context.common_prefix(tokens, slot.seq)
                if shared > 0 and shared in (len(tokens), self._context.length(slot.seq)):
                    found.append(slot)
        return found


class SlotIndex:
    """The tokens of each slot, by namespace and sorted, with what each shares with the one before it. Two
    comparisons find how much of a prompt each of them has.

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
            if not len(space):
                # A namespace that nobody serves any more leaves nothing behind.
                del self._spaces[namespace]

    def shared(self, namespace: str, tokens: Ids) -> NDArray[np.int64]:
        """How many of `tokens` each slot starts with."""
        found = np.zeros(self._n_seq, np.int64)
        space = self._spaces.get(namespace)
        if space is not None and len(tokens):
            space.fill(found, key_of(tokens))
        return found


class _Space:
    """The slots of one namespace: keys in order, whose they are, and what each shares with the one before."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        # Arrays with room to grow: a prompt is compared with all of them at once.
        self._seqs = np.zeros(4, np.int64)
        self._gaps = np.zeros(4, np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes, seq: int) -> None:
        at, count = bisect_left(self._keys, key), len(self._keys)
        if count == len(self._seqs):
            self._seqs, self._gaps = np.resize(self._seqs, 2 * count), np.resize(self._gaps, 2 * count)
        for each, value in ((self._seqs, seq), (self._gaps, 0)):
            each[at + 1 : count + 1] = each[at:count].copy()
            each[at] = value
        self._keys.insert(at, key)
        self._measure(at)
        self._measure(at + 1)

    def remove(self, key: bytes, seq: int) -> None:
        at, count = bisect_left(self._keys, key), len(self._keys)
        # Several slots may hold the same.
        while self._seqs[at] != seq:
            at += 1
        if at + 1 < count:
            # Sorted as they are, its two neighbours share what both share with it.
            self._gaps[at + 1] = min(self._gaps[at], self._gaps[at + 1])
        for each in (self._seqs, self._gaps):
            each[at : count - 1] = each[at + 1 : count].copy()
        del self._keys[at]

    def fill(self, found: NDArray[np.int64], key: bytes) -> None:
        at, count = bisect_left(self._keys, key), len(self._keys)
        if at:
            # From the nearest back: what they share among themselves, but for the first.
            steps = np.empty(at, np.int64)
            steps[0] = common_tokens(self._keys[at - 1], key)
            steps[1:] = self._gaps[at - 1 : 0 : -1]
            found[self._seqs[at - 1 :: -1]] = np.minimum.accumulate(steps)
        if at < count:
            steps = self._gaps[at:count].copy()
            steps[0] = common_tokens(self._keys[at], key)
            found[self._seqs[at:count]] = np.minimum.accumulate(steps)

    def _measure(self, at: int) -> None:
        if 0 < at < len(self._keys):
            self._gaps[at] = common_tokens(self._keys[at - 1], self._keys[at])


def common_tokens(first: bytes, second: bytes) -> int:
    """How many tokens two keys start with alike."""
    count = min(len(first), len(second))
    if count > _SHORT:
        return common(np.frombuffer(first, "<i4"), np.frombuffer(second, "<i4"))
    # As numbers, they differ from the lowest bit on that is not the same: NumPy takes longer to start.
    different = int.from_bytes(first[:count], "little") ^ int.from_bytes(second[:count], "little")
    return ((different & -different).bit_length() - 1) // 32 if different else count // 4
