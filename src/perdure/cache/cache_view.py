"""Cache view: what the slots and the tiers hold, told without moving any of it.

usage    how much of a prompt each tier has
blocks   the tiers as a list of blocks, page by page
runs     the tiers as a tree: blocks one after another that nothing branches off from, and what follows each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import AnyBlock, BlockId, BlockMeta, PrefixHit
from perdure.cache.prefix_search import key_of
from perdure.cache.slots.cache import SlotCache
from perdure.cache.tiers.memory import MemoryTier
from perdure.cache.tiers.write_behind import WriteBehind
from perdure.decode.request import KeptPrefix, Plan, TierUsage
from perdure.engine.adapters import AdapterSet
from perdure.errors import InvalidInputError
from perdure.identity import Identity

Ids = NDArray[np.int32]

_BLOCKS = 2048
"""Blocks that one look at the tree reads: the engine waits for it."""
_SHOWN = 48
"""Tokens of a run that are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInfo:
    """A block as it is listed."""

    id: str
    parent: str
    """The block that it follows; empty for one that starts a chain."""
    start: int
    tokens: int
    nbytes: int
    tier: str
    """Where it is found first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRun:
    """Blocks one after another, up to where several follow or none. `id` names the last of them."""

    id: str
    start: int
    length: int
    tokens: tuple[int, ...]
    """The first of them."""
    blocks: int
    nbytes: dict[str, int] = field(default_factory=dict)
    """By tier."""
    labels: tuple[str, ...] = ()
    """Of the warmed prefixes that end in it."""
    follows: bool
    """Whether more is kept behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """What one slot holds."""

    namespace: str
    busy: bool
    length: int
    tokens: tuple[int, ...]
    """The first of them."""


class CacheView:
    """Tells what is held. It moves and drops nothing. The engine thread asks it, between steps; `slots` and
    `identity` also another thread, during a step."""

    def __init__(self, slots: SlotCache) -> None:
        self._context = slots.context
        self._table = slots.table
        self._blocks = slots.blocks
        self._tiers = slots.tiers
        self._planner = slots.planner

    @property
    def identity(self) -> Identity:
        """Under which state holds here."""
        return self._context.identity

    def plan(self, tokens: Ids, namespace: str, adapters: AdapterSet | None = None) -> Plan:
        """Where the state of `tokens` would come from, if it were wanted now."""
        adapters = self._context.adapters if adapters is None else adapters
        idle = self._table.idle
        reusable = tokens if self._planner.inexact is None else tokens[:0]
        hit = self._blocks.lookup(reusable, namespace, adapters)
        # Where none is idle, as if all were.
        among = idle if idle.any() else self._table.serving
        best = self._planner.choose(among, tokens, reusable, namespace, adapters, hit).best
        if not isinstance(best.source, PrefixHit):
            counts = {"slot": best.length} if best.length else {}
            return Plan(tiers=counts, blocks=0, nbytes=0, computed=len(tokens) - best.length)
        counts, hit = {}, best.source
        for block, length in hit.lengths():
            counts[block.tier] = counts.get(block.tier, 0) + length
        return Plan(
            tiers=counts,
            blocks=len(hit.blocks),
            nbytes=sum(block.nbytes for block in hit.blocks),
            computed=len(tokens) - hit.length,
        )

    def usage(self, tokens: Ids, namespace: str, adapters: AdapterSet | None = None) -> dict[str, TierUsage]:
        """How much of `tokens` each tier has, and in how many bytes."""
        usage: dict[str, TierUsage] = {}
        adapters = self._context.adapters if adapters is None else adapters
        here = self._table.on_path(tokens, namespace, adapters)
        if longest := max((min(len(tokens), self._context.length(slot.seq)) for slot in here), default=0):
            usage["slot"] = TierUsage(tokens=longest)
        tiers: list[MemoryTier | WriteBehind] = [self._tiers.memory, *self._tiers.lower]
        for tier in tiers:
            blocks: Sequence[AnyBlock] = self._blocks.blocks_on_path(tier, tokens, namespace, adapters)
            if blocks:
                total = sum(block.nbytes for block in blocks)
                usage[tier.name] = TierUsage(tokens=max(block.end for block in blocks), nbytes=total)
        return usage

    def slots(self) -> list[SlotState]:
        """What every slot holds that serves requests."""
        states = []
        for slot in self._table.all[: self._table.count]:
            length, tokens = self._context.beginning(slot.seq, _SHOWN)
            states.append(
                SlotState(namespace=slot.namespace, busy=slot.busy, length=length, tokens=tuple(tokens))
            )
        return states

    # A list of blocks.

    def blocks(self, namespace: str, *, limit: int | None, after: str | None) -> list[BlockInfo]:
        """Up to `limit` blocks of a namespace, each before those that follow it; those behind the block
        `after`. A page costs what it holds, and the way back to the root."""
        root = self._blocks.root(namespace)
        page: list[BlockInfo] = []
        block = (
            next(self._tiers.children(root), None)
            if after is None
            else self._next(root, self._known(root, after))
        )
        while block is not None and (limit is None or len(page) < limit):
            info = BlockInfo(
                id=block.id.hex(),
                parent="" if block.parent == root else block.parent.hex(),
                start=block.start,
                tokens=len(block.tokens),
                nbytes=block.nbytes,
                tier=self._tier_of(block),
            )
            page.append(info)
            block = self._next(root, block)
        return page

    def _known(self, root: BlockId, name: str) -> AnyBlock:
        """The block of that name, if it is one of those behind `root`."""
        try:
            known = above = self._tiers.lookup(BlockId(bytes.fromhex(name)))
        except ValueError:
            known = above = None
        while above is not None and above.parent != root:
            above = self._tiers.lookup(above.parent)
        if known is None or above is None:
            raise InvalidInputError(
                f"there is no block {name!r}, or none any more: list from the first one on"
            )
        return known

    def _next(self, root: BlockId, block: AnyBlock) -> AnyBlock | None:
        """What comes behind `block`: what follows it first, else its next sibling, or that of the nearest
        block before it that has one."""
        following = next(self._tiers.children(block.id), None)
        above: AnyBlock | None = block
        while following is None and above is not None:
            following = next(self._tiers.children(above.parent, start=key_of(above.tokens) + b"\0"), None)
            above = None if above.parent == root else self._tiers.lookup(above.parent)
        return following

    def _tier_of(self, block: AnyBlock) -> str:
        """Where a block is found first."""
        if block.id in self._tiers.memory or isinstance(block, BlockMeta):
            return self._tiers.memory.name if block.id in self._tiers.memory else block.tier
        # It waits to be written.
        return next(tier.name for tier in self._tiers.lower if tier.lookup(block.id) is not None)

    # A tree of runs.

    def runs(
        self, namespace: str, parent: str | None, prefixes: Sequence[KeptPrefix], *, limit: int, after: int
    ) -> list[PrefixRun] | None:
        """The runs after the one with the id `parent`, or those from the first token on: up to `limit`,
        behind the first `after`. None where that run is gone, or another namespace's. Looking counts as no
        use of a block."""
        root = self._blocks.root(namespace)
        path = self._path(root, parent)
        if path is None:
            return None
        last = path[-1].id if path else root
        before = np.concatenate([block.tokens for block in path]) if path else np.empty(0, np.int32)
        left = _BLOCKS
        runs = []
        for block in islice(self._tiers.children(last), after, after + limit):
            run, follows = self._run(block, max(1, left))
            left -= len(run)
            runs.append(self._shown(run, follows, before, prefixes))
        return runs

    def _path(self, root: BlockId, id_: str | None) -> list[AnyBlock] | None:
        """The blocks that lead from `root` to a block."""
        if id_ is None:
            return []
        path: list[AnyBlock] = []
        name = BlockId(bytes.fromhex(id_))
        while name != root:
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
        self, run: Sequence[AnyBlock], follows: bool, before: Ids, prefixes: Sequence[KeptPrefix]
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
            tokens=_first_tokens(tokens),
            blocks=len(run),
            nbytes=nbytes,
            labels=tuple(sorted(labels)),
            follows=follows,
        )


def _first_tokens(tokens: Ids) -> tuple[int, ...]:
    return tuple(tokens[:_SHOWN].tolist())
