"""Checkpoints of the slots: what is kept so that their sequences can go back, by the kind of memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import LoadedPrefix
from perdure.engine.context import Context

Counts = NDArray[np.int64]

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


class SlotCheckpoints(ABC):
    """What is kept of the slots of a context, so that their sequences can go back.

    Always holds: the checkpoints of a slot belong to the tokens that it holds, or are found not to before
    they are used; together they stay within their byte budget.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    budget: int
    """Bytes for checkpoints, at most."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def chunk(self, cached: int, count: int, checkpoint_at: Collection[int]) -> int:
        """How many of the next `count` tokens a step may compute, so that it ends where it is worth coming
        back to."""

    @abstractmethod
    def reached(self, seq: int, length: int, checkpoint_at: Collection[int]) -> None:
        """A step ended at `length`: keep a checkpoint if it is such a place."""

    @abstractmethod
    def start(self, seq: int) -> None:
        """A request takes over what `seq` holds."""

    @abstractmethod
    def forget(self, seq: int) -> None: ...

    @abstractmethod
    def copy(self, source: int, seq: int) -> None:
        """`seq` has become a copy of `source`."""

    @abstractmethod
    def swapped_in(self, seq: int, prefix: LoadedPrefix) -> None:
        """`seq` was put back from blocks, some of which have tail states."""

    @abstractmethod
    def on_path(self, seq: int) -> Iterable[Point]:
        """The checkpoints that belong to what `seq` holds now. Others are forgotten."""

    @abstractmethod
    def restorable_length(self, seq: int, shared: int, length: int) -> int:
        """The longest length up to `shared` that `seq`, which holds `length` tokens, can be brought to."""

    def restorable_lengths(self, shared: Counts, lengths: Counts) -> Counts:
        """The same for every slot."""
        restorable = shared.copy()
        for seq in ((shared > 0) & (shared < lengths)).nonzero()[0].tolist():
            restorable[seq] = self.restorable_length(seq, int(shared[seq]), int(lengths[seq]))
        return restorable

    @abstractmethod
    def restorable_when_computed(self, shared: Counts, lengths: Counts) -> Counts:
        """What of `shared` can be used once the prompts that are being computed, of these lengths, are."""

    @abstractmethod
    def go_back(self, seq: int, length: int) -> None:
        """Bring `seq` to a `length` that `restorable_length` returned for it."""

    @abstractmethod
    def thin_out(self) -> None:
        """Keep within the budget."""


class CutAnywhere(SlotCheckpoints):
    """Slots of full attention: they are cut where it is wanted, and nothing is kept for it."""

    budget = 0
    nbytes = 0

    def chunk(self, cached: int, count: int, checkpoint_at: Collection[int]) -> int:
        return count

    def reached(self, seq: int, length: int, checkpoint_at: Collection[int]) -> None:
        pass

    def start(self, seq: int) -> None:
        pass

    def forget(self, seq: int) -> None:
        pass

    def copy(self, source: int, seq: int) -> None:
        pass

    def swapped_in(self, seq: int, prefix: LoadedPrefix) -> None:
        pass

    def on_path(self, seq: int) -> Iterable[Point]:
        return ()

    def restorable_length(self, seq: int, shared: int, length: int) -> int:
        return self._context.cut_point(seq, shared)

    def restorable_lengths(self, shared: Counts, lengths: Counts) -> Counts:
        return super().restorable_lengths(shared, lengths) if self._context.has_spans else shared

    def restorable_when_computed(self, shared: Counts, lengths: Counts) -> Counts:
        return shared

    def go_back(self, seq: int, length: int) -> None:
        if length < self._context.length(seq):
            self._context.truncate(length, seq)

    def thin_out(self) -> None:
        pass
