"""Reuse rule: to which lengths a stored prefix can be put back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import AnyBlock, BlockId, PrefixHit
from perdure.cache.child_index import Source, beginnings, best_child

Ids = NDArray[np.int32]
E = TypeVar("E", bound=AnyBlock)


class ReuseRule(ABC):
    """Where a sequence can go on from what is stored of it. One class a kind of state."""

    cuts_blocks: ClassVar[bool]
    """Whether the beginning of a block is of use without its end."""

    @abstractmethod
    def longest(
        self, blocks: Source[AnyBlock], root: BlockId, path: Sequence[AnyBlock], tokens: Ids, size: int
    ) -> PrefixHit:
        """The longest prefix of `tokens` that can be put back, where `path` are the whole blocks of `size`
        tokens that are stored of it."""

    @abstractmethod
    def usable(self, entries: list[E]) -> list[E]:
        """`entries` of a prefix, up to the last to whose end it can be put back."""


class AnyToken(ReuseRule):
    """State in rows by token: it is cut anywhere, in the middle of a block too."""

    cuts_blocks = True

    def longest(
        self, blocks: Source[AnyBlock], root: BlockId, path: Sequence[AnyBlock], tokens: Ids, size: int
    ) -> PrefixHit:
        parent = path[-1].id if path else root
        shared, entry = best_child(blocks, parent, tokens[len(path) * size :][:size])
        if entry is not None:
            return PrefixHit((*path, entry), shared)
        return PrefixHit(tuple(path), size if path else 0)

    def usable(self, entries: list[E]) -> list[E]:
        return entries


class AtTailStates(ReuseRule):
    """State with a part that belongs to its end: it is put back to the end of a block that has one."""

    cuts_blocks = False

    def longest(
        self, blocks: Source[AnyBlock], root: BlockId, path: Sequence[AnyBlock], tokens: Ids, size: int
    ) -> PrefixHit:
        for count in range(len(path), -1, -1):
            parent = path[count - 1].id if count else root
            # A tail may end where no whole block does.
            tails = beginnings(blocks, parent, tokens[count * size :][:size])
            entry = next((tail for tail in tails if tail.has_tail_state), None)
            if entry is not None:
                return PrefixHit((*path[:count], entry), len(entry.tokens))
            if count and path[count - 1].has_tail_state:
                return PrefixHit(tuple(path[:count]), size)
        return PrefixHit()

    def usable(self, entries: list[E]) -> list[E]:
        end = next((at for at in range(len(entries), 0, -1) if entries[at - 1].has_tail_state), 0)
        return entries[:end]


ANY_TOKEN = AnyToken()
AT_TAIL_STATES = AtTailStates()
