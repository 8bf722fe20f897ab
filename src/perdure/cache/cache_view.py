"""Cache view: what the slots and the tiers hold, and where the state of a prompt would come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import Entry, Found
from perdure.cache.block_cache import BlockCache
from perdure.cache.block_list import BlockInfo, list_blocks
from perdure.cache.prefix_tree import PrefixRun, SlotState, first_tokens, runs
from perdure.cache.record import Record
from perdure.cache.slots.slot_choice import SlotPlanner
from perdure.cache.slots.slot_table import SlotTable
from perdure.decode.slots import Held, Plan
from perdure.engine.context import Context
from perdure.identity import Identity

Ids = NDArray[np.int32]


class CacheView:
    """Tells what is held. It moves and drops nothing. Only the engine thread asks it, between steps."""

    def __init__(self, context: Context, table: SlotTable, blocks: BlockCache, planner: SlotPlanner) -> None:
        self._context = context
        self._table = table
        self._blocks = blocks
        self._tiers = blocks.tiers
        self._planner = planner

    @property
    def identity(self) -> Identity:
        """Under which state holds here."""
        return self._context.identity

    def plan(self, tokens: Ids, namespace: str) -> Plan:
        """Where the state of `tokens` would come from, if it were wanted now."""
        idle, tiers = self._table.idle, self._tiers
        wanted = tokens if self._planner.inexact is None else tokens[:0]
        found = self._blocks.lookup(wanted, namespace)
        # Where none is idle, as if all were.
        among = idle if idle.any() else self._table.serving
        choice, _, _ = self._planner.choose(among, tokens, wanted, namespace, found)
        best = choice.best
        if not isinstance(best.source, Found):
            counts = {"slot": best.length} if best.length else {}
            return Plan(tiers=counts, blocks=0, nbytes=0, computed=len(tokens) - best.length)
        counts, found = {}, best.source
        for entry in found.entries:
            here = tiers.lower is None or entry.id in tiers.memory
            tier = tiers.memory.name if here or tiers.lower is None else tiers.lower.name
            count = found.keep if entry is found.entries[-1] else len(entry.tokens)
            counts[tier] = counts.get(tier, 0) + count
        return Plan(
            tiers=counts,
            blocks=len(found.entries),
            nbytes=sum(entry.nbytes for entry in found.entries),
            computed=len(tokens) - found.length,
        )

    def held(self, tokens: Ids, namespace: str) -> dict[str, Held]:
        """How much of `tokens` each tier has, and in how many bytes."""
        found: dict[str, Held] = {}
        here = self._table.along(tokens, namespace)
        if longest := max((min(len(tokens), self._context.length(slot.seq)) for slot in here), default=0):
            found["slot"] = Held(tokens=longest)
        kept: dict[str, Sequence[Entry]] = {self._tiers.memory.name: self._blocks.along(tokens, namespace)}
        if self._tiers.lower is not None:
            kept[self._tiers.lower.name] = self._blocks.stored_along(tokens, namespace)
        for name, blocks in kept.items():
            if blocks:
                total = sum(block.nbytes for block in blocks)
                found[name] = Held(tokens=max(block.end for block in blocks), nbytes=total)
        return found

    def slots(self) -> list[SlotState]:
        """What every slot holds that serves requests."""
        return [
            SlotState(
                namespace=slot.namespace,
                busy=slot.busy,
                length=self._context.length(slot.seq),
                tokens=first_tokens(self._context.token_array(slot.seq)),
            )
            for slot in self._table.all[: self._table.count]
        ]

    def blocks(self, namespace: str, *, limit: int | None, after: str | None) -> list[BlockInfo]:
        """A page of what the tiers hold of a namespace."""
        return list_blocks(self._tiers, self._blocks.root(namespace), limit=limit, after=after)

    def runs(
        self, namespace: str, parent: str | None, records: Sequence[Record], *, limit: int, after: int
    ) -> list[PrefixRun] | None:
        """What is kept behind the run with the id `parent`, or from the first token on."""
        return runs(self._tiers, self._blocks.root(namespace), parent, records, limit=limit, after=after)
