"""Prefix search: the blocks that follow one block in the order of their tokens, and how far a stored prefix
is of use.

Sorted like that, the block that shares most of its first tokens with a prompt stands next to where the prompt
would stand. So a look-up reads two neighbours, however many blocks follow the same one. To which lengths a
prefix can be put back depends on the kind of its state: a reuse rule each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import AnyBlock, BlockId, PrefixHit

Ids = NDArray[np.int32]


class HasTokens(Protocol):
    @property
    def tokens(self) -> Ids: ...


E = TypeVar("E", bound=HasTokens, covariant=True)
N = TypeVar("N", bound=AnyBlock)


class Source(Protocol[E]):
    """Where the blocks that follow one are found, sorted."""

    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[E]:
        """The blocks that follow `parent`, by their tokens' bytes: from `start` on, or back from it."""
        ...


def key_of(tokens: Ids) -> bytes:
    """What blocks are sorted by."""
    return tokens.astype("<i4", copy=False).tobytes()


def common_prefix_length(first: Ids, second: Ids) -> int:
    """How many tokens two lists start with alike."""
    count = min(len(first), len(second))
    if not count or first[0] != second[0]:
        return 0
    different = first[:count] != second[:count]
    at = int(different.argmax())
    return at if different[at] else count


def best_child(source: Source[E], parent: BlockId, tokens: Ids) -> tuple[int, E | None]:
    """The block after `parent` that shares most of its first tokens with `tokens`, and how many."""
    key, longest, best = key_of(tokens), 0, None
    for back in (True, False):
        child = next(source.children(parent, start=key, back=back), None)
        if child is not None and (shared := common_prefix_length(child.tokens, tokens)) > longest:
            longest, best = shared, child
    return longest, best


def beginnings(source: Source[E], parent: BlockId, tokens: Ids) -> Iterator[E]:
    """The blocks after `parent` that hold nothing but a beginning of `tokens`, the longest first."""
    while len(tokens):
        entry = next(source.children(parent, start=key_of(tokens), back=True), None)
        if entry is None:
            return
        shared = common_prefix_length(entry.tokens, tokens)
        if shared == len(entry.tokens):
            yield entry
            shared -= 1
        # Whatever else is a beginning is one of what these two have in common.
        tokens = tokens[: min(shared, len(tokens) - 1)]


def continuations(source: Source[E], parent: BlockId, tokens: Ids) -> Iterator[E]:
    """The blocks after `parent` that start with `tokens`."""
    for entry in source.children(parent, start=key_of(tokens)):
        if common_prefix_length(entry.tokens, tokens) < len(tokens):
            return
        yield entry


def merged(walks: Iterable[Iterator[N]], *, back: bool) -> Iterator[N]:
    """Sorted walks as one, each read no further than asked. What several have is taken from the first of them
    that has its tail state, or else from the first."""
    heads = [(block, walk) for walk in walks if (block := next(walk, None)) is not None]
    while len(heads) > 1:
        at = (max if back else min)(key_of(block.tokens) for block, _ in heads)
        same = [block for block, _ in heads if key_of(block.tokens) == at]
        yield next((block for block in same if block.has_tail_state), same[0])
        heads = [
            (block, walk)
            for head, walk in heads
            if (block := head if key_of(head.tokens) != at else next(walk, None)) is not None
        ]
    for block, walk in heads:
        yield block
        yield from walk


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
    def usable(self, entries: list[N]) -> list[N]:
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

    def usable(self, entries: list[N]) -> list[N]:
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

    def usable(self, entries: list[N]) -> list[N]:
        end = next((at for at in range(len(entries), 0, -1) if entries[at - 1].has_tail_state), 0)
        return entries[:end]


ANY_TOKEN = AnyToken()
AT_TAIL_STATES = AtTailStates()
