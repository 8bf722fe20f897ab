"""Slots: which one a request gets, and how much of its prompt is already there."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perdure.checks import is_number, is_whole
from perdure.engine.adapters import AdapterSet
from perdure.engine.context import Context
from perdure.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPrefix:
    """A prefix whose state is to be kept: for `seconds`, or without an end under its labels.

    A request names one by its `length`, or by the messages that come `after` it, and says for how long. Its
    blocks are not evicted until then. One without an end is made by `rt.cache.warm`, listed with its
    `tokens`, and outlives the process; its blocks may be evicted like any others.
    """

    length: int = 0
    """Of the beginning of a prompt, in tokens."""
    after: int | None = None
    """Instead of a length, in a chat: the messages that come after it."""
    seconds: float | None = None
    """None: without an end."""
    key: str = ""
    """The next one with the same key takes its place; without one, each beginning has a place of its own."""
    tokens: tuple[int, ...] = ()
    kept: int = 0
    """How many of `tokens` are kept."""
    labels: frozenset[str] = frozenset()
    namespace: str = ""
    root: bytes = b""
    """Where its chain of blocks starts: what its state depends on besides the tokens."""

    def __post_init__(self) -> None:
        if self.after is not None and (not is_whole(self.after) or self.after < 0):
            raise InvalidInputError(f"a cache mark's after is a number of messages, got {self.after!r}")
        if self.after is None and self.seconds is None:
            return
        if not is_number(self.seconds) or not 0 < self.seconds <= 86400:
            raise InvalidInputError(
                f"a cache mark's seconds are above 0 and at most 86400, got {self.seconds!r}"
            )

    @property
    def id(self) -> str:
        """What tells it from others, also after a restart."""
        return hashlib.sha256(self.root + self.ids.astype("<i4").tobytes()).hexdigest()

    @property
    def ids(self) -> NDArray[np.int32]:
        return np.array(self.tokens, np.int32)

    @property
    def nbytes(self) -> int:
        """What listing it in memory costs, about: a token is a number of Python's own."""
        return prefix_cost(len(self.tokens)) + sum(64 + len(label) for label in self.labels)

    def carries(self, labels: frozenset[str] | None, namespace: str) -> bool:
        """Whether it is of that namespace and has one of `labels`, if there are any to have."""
        return self.namespace == namespace and (labels is None or bool(labels & self.labels))


def prefix_cost(tokens: int) -> int:
    """What listing a prefix of so many tokens costs in memory, without its labels."""
    return 1024 + 44 * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseReport:
    """Where the state of a prompt came from: tokens by tier, tokens computed, and why not fewer."""

    tiers: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """How long each tier took, as far as state was read out of one. What a slot has takes none."""
    computed: int
    why: str
    pins: tuple[KeptPrefix, ...] = ()
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
class TierUsage:
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
class PendingPrefix:
    """There is room, but another request is about to compute what this one needs: the first `length` tokens
    of slot `seq`. `since` tells that request from the next one in the same slot."""

    seq: int
    length: int
    since: int


class Slots(Protocol):
    """Assigns slots to requests. Only the engine thread calls it, between steps."""

    @property
    def context(self) -> Context: ...
    @property
    def count(self) -> int:
        """How many requests can have a slot at once."""
        ...

    def acquire(
        self,
        tokens: NDArray[np.int32],
        *,
        namespace: str = "",
        adapters: AdapterSet | None = None,
        reuse: bool = True,
        pins: Sequence[KeptPrefix] = (),
        conversation: str = "",
        side: bool = False,
    ) -> SlotAssignment | PendingPrefix | None:
        """A slot for a prompt; None where all are taken. After an error nothing is taken.

        It is computed with `adapters`, or where there are none given with those of the context. Which
        conversation it is of, and whether it is only beside one, says what may be evicted later."""
        ...

    def is_ready(self, prefix: PendingPrefix) -> bool:
        """Whether the prefix is computed, or will not be: it is time to ask again."""
        ...

    def release(self, seq: int) -> None: ...

    def chunk(self, seq: int, cached: int, count: int, checkpoint_at: Collection[int]) -> int:
        """How many of the next `count` tokens one step may take, so that it ends where a checkpoint is due or
        other adapters begin: `checkpoint_at` are lengths to come back to."""
        ...

    def timed(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens of prompts has taken so long."""
        ...

    def reached(self, seq: int, length: int, checkpoint_at: Collection[int]) -> None:
        """A step has brought `seq` to `length` tokens of its prompt."""
        ...


class FreshSlots:
    """Every request starts from an empty slot."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.count = context.n_seq
        self._free = list(range(context.n_seq))

    def acquire(
        self,
        tokens: NDArray[np.int32],
        *,
        namespace: str = "",
        adapters: AdapterSet | None = None,
        reuse: bool = True,
        pins: Sequence[KeptPrefix] = (),
        conversation: str = "",
        side: bool = False,
    ) -> SlotAssignment | PendingPrefix | None:
        if not self._free:
            return None
        # The lowest: the engine batches neighbours together.
        seq = min(self._free)
        self.context.clear(seq)
        self.context.adapt(self.context.adapters if adapters is None else adapters, seq)
        self._free.remove(seq)
        return SlotAssignment(
            seq, 0, ReuseReport(computed=len(tokens), why="nothing is kept between requests")
        )

    def is_ready(self, prefix: PendingPrefix) -> bool:
        return True

    def release(self, seq: int) -> None:
        self._free.append(seq)

    def chunk(self, seq: int, cached: int, count: int, checkpoint_at: Collection[int]) -> int:
        return self.context.same_adapters(seq, cached, count)

    def reached(self, seq: int, length: int, checkpoint_at: Collection[int]) -> None:
        pass

    def timed(self, tokens: int, seconds: float) -> None:
        pass
