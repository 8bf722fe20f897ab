"""Slots: which one a request gets, and how much of its prompt is already there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perdure.engine.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A beginning of a prompt whose state is to be kept for a time."""

    length: int
    """In tokens."""
    seconds: float
    key: str = ""
    """The next pin with the same key takes its place; without one, each beginning has a pin of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseReport:
    """Where the state of a prompt came from: tokens by tier, tokens computed, and why not fewer."""

    tiers: Mapping[str, int] = field(default_factory=dict)
    computed: int
    why: str
    pins: tuple[Pin, ...] = ()
    """The beginnings that are kept for a time, of those that were to be."""

    @property
    def reused(self) -> int:
        return sum(self.tiers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What bringing back the state of a prompt would take: tokens by tier, what is read, what is computed."""

    tiers: Mapping[str, int]
    blocks: int
    nbytes: int
    computed: int

    @property
    def tokens(self) -> int:
        return sum(self.tiers.values()) + self.computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """How much of a prompt's state one tier has."""

    tokens: int
    nbytes: int = 0
    """In blocks; a slot has none."""


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """A slot (a sequence of the engine) that starts with the first `cached` tokens of a prompt."""

    seq: int
    cached: int
    report: ReuseReport


@dataclass(frozen=True, slots=True)
class Later:
    """There is room, but another request is about to compute what this one needs: the first `until` tokens
    of slot `seq`. `since` tells that request from the next one in the same slot."""

    seq: int
    until: int
    since: int


class Slots(Protocol):
    """Assigns slots to requests. Only the engine thread calls it, between steps."""

    @property
    def count(self) -> int:
        """How many requests can have a slot at once."""
        ...

    def acquire(
        self,
        tokens: NDArray[np.int32],
        *,
        namespace: str = "",
        reuse: bool = True,
        pins: Sequence[Pin] = (),
    ) -> SlotAssignment | Later | None:
        """A slot for a prompt; None where all are taken. After an error nothing is taken."""
        ...

    def is_over(self, later: Later) -> bool:
        """Whether what was to be waited for is there, or will not come: it is time to ask again."""
        ...

    def release(self, seq: int) -> None: ...

    def chunk(self, seq: int, cached: int, count: int, returns: Collection[int]) -> int:
        """How many of the next `count` tokens one step may take; `returns` are lengths to come back to."""
        ...

    def timed(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens of prompts has taken so long."""
        ...

    def reached(self, seq: int, length: int, returns: Collection[int]) -> None:
        """A step has brought `seq` to `length` tokens of its prompt."""
        ...


class FreshSlots:
    """Every request starts from an empty slot."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.count = context.n_seq
        self._free = list(range(context.n_seq))

    def acquire(
        self,
        tokens: NDArray[np.int32],
        *,
        namespace: str = "",
        reuse: bool = True,
        pins: Sequence[Pin] = (),
    ) -> SlotAssignment | Later | None:
        if not self._free:
            return None
        # The lowest: the engine batches neighbours together.
        seq = min(self._free)
        self._context.clear(seq)
        self._free.remove(seq)
        return SlotAssignment(
            seq, 0, ReuseReport(computed=len(tokens), why="nothing is kept between requests")
        )

    def is_over(self, later: Later) -> bool:
        return True

    def release(self, seq: int) -> None:
        self._free.append(seq)

    def chunk(self, seq: int, cached: int, count: int, returns: Collection[int]) -> int:
        return count

    def reached(self, seq: int, length: int, returns: Collection[int]) -> None:
        pass

    def timed(self, tokens: int, seconds: float) -> None:
        pass
