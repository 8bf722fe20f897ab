"""Slot table: the sequences of a context, which of them are idle, and what they hold, by their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from perdure.cache.child_index import common_prefix_length
from perdure.engine.context import Context

Ids = NDArray[np.int32]
Counts = NDArray[np.int64]

_NOTHING: Ids = np.empty(0, np.int32)


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
    tokens: Ids = field(default_factory=lambda: _NOTHING)
    """What it holds as far as is known, or is about to hold."""


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

    def on_path(self, tokens: Ids, namespace: str) -> list[Slot]:
        """The slots that hold nothing but a beginning of `tokens`, or go on from them."""
        path = []
        for slot in self.all:
            if slot.namespace == namespace:
                shared = self._context.common_prefix(tokens, slot.seq)
                if shared > 0 and shared in (len(tokens), self._context.length(slot.seq)):
                    path.append(slot)
        return path

    # What they hold. A slot that nobody has told of is read when it is next looked at.

    def put(self, seq: int, tokens: Ids) -> None:
        """Slot `seq` holds these, or is about to."""
        self.all[seq].tokens = tokens.copy()

    def remove(self, seq: int) -> None:
        self.all[seq].tokens = _NOTHING

    @property
    def lengths(self) -> Counts:
        """How many tokens of each slot are known here."""
        return np.array([len(slot.tokens) for slot in self.all], np.int64)

    def shared(self, namespace: str, tokens: Ids) -> Counts:
        """How many of `tokens` each slot starts with."""
        return np.array(
            [
                common_prefix_length(slot.tokens, tokens) if slot.namespace == namespace else 0
                for slot in self.all
            ],
            np.int64,
        )
