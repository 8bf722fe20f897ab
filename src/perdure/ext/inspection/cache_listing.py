"""Cache listing: the blocks that the tiers keep of a namespace, as a list or as a tree, without moving any.

blocks   page by page, each before those that follow it
runs     blocks one after another that nothing branches off from, and what follows each
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from perdure import InvalidInputError
from perdure.spi.cache import AnyBlock, BlockId, BlockInfo, BlockMeta, KeptPrefix, PrefixRun, Tiers, key_of

_BLOCKS = 2048
"""Blocks that one look at the tree reads: the engine waits for it."""
_SHOWN = 48
"""Tokens of a run that are listed."""


class CacheListing:
    """What the tiers keep behind one root. The engine thread asks it, between steps."""

    def __init__(self, tiers: Tiers, root: BlockId) -> None:
        self._tiers = tiers
        self._root = root

    def blocks(self, *, limit: int | None, after: str | None) -> list[BlockInfo]:
        """Up to `limit` blocks, each before those that follow it; those behind the block `after`. A
        page costs what it holds, and the way back to the root."""
        page: list[BlockInfo] = []
        block = (
            next(self._tiers.children(self._root), None) if after is None else self._next(self._known(after))
        )
        while block is not None and (limit is None or len(page) < limit):
            info = BlockInfo(
                id=block.id.hex(),
                parent="" if block.parent == self._root else block.parent.hex(),
                start=block.start,
                tokens=len(block.tokens),
                nbytes=block.nbytes,
                tier=self._tier_of(block),
            )
            page.append(info)
            block = self._next(block)
        return page

    def _known(self, name: str) -> AnyBlock:
        """The block of that name, if it is one of those behind the root."""
        try:
            known = above = self._tiers.lookup(BlockId(bytes.fromhex(name)))
        except ValueError:
            known = above = None
        while above is not None and above.parent != self._root:
            above = self._tiers.lookup(above.parent)
        if known is None or above is None:
            raise InvalidInputError(
                f"there is no block {name!r}, or it is gone: list again from the first one"
            )
        return known

    def _next(self, block: AnyBlock) -> AnyBlock | None:
        """What comes behind `block`: what follows it first, else its next sibling, or that of the nearest
        block before it that has one."""
        following = next(self._tiers.children(block.id), None)
        above: AnyBlock | None = block
        while following is None and above is not None:
            following = next(self._tiers.children(above.parent, start=key_of(above.tokens) + b"\0"), None)
            above = None if above.parent == self._root else self._tiers.lookup(above.parent)
        return following

    def _tier_of(self, block: AnyBlock) -> str:
        """Where a block is found first."""
        if block.id in self._tiers.memory or isinstance(block, BlockMeta):
            return self._tiers.memory.name if block.id in self._tiers.memory else block.tier
        # It waits to be written.
        return next(tier.name for tier in self._tiers.lower if tier.lookup(block.id) is not None)

    # A tree of runs.

    def runs(
        self, parent: str | None, prefixes: Sequence[KeptPrefix], *, limit: int, after: int
    ) -> list[PrefixRun] | None:
        """The runs after the one with the id `parent`, or those from the first token on: up to `limit`,
        behind the first `after`. None where that run is gone, or another namespace's. Looking counts as no
        use of a block."""
        path = self._path(parent)
        if path is None:
            return None
        last = path[-1].id if path else self._root
        before = np.concatenate([block.tokens for block in path]) if path else np.empty(0, np.int32)
        left = _BLOCKS
        runs = []
        for block in islice(self._tiers.children(last), after, after + limit):
            run, follows = self._run(block, max(1, left))
            left -= len(run)
            runs.append(self._shown(run, follows, before, prefixes))
        return runs

    def _path(self, id_: str | None) -> list[AnyBlock] | None:
        """The blocks that lead from the root to a block."""
        if id_ is None:
            return []
        path: list[AnyBlock] = []
        name = BlockId(bytes.fromhex(id_))
        while name != self._root:
            block: AnyBlock | None = self._tiers.memory.peek(name)
            if block is None:
                lower = (tier.lookup(name) for tier in self._tiers.lower)
                block = next((each for each in lower if each is not None), None)
            if block is None or (path and block.end != path[-1].start):
                return None
            path.append(block)
            name = block.parent
        path.reverse()
        return path

    def _run(self, block: AnyBlock, most: int) -> tuple[list[AnyBlock], bool]:
        """A block with those that follow it alone, and whether more follow the last of them."""
        run = [block]
        while True:
            following = list(islice(self._tiers.children(run[-1].id), 2))
            if len(following) != 1 or len(run) >= most:
                return run, bool(following)
            run.append(following[0])

    def _shown(
        self,
        run: Sequence[AnyBlock],
        follows: bool,
        before: NDArray[np.int32],
        prefixes: Sequence[KeptPrefix],
    ) -> PrefixRun:
        tokens = np.concatenate([block.tokens for block in run])
        whole = np.concatenate([before, tokens])
        nbytes: dict[str, int] = {}
        for each in run:
            copies: list[tuple[str, AnyBlock | None]] = [
                (self._tiers.memory.name, self._tiers.memory.peek(each.id)),
                *((tier.name, tier.lookup(each.id)) for tier in self._tiers.lower),
            ]
            for name, block in copies:
                if block is not None:
                    nbytes[name] = nbytes.get(name, 0) + block.nbytes
        labels = {
            label
            for prefix in prefixes
            if len(before) < len(prefix.tokens) <= len(whole)
            and np.array_equal(prefix.ids, whole[: len(prefix.tokens)])
            for label in prefix.labels
        }
        return PrefixRun(
            id=run[-1].id.hex(),
            start=run[0].start,
            length=len(tokens),
            tokens=tuple(tokens[:_SHOWN].tolist()),
            blocks=len(run),
            nbytes=nbytes,
            labels=tuple(sorted(labels)),
            follows=follows,
        )
