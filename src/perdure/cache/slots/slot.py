"""Slots: the sequences of a context, which of them are idle, and when each was last used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure.engine.context import Context

Ids = NDArray[np.int32]


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
