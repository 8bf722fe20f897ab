"""Blocks in memory: a tree by prefix, under a byte budget."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import Block, BlockId, block_id
from perdure.errors import CorruptStateError


class Tier(Protocol):
    """A place that keeps blocks. All tiers find prefixes the same way, by `get` and `children`."""

    name: str

    def get(self, block: BlockId) -> Block | None: ...
    def children(self, parent: BlockId) -> Iterable[Block]: ...
    def put(self, block: Block) -> bool: ...
    def drop(self, block: BlockId) -> None: ...


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix that can be put back: whole blocks, and of the last one the first `keep` tokens."""

    blocks: tuple[Block, ...] = ()
    keep: int = 0

    @property
    def length(self) -> int:
        return self.blocks[-1].start + self.keep if self.blocks else 0

    @property
    def pieces(self) -> list[NDArray[np.uint8]]:
        rows = [block.rows for block in self.blocks if block.rows is not None]
        return [*rows[:-1], rows[-1][: self.keep]] if rows else []

    @property
    def rest(self) -> NDArray[np.uint8] | None:
        return self.blocks[-1].rest if self.blocks else None


@dataclass(slots=True)
class _Node:
    block: Block
    used: int
    children: set[BlockId] = field(default_factory=set)
    pins: int = 0


class MemoryTier:
    """Blocks in this process. Never over budget, not even for a moment; leaves go first, oldest first."""

    name = "memory"

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self.state_bytes = 0
        self.evicted = 0
        self._nodes: dict[BlockId, _Node] = {}
        self._roots: dict[BlockId, set[BlockId]] = {}
        self._queue: list[tuple[int, BlockId]] = []
        self._clock = 0
        self._gone: dict[BlockId, None] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._nodes

    def get(self, block: BlockId) -> Block | None:
        node = self._nodes.get(block)
        if node is None:
            return None
        self._touch(node)
        return node.block

    def children(self, parent: BlockId) -> Iterator[Block]:
        for child in self._siblings(parent):
            yield self._nodes[child].block

    def put(self, block: Block) -> bool:
        """Keep a block whose parent is kept, or which starts a chain. False: there is no room for it."""
        known = self._nodes.get(block.id)
        if known is not None:
            self._touch(known)
            if known.block.state_bytes >= block.state_bytes:
                return True
            return self._replace(known, block)
        if block.start and block.parent not in self._nodes:
            return False
        if not self._make_room(block.nbytes, keep=block.parent):
            return False
        self._drop_beginnings(block)
        self._clock += 1
        node = self._nodes[block.id] = _Node(block, self._clock)
        self._siblings(block.parent).add(block.id)
        self._gone.pop(block.id, None)
        self._count(block, 1)
        self._offer(node)
        return True

    def drop(self, block: BlockId) -> None:
        """Forget a block and all that follow it."""
        node = self._nodes.get(block)
        if node is None:
            return
        for child in tuple(node.children):
            self.drop(child)
        self._remove(node)

    def pin(self, blocks: Iterable[Block]) -> None:
        """Keep these from being evicted until `unpin`."""
        for block in blocks:
            self._nodes[block.id].pins += 1

    def unpin(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if node := self._nodes.get(block.id):
                node.pins -= 1
                self._offer(node)

    def was_evicted(self, block: BlockId) -> bool:
        return block in self._gone

    def clear(self) -> None:
        self._nodes.clear()
        self._roots.clear()
        self._queue.clear()
        self._gone.clear()
        self.nbytes = self.state_bytes = self.evicted = 0

    # Inside.

    def _siblings(self, parent: BlockId) -> set[BlockId]:
        node = self._nodes.get(parent)
        return node.children if node else self._roots.setdefault(parent, set())

    def _drop_beginnings(self, block: Block) -> None:
        """Tails whose tokens `block` starts with: they can be cut from it, so they need not be kept too."""
        for sibling in list(self.children(block.parent)):
            count = len(sibling.tokens)
            useful = sibling.rest is not None or self._nodes[sibling.id].pins or count >= len(block.tokens)
            if not useful and np.array_equal(sibling.tokens, block.tokens[:count]):
                self.drop(sibling.id)

    def _touch(self, node: _Node) -> None:
        self._clock += 1
        node.used = self._clock
        self._offer(node)

    def _offer(self, node: _Node) -> None:
        if not node.children and not node.pins:
            heapq.heappush(self._queue, (node.used, node.block.id))
            if len(self._queue) > 64 + 4 * len(self._nodes):
                self._queue = [(n.used, i) for i, n in self._nodes.items() if not n.children and not n.pins]
                heapq.heapify(self._queue)

    def _make_room(self, size: int, keep: BlockId) -> bool:
        if size > self.budget:
            return False
        while self.nbytes + size > self.budget:
            victim = self._oldest_leaf(keep)
            if victim is None:
                return False
            self._remove(victim)
            self.evicted += 1
            self._gone[victim.block.id] = None
            if len(self._gone) > 4096:
                self._gone.pop(next(iter(self._gone)))
        return True

    def _oldest_leaf(self, keep: BlockId) -> _Node | None:
        spared: list[tuple[int, BlockId]] = []
        found = None
        while self._queue and found is None:
            used, block = heapq.heappop(self._queue)
            node = self._nodes.get(block)
            # The queue may hold old entries: what counts is the node as it is now.
            if node is None or node.used != used or node.children or node.pins:
                continue
            if block == keep:
                spared.append((used, block))
                continue
            found = node
        for entry in spared:
            heapq.heappush(self._queue, entry)
        return found

    def _replace(self, node: _Node, block: Block) -> bool:
        """The same tokens with more of their state."""
        node.pins += 1
        fits = self._make_room(block.nbytes - node.block.nbytes, keep=block.id)
        node.pins -= 1
        if fits:
            self._count(node.block, -1)
            node.block = block
            self._count(block, 1)
        self._offer(node)
        return fits

    def _remove(self, node: _Node) -> None:
        block = node.block
        del self._nodes[block.id]
        siblings = self._siblings(block.parent)
        siblings.discard(block.id)
        self._count(block, -1)
        if parent := self._nodes.get(block.parent):
            self._offer(parent)
        elif not siblings:
            self._roots.pop(block.parent, None)

    def _count(self, block: Block, sign: int) -> None:
        self.nbytes += sign * block.nbytes
        self.state_bytes += sign * block.state_bytes


def find(
    tier: MemoryTier, root: BlockId, tokens: NDArray[np.int32], *, size: int, limit: int, whole: bool
) -> Match:
    """The longest prefix of `tokens`, at most `limit` long, that `tier` can put back.

    Where a memory cannot be cut (`whole`), that is the end of a block with a rest; else any token.
    """
    path: list[Block] = []
    best = Match()
    parent, at = root, 0
    while at < limit:
        following = None
        if at + size <= len(tokens):
            following = tier.get(block_id(parent, tokens[at : at + size]))
            # A hash names the tokens; the tokens themselves decide.
            if following is not None and not np.array_equal(following.tokens, tokens[at : at + size]):
                following = None
        if following is None or following.end > limit:
            shared, block = _closest(tier, parent, tokens[at:limit], whole)
            if block is not None:
                best = Match((*path, block), shared)
            break
        path.append(following)
        parent, at = following.id, following.end
        if not whole or following.rest is not None:
            best = Match(tuple(path), len(following.tokens))
        if whole:
            # A tail may end further on than the last whole block with a rest.
            shared, block = _closest(tier, parent, tokens[at:limit], whole)
            if block is not None:
                best = Match((*path, block), shared)
    return best


def _closest(
    tier: MemoryTier, parent: BlockId, tokens: NDArray[np.int32], whole: bool
) -> tuple[int, Block | None]:
    """The child of `parent` that shares most of its first tokens with `tokens`."""
    best, found = 0, None
    for block in tier.children(parent):
        count = min(len(tokens), len(block.tokens))
        different = np.flatnonzero(block.tokens[:count] != tokens[:count])
        shared = int(different[0]) if len(different) else count
        if whole and (shared < len(block.tokens) or block.rest is None):
            continue
        if shared > best:
            best, found = shared, block
    if found is not None:
        tier.get(found.id)
    return best, found


def sound(tier: MemoryTier, match: Match, *, whole: bool) -> Match:
    """`match` up to the first block that is damaged; such a block is dropped with all that follow it."""
    for index, block in enumerate(match.blocks):
        try:
            block.verify()
        except CorruptStateError:
            tier.drop(block.id)
            kept = match.blocks[:index]
            while whole and kept and kept[-1].rest is None:
                kept = kept[:-1]
            return Match(kept, len(kept[-1].tokens)) if kept else Match()
    return match
