"""Blocks in memory: a tree by prefix, under a byte budget."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from perdure.cache.block import Block, BlockId


class Named(Protocol):
    @property
    def id(self) -> BlockId: ...


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

    def pin(self, blocks: Iterable[Named]) -> None:
        """Keep these from being evicted until `unpin`."""
        for block in blocks:
            self._nodes[block.id].pins += 1

    def unpin(self, blocks: Iterable[Named]) -> None:
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
