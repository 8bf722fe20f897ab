"""Cache view: what the slots and the tiers hold, listed without moving any of it.

plan     where the state of a prompt would come from
usage    how much of a prompt each tier has
slots    what every slot holds

The tiers as a list or as a tree of blocks are for an extension, `inspection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import AnyBlock, PrefixHit
from perdure.cache.slots.cache import SlotCache
from perdure.cache.tiers.memory import MemoryTier
from perdure.decode.request import KeptPrefix, Plan, TierUsage
from perdure.engine.adapters import AdapterSet
from perdure.extension import part
from perdure.identity import Identity

if TYPE_CHECKING:
    from perdure.cache.tiers.write_behind import WriteBehind


Ids = NDArray[np.int32]

_SHOWN = 48
"""Tokens of a slot that are listed."""


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

    def blocks(self, namespace: str, *, limit: int | None, after: str | None) -> list[BlockInfo]:
        """Up to `limit` blocks of a namespace, each before those that follow it; those behind the block
        `after`."""
        blocks: list[BlockInfo] = self._listing("rt.cache.blocks", namespace).blocks(limit=limit, after=after)
        return blocks

    def runs(
        self, namespace: str, parent: str | None, prefixes: Sequence[KeptPrefix], *, limit: int, after: int
    ) -> list[PrefixRun] | None:
        """The runs after the one with the id `parent`, or those from the first token on: up to `limit`,
        behind the first `after`. None where that run is gone, or another namespace's."""
        listing = self._listing("rt.cache.runs", namespace)
        runs: list[PrefixRun] | None = listing.runs(parent, prefixes, limit=limit, after=after)
        return runs

    def _listing(self, call: str, namespace: str) -> Any:
        return part(call, "inspection")(self._tiers, self._blocks.root(namespace))
