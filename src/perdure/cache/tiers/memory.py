"""Memory tier: blocks in this process, a tree by prefix, under a byte budget."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import Block, BlockId
from perdure.cache.eviction import Eviction, EvictionClass
from perdure.cache.prefix_search import beginnings, continuations, key_of

if TYPE_CHECKING:
    from perdure.cache.sorted_keys import ChildIndex

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
    owner: str
    """Whose it is: the namespace that its chain starts in."""
    used: int = 0
    """When, by the clock of the tier."""
    worth: int = 0
    """As of when it was last offered for eviction."""
    children: ChildIndex | None = None
    """None: nothing follows it, as with most."""
    pins: int = 0


class MemoryTier:
    """Blocks in this process, the first tier. Only the engine thread calls it, and nothing in it waits.

    Always holds: it is never over budget, not even for a moment; leaves go first, those of the least worth
    before others, and of a namespace within its share only for its own blocks.
    """

    name = Block.tier

    def __init__(self, budget: int, *, eviction: Eviction | None = None) -> None:
        """`eviction` says what blocks are worth. What it has pinned must be less than the budget."""
        self.budget = budget
        self.eviction = eviction or Eviction()
        self.nbytes = 0
        self.state_bytes = 0
        self.evicted = 0
        self.evicted_as: dict[str, int] = {}
        """How many were evicted, by their eviction class."""
        self._nodes: dict[BlockId, _Node] = {}
        self._roots: dict[BlockId, ChildIndex] = {}
        self._queues: dict[str, list[tuple[int, BlockId]]] = {}
        """The leaves of each owner, those of the least worth first."""
        self.owner_bytes: dict[str, int] = {}
        """Bytes of each owner."""
        self.owner_used: dict[str, int] = {}
        """When something of an owner was last used."""
        self.clock = 0
        """Bytes that were stored so far, and a byte for each use."""
        self._gone: dict[BlockId, None] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._nodes

    def lookup(self, block: BlockId) -> Block | None:
        node = self._nodes.get(block)
        if node is None or node.block.id != block:
            return self._sound(block)
        self._touch(node)
        return node.block

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

    def blocks(self) -> Iterator[Block]:
        """All of them, parents before children."""
        return (block for name in list(self._nodes) if (block := self._sound(name)) is not None)

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
        owner = above.owner if above else self.eviction.owner(block.parent)
        eviction_class = self.eviction.class_of(block.id)
        if not self.make_room(block.nbytes, keep=block.parent, owner=owner, eviction_class=eviction_class):
            return False
        if not is_first:
            self._drop_beginnings(block)
        from perdure.cache.sorted_keys import ChildIndex

        key = key_of(block.tokens)
        node = self._nodes[block.id] = _Node(block.id, block.parent, key, block, owner)
        if above is None:
            self._roots.setdefault(block.parent, ChildIndex()).add(key, block.id)
        else:
            if above.children is None:
                above.children = ChildIndex()
            above.children.add(key, block.id)
        self._gone.pop(block.id, None)
        self._count(node, block, 1)
        self.clock += block.nbytes
        self._touch(node)
        return True

    def revalue(self, blocks: Iterable[BlockId]) -> None:
        """The eviction class of these blocks has changed."""
        for block in blocks:
            if node := self._nodes.get(block):
                self._touch(node)

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

    def make_room(
        self,
        size: int,
        keep: BlockId,
        *,
        owner: str | None = None,
        eviction_class: EvictionClass = EvictionClass.CONVERSATION,
    ) -> bool:
        """Evict until `size` more bytes fit, but not the block `keep`. False: they cannot.

        The bytes are of `owner` (None: of the one that has `keep`) and of this eviction class: unwanted
        blocks evict only unwanted ones.
        """
        if size > self.budget:
            return False
        if owner is None:
            above = self._nodes.get(keep)
            owner = above.owner if above else self.eviction.owner(keep)
        while self.nbytes + size > self.budget:
            victim = self._least_worth(keep, owner, size)
            if victim is None:
                return False
            victim_class = self.eviction.class_of(victim.id)
            if eviction_class.is_unwanted and not victim_class.is_unwanted:
                return False
            queue = self._queues[victim.owner]
            if queue[0][1] == victim.id:
                heapq.heappop(queue)
            self._remove(victim)
            self.evicted += 1
            self.evicted_as[victim_class.name.lower()] = self.evicted_as.get(victim_class.name.lower(), 0) + 1
            self._gone[victim.id] = None
            if len(self._gone) > _REMEMBERED:
                self._gone.pop(next(iter(self._gone)))
        return True

    def was_evicted(self, block: BlockId) -> bool:
        return block in self._gone

    def clear(self) -> None:
        self._nodes.clear()
        self._roots.clear()
        self._queues.clear()
        self.owner_bytes.clear()
        self.owner_used.clear()
        self._gone.clear()
        self.evicted_as.clear()
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
        self.clock += 1
        node.used = self.owner_used[node.owner] = self.clock
        if node.children is None:
            self._offer(node)

    def _offer(self, node: _Node) -> None:
        if node.children is None and not node.pins:
            node.worth = self.eviction.worth(node.id, node.used, self.budget)
            queue = self._queues.setdefault(node.owner, [])
            heapq.heappush(queue, (node.worth, node.id))
            if len(queue) > 64 + 4 * len(self._nodes):
                queue[:] = [
                    (each.worth, name)
                    for name, each in self._nodes.items()
                    if each.children is None and not each.pins and each.owner == node.owner
                ]
                heapq.heapify(queue)

    def _least_worth(self, keep: BlockId, owner: str, size: int) -> _Node | None:
        """The leaf to go for `size` more bytes of `owner`."""
        payers = self.eviction.payers(owner, size, self.owner_bytes, self.owner_used, self.clock, self.budget)
        # If all blocks of these owners are in use, the owner that stores evicts its own.
        for owners in (payers, [owner]):
            leaves = [leaf for each in owners if (leaf := self._first_leaf(each, keep)) is not None]
            if leaves:
                return min(leaves, key=lambda leaf: leaf.worth)
        return None

    def _first_leaf(self, owner: str, keep: BlockId) -> _Node | None:
        """The leaf of the least worth of an owner, which stays in its queue."""
        queue = self._queues.get(owner, [])
        spared: list[tuple[int, BlockId]] = []
        first = None
        while queue and first is None:
            worth, block = queue[0]
            node = self._nodes.get(block)
            # The queue may hold old entries: what counts is the node as it is now.
            if node is None or node.worth != worth or node.children is not None or node.pins:
                heapq.heappop(queue)
            elif block == keep or self.eviction.pinned(block):
                spared.append(heapq.heappop(queue))
            else:
                first = node
        for entry in spared:
            heapq.heappush(queue, entry)
        return first

    def _replace(self, node: _Node, block: Block) -> bool:
        """The same tokens with more of their state."""
        node.pins += 1
        more = block.nbytes - node.block.nbytes
        eviction_class = self.eviction.class_of(block.id)
        fits = self.make_room(more, keep=block.id, owner=node.owner, eviction_class=eviction_class)
        node.pins -= 1
        if fits:
            self._count(node, node.block, -1)
            node.block = block
            self._count(node, block, 1)
        self._offer(node)
        return fits

    def _remove(self, node: _Node) -> None:
        del self._nodes[node.id]
        self._count(node, node.block, -1)
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

    def _count(self, node: _Node, block: Block, sign: int) -> None:
        self.nbytes += sign * block.nbytes
        self.state_bytes += sign * block.state_bytes
        self.owner_bytes[node.owner] = self.owner_bytes.get(node.owner, 0) + sign * block.nbytes
        self.owner_used.setdefault(node.owner, self.clock)
        if not self.owner_bytes[node.owner]:
            # Its clock too: a namespace without blocks leaves nothing behind.
            del self.owner_bytes[node.owner]
            self.owner_used.pop(node.owner, None)
            self._queues.pop(node.owner, None)
