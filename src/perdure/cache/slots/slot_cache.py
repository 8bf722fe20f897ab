"""Slot cache: which slot a request gets, swapped in from what, at the least cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import BLOCK, Block, BlockId
from perdure.cache.block_cache import BlockCache
from perdure.cache.cache_view import CacheView
from perdure.cache.memory_tier import MemoryTier
from perdure.cache.pins import Pins
from perdure.cache.record import Record, RecordIndex
from perdure.cache.slots.slot_checkpoints import PrefixHash, SlotCheckpoints
from perdure.cache.slots.slot_choice import SlotPlanner, why_not_more
from perdure.cache.slots.slot_swapper import SlotSwapper
from perdure.cache.slots.slot_table import Slot, SlotIndex, SlotTable
from perdure.cache.tiers import LowerTier, Tiers
from perdure.decode.slots import Later, Pin, ReuseReport, SlotAssignment
from perdure.engine.context import Context
from perdure.errors import EngineError
from perdure.identity import Identity

Ids = NDArray[np.int32]

_WORTH_WAITING = 32
"""Tokens that another request must be about to compute before it pays to wait for it."""


class SlotCache:
    """Places requests so that as little as possible is computed, now and later.

    Always holds: what a sequence has is never thrown away while the budget has room for it; a request that
    only shares a beginning with a conversation gets a copy, never its place; namespaces do not meet.
    """

    def __init__(
        self,
        context: Context,
        *,
        budget: int,
        lower: LowerTier | None = None,
        block_size: int = BLOCK,
        spacing: int = 256,
        exact: int | None = None,
        swap_slots: int = 0,
    ) -> None:
        """The last `swap_slots` sequences of the context serve no request: conversations wait in them.

        With `exact`, prompts are computed in steps of so many tokens, each alone: only what was computed
        in just those steps is used again, so that the next reply has the bits of a cold one."""
        self._exact = exact
        if exact is not None:
            block_size, spacing = exact, max(1, spacing // exact) * exact
        self.budget = budget
        self.pins = Pins(0)
        # Checkpoints, blocks, and the memory through which states pass on their way keep to one budget.
        self._checkpoints = SlotCheckpoints.of(
            context, budget=budget, spacing=spacing, pinned=self.pins.holds
        )
        scratch = context.limit_scratch(budget // 8)
        self.tier = MemoryTier(budget - self._checkpoints.budget - scratch, pinned=self.pins.holds)
        self.pins.budget = self.tier.budget // 2
        self.tiers = Tiers(self.tier, lower)
        self.reused: dict[str, int] = {}
        self.computed = 0
        self._blocks = BlockCache(context, self.tiers, block_size=block_size, exact=exact is not None)
        self._context = context
        self._table = SlotTable(context, swap_slots=swap_slots)
        self.count = self._table.count
        """How many requests can have a slot at once."""
        self._index = SlotIndex(context.n_seq)
        self._swapper = SlotSwapper(
            context,
            self._table.all,
            self._blocks,
            self.tiers,
            self._checkpoints,
            exact=exact,
            swap_slots=self._table.all[self.count :],
            changed=self._index.remove,
        )
        self._planner = SlotPlanner(
            context,
            self._table,
            self._index,
            self._blocks,
            self._checkpoints,
            exact=exact,
            reach=self._swapper.reach,
        )
        self.view = CacheView(context, self._table, self._blocks, self._planner)
        """Tells what is held."""

    @property
    def nbytes(self) -> int:
        """What is kept besides the sequences themselves."""
        return self.tier.nbytes + self._checkpoints.nbytes + self._context.scratch_bytes

    # For the scheduler.

    def acquire(
        self, tokens: Ids, *, namespace: str = "", reuse: bool = True, pins: Sequence[Pin] = ()
    ) -> SlotAssignment | Later | None:
        idle = self._table.idle
        if not idle.any():
            return None
        refusal = self._planner.inexact if reuse else "reuse was not wanted"
        wanted = tokens if refusal is None else tokens[:0]
        found = self._blocks.lookup(wanted, namespace)
        choice, shared, held = self._planner.choose(idle, tokens, wanted, namespace, found)
        # What a busy sequence has so far does not count: the rest of it is worth waiting for too.
        if shared.max() - choice.sure >= _WORTH_WAITING:
            soon = self._planner.soon(shared, held)
            if soon.until - choice.sure >= _WORTH_WAITING:
                return soon
        anywhere = int(np.minimum(shared, held).max(initial=0))
        if anywhere < len(wanted):
            anywhere = max(anywhere, self._blocks.shared(wanted, namespace, found))
        slot = self._table.all[choice.best.seq]
        tiers, trouble = self._swapper.fill(choice.best, tokens, namespace)
        self._checkpoints.thin_out()
        reused = sum(tiers.values())
        self._table.acquire(slot, namespace)
        self._checkpoints.start(slot.seq)
        try:
            slot.exact = self.keepable(len(wanted))
            self._index.put(slot.seq, namespace, tokens)
            if reused:
                with suppress(EngineError):
                    self.reached(slot.seq, reused, {len(tokens)})
            why = (
                refusal
                or trouble
                or why_not_more(
                    self._blocks,
                    tokens,
                    namespace,
                    reused=reused,
                    reach=choice.reach,
                    shared=anywhere,
                    exact=self._exact,
                    budget=self.budget,
                )
            )
            pinned = () if refusal else tuple(pin for pin in pins if self._pin(pin, tokens, namespace))
        except BaseException:
            # Whoever asked does not get it, so nobody else would give it back.
            self.release(slot.seq)
            raise
        if tokens.size:
            for tier, count in tiers.items():
                self.reused[tier] = self.reused.get(tier, 0) + count
            self.computed += len(tokens) + 1 - reused
        report = ReuseReport(tiers=tiers, computed=len(tokens) + 1 - reused, why=why, pins=pinned)
        return SlotAssignment(slot.seq, reused, report)

    def _pin(self, pin: Pin, tokens: Ids, namespace: str) -> bool:
        """Have the state of a beginning of `tokens` outlast its slot, once it is computed."""
        length = self.keepable(min(pin.length, len(tokens)))
        if not length:
            return False
        names: list[tuple[bytes, int]] = [*self._blocks.names(tokens, namespace, length)]
        key = pin.key.encode() if pin.key else names[-1][0]
        point = PrefixHash(self._context.identity.digest).advance(tokens[:length])
        return self.pins.add(namespace, key, [*names, (point, 0)], pin.seconds)

    def is_over(self, later: Later) -> bool:
        return self._table.used[later.seq] != later.since or self._context.length(later.seq) >= later.until

    def release(self, seq: int) -> None:
        slot = self._table.all[seq]
        self._table.release(slot)
        if slot.forget:
            self._swapper.empty(slot)

    def chunk(self, seq: int, cached: int, count: int, returns: Collection[int]) -> int:
        """Where a memory cannot be cut, steps end at the places that are worth coming back to."""
        return self._checkpoints.chunk(cached, count, returns)

    def reached(self, seq: int, length: int, returns: Collection[int]) -> None:
        """A step ended at `length`: keep a checkpoint if it is such a place."""
        places = returns if self._exact is None else {self.keepable(place) for place in returns}
        self._checkpoints.reached(seq, length, places)

    def timed(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens has taken so long."""
        self.tiers.rates.computed(tokens, seconds)

    def keepable(self, length: int) -> int:
        """How much of a prompt of `length` tokens can be used again: in exact mode, its whole steps."""
        return self._swapper.keepable(length)

    # For whoever stores, moves or clears what is kept.

    def swap_in(self, tokens: Ids, namespace: str) -> ReuseReport:
        """Bring the state of `tokens` into a sequence, as far as it is kept. The rest is computed when it
        is next asked for."""
        counts = dict(self.reused), self.computed
        place = self.acquire(tokens, namespace=namespace)
        self.reused, self.computed = counts
        if not isinstance(place, SlotAssignment):
            why = "all sequences are busy: it comes with the next request"
            return ReuseReport(computed=len(tokens), why=why)
        self.release(place.seq)
        return ReuseReport(
            tiers=place.report.tiers, computed=len(tokens) - place.cached, why=place.report.why
        )

    def swap_out(self, tokens: Ids, namespace: str) -> None:
        """Put the state of `tokens` into the tiers and let go of its sequence."""
        for slot in self._table.along(tokens, namespace):
            if not slot.busy:
                self._swapper.store(slot)
                self._swapper.empty(slot)

    def pack(self, tokens: Ids, namespace: str) -> tuple[Identity, list[Block]]:
        """The blocks of a prefix, as far as it is kept, and the identity under which they hold."""
        self.store(tokens, namespace)
        return self._context.identity, self._blocks.pack(tokens, namespace)

    def unpack(self, identity: Identity, blocks: Sequence[Block], namespace: str) -> int:
        """Take in blocks that were packed elsewhere; how many tokens they hold."""
        return self._blocks.unpack(identity, blocks, namespace)

    def drop_stored(self, tokens: Ids, namespace: str) -> None:
        """Drop from memory what the lower tier has of `tokens` and nothing else in memory goes on from."""
        lower = self.tiers.lower
        if lower is None:
            return
        for block in reversed(self._blocks.along(tokens, namespace)):
            if next(self.tier.children(block.id), None) is None and lower.lookup(block.id) is not None:
                self.tier.drop(block.id)

    def store(self, tokens: Ids, namespace: str) -> tuple[int, BlockId]:
        """Put the state of `tokens`, if a sequence holds it, into the tiers. How many are kept, and where
        their chain starts."""
        for slot in self._table.along(tokens, namespace):
            self._swapper.store(slot)
        found = self._blocks.lookup(tokens, namespace)
        if self.tiers.lower is not None:
            self.tiers.lower.store([entry for entry in found.entries if isinstance(entry, Block)])
        return found.length, self._blocks.root(namespace)

    def store_all(self, *, written: Callable[[], None]) -> None:
        """Put what every idle sequence holds into the tiers. `written` returns when a lower tier has it: who
        was used last comes last, and where room is short, those before make way."""
        for slot in sorted(self._table.all, key=lambda slot: self._table.used[slot.seq]):
            if not slot.busy:
                self._swapper.store(slot)
                written()

    def clear(self) -> None:
        """Drop everything."""
        self._blocks.clear()
        self.pins.clear()
        self.reused, self.computed = {}, 0
        # What is left in it of states that passed goes too.
        self._context.limit_scratch(0)
        self._context.limit_scratch(self.budget // 8)
        for slot in self._table.all:
            self._forget(slot)

    def doomed(self, gone: Sequence[Record], needs: RecordIndex) -> tuple[list[BlockId], list[Block]]:
        """The blocks that go with the records `gone`, and what of those stays in their place."""
        return self._blocks.doomed(gone, needs)

    def drop(self, gone: Sequence[Record], needs: RecordIndex, blocks: Iterable[BlockId]) -> None:
        """Drop `blocks`, and the sequences that go on from records and lead to none of `needs`."""
        self._blocks.replace(blocks, ())
        for slot in self._table.all:
            root = self._blocks.root(slot.namespace)
            leads = [
                len(record.tokens)
                for record in gone
                if record.root == root
                and self._context.common_prefix(record.ids, slot.seq) == len(record.tokens)
            ]
            if leads and needs.longest_beginning(root, self._context.token_array(slot.seq)) < max(leads):
                self._forget(slot)

    def store_blocks(self, blocks: Sequence[Block]) -> None:
        """Keep blocks that are made of others."""
        self._blocks.replace((), blocks)

    def _forget(self, slot: Slot) -> None:
        if slot.busy:
            slot.forget = True
        else:
            self._swapper.empty(slot)
