"""Memory tier: blocks in this process, a tree by prefix, under a byte budget."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import Block, BlockId
from perdure.cache.prefix_search import ChildIndex, beginnings, continuations, key_of

_REMEMBERED = 4096
"""Evicted blocks whose names are kept, so that a reply can say why it was computed again."""


class Named(Protocol):
    @property
    def id(self) -> BlockId: ...


@dataclass(slots=True)
class _Node:
    """A place in the tree. It has its own copy of the names: those in a damaged block may be wrong."""

    id: BlockId
    parent: BlockId
    key: bytes
    block: Block
    used: int
    children: ChildIndex | None = None
    """None: nothing follows it, as with most."""
    pins: int = 0


class MemoryTier:
    """Blocks in this process, the first tier. Only the engine thread calls it, and nothing in it waits.

    Always holds: it is never over budget, not even for a moment; leaves go first, oldest first.
    """

    name = Block.tier

    def __init__(self, budget: int, *, pinned: Callable[[BlockId], bool] = lambda block: False) -> None:
        """What is `pinned` is not evicted. It must be less than the budget."""
        self.budget = budget
        self._pinned = pinned
        self.nbytes = 0
        self.state_bytes = 0
        self.evicted = 0
        self._nodes: dict[BlockId, _Node] = {}
        self._roots: dict[BlockId, ChildIndex] = {}
        self._queue: list[tuple[int, BlockId]] = []
        self._clock = 0
        self._gone: dict[BlockId, None] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._nodes

    def lookup(self, block: BlockId) -> Block | None:
        here = self._sound(block)
        if here is not None:
            self._touch(self._nodes[block])
        return here

    def peek(self, block: BlockId) -> Block | None:
        """The same without counting as a use."""
        return self._sound(block)

    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[Block]:
        """The blocks that follow `parent`, sorted. One that no longer knows its own name is dropped."""
        node = self._nodes.get(parent)
        siblings = node.children if node else self._roots.get(parent)
        if siblings is not None:
            for name in siblings.walk(start, back=back):
                if (block := self._sound(name)) is not None:
                    yield block

    def covers(self, parent: BlockId, tokens: NDArray[np.int32]) -> bool:
        """Whether the state of `tokens` after `parent` can be cut from a longer block."""
        for sibling in continuations(self, parent, tokens):
            if len(sibling.tokens) > len(tokens) and sibling.rows is not None:
                self._touch(self._nodes[sibling.id])
                return True
        return False

    def store(self, block: Block) -> bool:
        """Keep a block whose parent is kept, or which starts a chain. False: there is no room for it."""
        known = self._nodes.get(block.id)
        if known is not None:
            self._touch(known)
            if known.block.state_bytes >= block.state_bytes:
                return True
            return self._replace(known, block)
        if block.start and block.parent not in self._nodes:
            return False
        above = self._nodes.get(block.parent)
        # Mostly it is the first: then there is nothing to compare it with.
        is_first = (above.children if above else self._roots.get(block.parent)) is None
        if not is_first and block.tail_state is None and self.covers(block.parent, block.tokens):
            return True
        if not self.make_room(block.nbytes, keep=block.parent):
            return False
        if not is_first:
            self._drop_beginnings(block)
        self._clock += 1
        key = key_of(block.tokens)
        node = self._nodes[block.id] = _Node(block.id, block.parent, key, block, self._clock)
        if above is None:
            self._roots.setdefault(block.parent, ChildIndex()).add(key, block.id)
        else:
            if above.children is None:
                above.children = ChildIndex()
            above.children.add(key, block.id)
        self._gone.pop(block.id, None)
        self._count(block, 1)
        self._offer(node)
        return True

    def drop(self, block: BlockId) -> None:
        """Forget a block and all that follow it."""
        dropped = [block] if block in self._nodes else []
        for each in dropped:
            if (children := self._nodes[each].children) is not None:
                dropped += children.walk()
        for each in reversed(dropped):
            self._remove(self._nodes[each])

    def pin(self, blocks: Iterable[Named]) -> None:
        """Keep these from being evicted until `unpin`."""
        for block in blocks:
            self._nodes[block.id].pins += 1

    def unpin(self, blocks: Iterable[Named]) -> None:
        for block in blocks:
            if node := self._nodes.get(block.id):
                node.pins -= 1
                self._offer(node)

    def make_room(self, size: int, keep: BlockId) -> bool:
        """Evict until `size` more bytes fit, but not the block `keep`. False: they cannot."""
        if size > self.budget:
            return False
        while self.nbytes + size > self.budget:
            victim = self._oldest_leaf(keep)
            if victim is None:
                return False
            self._remove(victim)
            self.evicted += 1
            self._gone[victim.id] = None
            if len(self._gone) > _REMEMBERED:
                self._gone.pop(next(iter(self._gone)))
        return True

    def was_evicted(self, block: BlockId) -> bool:
        return block in self._gone

    def clear(self) -> None:
        self._nodes.clear()
        self._roots.clear()
        self._queue.clear()
        self._gone.clear()
        self.nbytes = self.state_bytes = self.evicted = 0

    # Inside.

    def _sound(self, name: BlockId) -> Block | None:
        node = self._nodes.get(name)
        if node is not None and node.block.id != name:
            self.drop(name)
            return None
        return node.block if node else None

    def _drop_beginnings(self, block: Block) -> None:
        """Tails whose tokens `block` starts with: they can be cut from it, so they need not be kept too."""
        for sibling in beginnings(self, block.parent, block.tokens[:-1]):
            if sibling.tail_state is None and not self._nodes[sibling.id].pins:
                self.drop(sibling.id)

    def _touch(self, node: _Node) -> None:
        self._clock += 1
        node.used = self._clock
        self._offer(node)

    def _offer(self, node: _Node) -> None:
        if node.children is None and not node.pins:
            heapq.heappush(self._queue, (node.used, node.id))
            if len(self._queue) > 64 + 4 * len(self._nodes):
                self._queue = [
                    (n.used, i) for i, n in self._nodes.items() if n.children is None and not n.pins
                ]
                heapq.heapify(self._queue)

    def _oldest_leaf(self, keep: BlockId) -> _Node | None:
        spared: list[tuple[int, BlockId]] = []
        oldest = None
        while self._queue and oldest is None:
            used, block = heapq.heappop(self._queue)
            node = self._nodes.get(block)
            # The queue may hold old entries: what counts is the node as it is now.
            if node is None or node.used != used or node.children is not None or node.pins:
                continue
            if block == keep or self._pinned(block):
                spared.append((used, block))
                continue
            oldest = node
        for entry in spared:
            heapq.heappush(self._queue, entry)
        return oldest

    def _replace(self, node: _Node, block: Block) -> bool:
        """The same tokens with more of their state."""
        node.pins += 1
        fits = self.make_room(block.nbytes - node.block.nbytes, keep=block.id)
        node.pins -= 1
        if fits:
            self._count(node.block, -1)
            node.block = block
            self._count(block, 1)
        self._offer(node)
        return fits

    def _remove(self, node: _Node) -> None:
        del self._nodes[node.id]
        self._count(node.block, -1)
        if parent := self._nodes.get(node.parent):
            assert parent.children is not None
            parent.children.remove(node.key)
            if not len(parent.children):
                parent.children = None
            self._offer(parent)
        elif siblings := self._roots.get(node.parent):
            siblings.remove(node.key)
            if not len(siblings):
                del self._roots[node.parent]

    def _count(self, block: Block, sign: int) -> None:
        self.nbytes += sign * block.nbytes
        self.state_bytes += sign * block.state_bytes
