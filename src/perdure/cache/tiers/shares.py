"""Shares: which block of a full tier goes, so that no namespace pushes another out beyond its share."""

from __future__ import annotations

import functools
from collections.abc import Callable

from perdure.cache.block import Block, BlockId
from perdure.cache.eviction import Eviction
from perdure.cache.tiers.block_index import BlockTable


class Shares:
    """Which namespaces make room for new blocks: those over their share, else the one that stores."""

    def __init__(self, table: BlockTable, eviction: Eviction, budget: int) -> None:
        self._table = table
        self._eviction = eviction
        self._budget = budget
        self._owners: dict[BlockId, str] = {}
        """By where a chain starts."""
        self._coming: dict[BlockId, BlockId] = {}
        """Where the chains of blocks start that are not in the table yet."""
        self._more: dict[str, int] = {}
        """Bytes that are to come, by owner."""

    def wants(self, block: Block, nbytes: int) -> None:
        """A block of so many bytes is to come; the one before it is there, or was to come before it."""
        root = self._coming.get(block.parent) or self._table.root_of(block.parent)
        self._coming[block.id] = root
        owner = self._owner(root)
        self._more[owner] = self._more.get(owner, 0) + nbytes

    def victim(self, block: Block, spared: Callable[[BlockId], bool]) -> tuple[BlockId, int] | None:
        """The leaf to go for a block that comes, and what it is worth."""
        owner = self._owner(self._coming[block.id])
        by_root, used_by_root = self._table.chains()
        usage: dict[str, int] = {}
        used: dict[str, int] = {}
        for root, nbytes in by_root.items():
            each = self._owner(root)
            usage[each] = usage.get(each, 0) + nbytes
            used[each] = max(used.get(each, 0), used_by_root[root])
        payers = self._eviction.payers(owner, self._more[owner], usage, used, self._table.clock, self._budget)
        # If all blocks of these owners are in use, the owner that stores evicts its own.
        for owners in (payers, [owner]):
            leaf = self._table.least_worth(functools.partial(self._is_spared, spared, frozenset(owners)))
            if leaf is not None:
                return leaf
        return None

    def _is_spared(self, spared: Callable[[BlockId], bool], payers: frozenset[str], block: BlockId) -> bool:
        return spared(block) or self._owner(self._table.root_of(block)) not in payers

    def _owner(self, root: BlockId) -> str:
        if root not in self._owners:
            self._owners[root] = self._eviction.owner(root)
        return self._owners[root]
