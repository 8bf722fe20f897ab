"""Slot cache: which slot a request gets, and how state gets into slots and out of them, at the least cost."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import BLOCK, Block, BlockId, PrefixHit, chain
from perdure.cache.block_cache import BlockCache
from perdure.cache.eviction import Eviction, Pins, Use
from perdure.cache.slots.checkpoints import CutAnywhere, SlotCheckpoints
from perdure.cache.slots.placement import Placement, Slot, SlotPlanner, SlotTable, why_not_more
from perdure.cache.tiers.memory import MemoryTier
from perdure.cache.tiers.tiered import Tiers
from perdure.decode.request import KeptPrefix, ReuseReport
from perdure.decode.scheduler import Slots
from perdure.decode.sequence import PendingPrefix, SlotAssignment
from perdure.engine.adapters import AdapterSet
from perdure.engine.context import Context
from perdure.errors import EngineError
from perdure.events.hub import EventHub
from perdure.identity import Identity

if TYPE_CHECKING:
    from perdure.cache.kept_prefixes import KeptPrefixes
    from perdure.cache.slots.swap_slots import SwapSlots
    from perdure.cache.tiers.write_behind import WriteBehind


log = logging.getLogger("perdure.cache")

Ids = NDArray[np.int32]

_ROW = 8
"""What it takes to cut and write the row of a token, in tokens that are only read."""
_WORTH_WAITING = 32
"""Tokens that another request must be about to compute before it pays to wait for it."""
_NOTHING = ReuseReport(computed=0, why="")


class SlotSwapper:
    """Moves state between the slots, and between them and the tiers.

    Always holds: what a slot has goes into a swap slot or the tiers before something else takes its place; a
    slot that could not be filled is empty. The checkpoints of a slot are those of what it holds.
    """

    def __init__(
        self,
        context: Context,
        slots: Sequence[Slot],
        blocks: BlockCache,
        tiers: Tiers,
        checkpoints: SlotCheckpoints,
        *,
        exact: int | None,
        swap_slots: Sequence[Slot],
        changed: Callable[[int], None],
    ) -> None:
        """`slots` are all that the context has, and `swap_slots` those of them that serve no request."""
        self._swap_slots: SwapSlots | None = None
        if swap_slots:
            from perdure.cache.slots.swap_slots import SwapSlots

            self._swap_slots = SwapSlots(
                context, swap_slots, checkpoints, eviction=blocks.eviction, store=self.store, changed=changed
            )
        self._context = context
        self._slots = slots
        self._blocks = blocks
        self._tiers = tiers
        self._checkpoints = checkpoints
        self._exact = exact

    def reusable_length(self, length: int) -> int:
        """How much of a prompt of `length` tokens can be used again: in exact mode, its whole steps."""
        return length if self._exact is None else length // self._exact * self._exact

    def restorable_length(self, slot: Slot, tokens: Ids, adapters: AdapterSet) -> int:
        """The longest prefix of `tokens`, computed with `adapters`, that `slot` can be brought to, by what it
        holds in truth."""
        alike = self._context.same_state_until(slot.seq, adapters)
        shared = int(min(self._context.common_prefix(tokens, slot.seq), alike))
        if self._exact is not None:
            shared = self.reusable_length(min(shared, slot.exact))
        self._checkpoints.on_path(slot.seq)
        return self._checkpoints.restorable_length(slot.seq, shared, self._context.length(slot.seq))

    def fill(self, placement: Placement, tokens: Ids, namespace: str, adapters: AdapterSet) -> ReuseReport:
        """Bring a prefix into its slot. What follows there is computed with `adapters`. What was brought, and
        as the reason what went wrong."""
        report = self._fill(placement, tokens, namespace, adapters)
        self._context.adapt(adapters, placement.seq)
        return replace(report, computed=len(tokens) - report.reused)

    def _fill(self, placement: Placement, tokens: Ids, namespace: str, adapters: AdapterSet) -> ReuseReport:
        slot = self._slots[placement.seq]
        source = self._slots[placement.source] if isinstance(placement.source, int) else placement.source
        trouble = ""
        try:
            if (
                isinstance(source, Slot)
                and self.restorable_length(source, tokens, adapters) < placement.length
            ):
                raise EngineError(f"sequence {source.seq} holds something else than was known of it")
            if source is slot:
                if placement.length < self._context.length(slot.seq):
                    self.store(slot)
                self._checkpoints.go_back(slot.seq, placement.length)
                return replace(_NOTHING, tiers={"slot": placement.length})
            self._swap_out(slot, source)
            slot.namespace = namespace
            self._context.adapt(adapters, slot.seq)
            if source is None:
                return _NOTHING
            if isinstance(source, Slot):
                self._copy(source, slot, tokens[: placement.length])
                slot.exact = source.exact
                if self._swap_slots is not None:
                    self._swap_slots.swapped_in(source, placement.length)
                return replace(_NOTHING, tiers={"slot": placement.length})
            report = self._swap_in(slot, source, tokens)
            if report.tiers:
                return report
            trouble = report.why
        except Exception as error:
            # What could not be moved, for whatever reason, is computed; the ledger says what is there.
            trouble = f"what was held could not be brought in place: {error}"
        self._checkpoints.forget(slot.seq)
        self._context.clear(slot.seq)
        return replace(_NOTHING, why=trouble)

    def _copy(self, source: Slot, slot: Slot, tokens: Ids) -> None:
        """Make `slot`, which is empty, hold `tokens`, with which `source` begins."""
        if self._rows_are_cheaper(self._context.length(source.seq), len(tokens)):
            rows = self._context.capture(source.seq).rows
            if rows is not None:
                self._context.assemble(tokens, [rows.cut(0, len(tokens))], None, slot.seq)
                return
        self._context.fork(source.seq, slot.seq)
        self._checkpoints.copy(source.seq, slot.seq)
        self._checkpoints.go_back(slot.seq, len(tokens))

    def _rows_are_cheaper(self, total: int, length: int) -> bool:
        """Whether the rows of `length` tokens, read out of `total` and written, take less time than a fork. A
        fork between streams copies every cell there is room for, at the speed of memory."""
        context = self._context
        if not context.memory.has_rows or context.memory.needs_checkpoint:
            return False
        # Forks of a pool copy nothing, and those on a device do not pass the bus.
        if context.capabilities.shared or context.capabilities.asynchronous:
            return False
        return total + _ROW * length < context.n_ctx // 2

    def store(self, slot: Slot) -> None:
        """Copy what `slot` holds into the tiers. What cannot be copied is computed again one day."""
        with suppress(EngineError):
            length = self._context.length(slot.seq)
            if self._exact is not None:
                length = self.reusable_length(min(length, slot.exact))
            states = {point.length: point.state for point in self._checkpoints.on_path(slot.seq)}
            self._blocks.store(slot.seq, slot.namespace, states, length, slot.use)

    def empty(self, slot: Slot) -> None:
        """Let go of what `slot` holds."""
        slot.forget = False
        self._checkpoints.forget(slot.seq)
        with suppress(EngineError):
            self._context.clear(slot.seq)

    def _swap_out(self, slot: Slot, source: Slot | PrefixHit | None) -> None:
        """Empty `slot`, keeping what it holds in a swap slot or the tiers, and there what is about to come in
        its place."""
        if not (length := self._context.length(slot.seq)):
            self._checkpoints.forget(slot.seq)
            return
        began = time.monotonic()
        memory, incoming = self._tiers.memory, source.blocks if isinstance(source, PrefixHit) else ()
        here = [block for block in incoming if block.id in memory]
        memory.pin(here)
        try:
            if self._swap_slots is None or not self._swap_slots.swap_out(slot, source):
                self.store(slot)
        finally:
            memory.unpin(here)
        self._checkpoints.forget(slot.seq)
        self._context.clear(slot.seq)
        self._emit_swapped("out", slot, length, began)

    def _emit_swapped(self, direction: str, slot: Slot, tokens: int, began: float) -> None:
        if (events := self._blocks.events).on:
            from perdure.events.event import Swapped

            events.emit(Swapped, "", direction, slot.seq, tokens, time.monotonic() - began)

    def _swap_in(self, slot: Slot, hit: PrefixHit, tokens: Ids) -> ReuseReport:
        began = time.monotonic()
        prefix = self._blocks.load(hit)
        trouble = ""
        if prefix.length < hit.length:
            trouble = f"what was kept from token {prefix.length} on was damaged or is gone"
        if not prefix.length:
            return replace(_NOTHING, why=trouble)
        self._context.assemble(tokens[: prefix.length], prefix.pieces, prefix.tail_state, slot.seq)
        self._checkpoints.swapped_in(slot.seq, prefix)
        self._emit_swapped("in", slot, prefix.length, began)
        return ReuseReport(tiers=prefix.tiers, seconds=prefix.seconds, computed=0, why=trouble)


class SlotCache(Slots):
    """Places requests so that as little as possible is computed, now and later.

    Always holds: what a sequence has is never thrown away while the budget has room for it; a request that
    only shares a beginning with a conversation gets a copy, never its place; namespaces do not meet.
    """

    def __init__(
        self,
        context: Context,
        *,
        budget: int,
        lower: Sequence[WriteBehind] = (),
        block_size: int = BLOCK,
        spacing: int = 256,
        exact: int | None = None,
        swap_slots: int = 0,
        events: EventHub | None = None,
        eviction: Eviction | None = None,
    ) -> None:
        """Behind the memory lie the tiers `lower`, the fastest first.

        The last `swap_slots` sequences of the context serve no request: conversations wait in them.

        With `exact`, prompts are computed in steps of so many tokens, each alone: only what was computed
        in just those steps is used again, so that the next reply has the bits of a cold one.

        `eviction` says what goes first where there is no room."""
        super().__init__(context)
        self._exact = exact
        if exact is not None:
            block_size, spacing = exact, max(1, spacing // exact) * exact
        self._block_size = block_size
        self.budget = budget
        # Checkpoints, blocks, and the memory through which states pass on their way keep to one budget.
        pins = self.pins = Pins()
        self.eviction = eviction or Eviction()
        self.eviction.pinned = pins.holds
        self._checkpoints: SlotCheckpoints = CutAnywhere(context)
        if context.memory.needs_checkpoint:
            from perdure.cache.slots.checkpoint_store import CheckpointStore

            self._checkpoints = CheckpointStore(
                context, budget=budget // 4, spacing=spacing, pinned=pins.holds
            )
        scratch = context.limit_scratch(budget // 8)
        self.tier = MemoryTier(budget - self._checkpoints.budget - scratch, eviction=self.eviction)
        pins.budget = min([self.tier.budget, *(each.tier.budget for each in lower)]) // 2
        for each in lower:
            each.tier.pinned = pins.holds
            each.tier.eviction = self.eviction
        self.tiers = Tiers(self.tier, lower)
        self.reused: dict[str, int] = {}
        self.computed = 0
        self.events = events or EventHub()
        self.blocks = BlockCache(
            context, self.tiers, block_size=block_size, exact=exact is not None, events=self.events
        )
        self.table = SlotTable(context, swap_slots=swap_slots)
        self.count = self.table.count
        self._swapper = SlotSwapper(
            context,
            self.table.all,
            self.blocks,
            self.tiers,
            self._checkpoints,
            exact=exact,
            swap_slots=self.table.all[self.count :],
            changed=self.table.remove,
        )
        self.planner = SlotPlanner(
            context,
            self.table,
            self.blocks,
            self._checkpoints,
            exact=exact,
            restorable_length=self._swapper.restorable_length,
        )

    @property
    def nbytes(self) -> int:
        """What is kept besides the sequences themselves."""
        return self.tier.nbytes + self._checkpoints.nbytes + self.context.scratch_bytes

    # For the scheduler.

    def acquire(
        self,
        tokens: Ids,
        *,
        namespace: str = "",
        adapters: AdapterSet | None = None,
        reuse: bool = True,
        pins: Sequence[KeptPrefix] = (),
        conversation: str = "",
        side: bool = False,
    ) -> SlotAssignment | PendingPrefix | None:
        place = self._bring(tokens, Use(namespace, conversation, side), adapters, reuse, pins)
        if tokens.size and isinstance(place, SlotAssignment):
            for tier, count in place.report.tiers.items():
                self.reused[tier] = self.reused.get(tier, 0) + count
            self.computed += place.report.computed
        return place

    def _bring(
        self,
        tokens: Ids,
        use: Use,
        adapters: AdapterSet | None,
        reuse: bool = True,
        pins: Sequence[KeptPrefix] = (),
    ) -> SlotAssignment | PendingPrefix | None:
        """A slot with as much of `tokens` as is kept, or what to wait for."""
        idle, namespace = self.table.idle, use.namespace
        if not idle.any():
            return None
        adapters = self._chosen(adapters)
        refusal = self.planner.inexact if reuse else "reuse was not wanted"
        reusable = tokens if refusal is None else tokens[:0]
        hit = self.blocks.lookup(reusable, namespace, adapters)
        tip = self.blocks.use(tokens, use, adapters)
        choice = self.planner.choose(idle, tokens, reusable, namespace, adapters, hit)
        # What a busy sequence has so far does not count: the rest of it is worth waiting for too.
        if choice.shared.max() - choice.from_idle >= _WORTH_WAITING:
            pending = self.planner.pending_prefix(choice)
            if pending.length - choice.from_idle >= _WORTH_WAITING:
                return pending
        anywhere = int(np.minimum(choice.shared, choice.lengths).max(initial=0))
        if anywhere < len(reusable):
            anywhere = max(anywhere, self.blocks.shared(reusable, namespace, hit, adapters))
        slot = self.table.all[choice.best.seq]
        brought = self._swapper.fill(choice.best, tokens, namespace, adapters)
        self._checkpoints.thin_out()
        reused = brought.reused
        self.table.acquire(slot, namespace)
        slot.use, slot.tip = use, tip
        self._checkpoints.start(slot.seq)
        try:
            slot.exact = self.reusable_length(len(reusable))
            self.table.put(slot.seq, tokens)
            if reused:
                with suppress(EngineError):
                    self.reached(slot.seq, reused, {len(tokens)})
            why = (
                refusal
                or brought.why
                or why_not_more(
                    self.blocks,
                    tokens,
                    namespace,
                    adapters,
                    reused=reused,
                    restorable=choice.from_anywhere,
                    shared=anywhere,
                    exact=self._exact,
                    budget=self.budget,
                )
            )
            pinned: tuple[KeptPrefix, ...] = ()
            if not refusal:
                pinned = tuple(pin for pin in pins if self.keep(pin, tokens, namespace, adapters))
        except BaseException:
            # The caller does not get the slot, so nobody else would release it.
            self.release(slot.seq)
            raise
        # The last token of a prompt is not among `tokens`: it is always computed.
        report = replace(brought, computed=len(tokens) + 1 - reused, why=why, pins=pinned)
        return SlotAssignment(slot.seq, reused, report)

    def keep(
        self, prefix: KeptPrefix, tokens: Ids, namespace: str, adapters: AdapterSet | None = None
    ) -> bool:
        """Have the state of a beginning of `tokens` kept: listed where it has no end, else held from eviction
        until its end, once it is computed. False: there is no room to hold it."""
        if prefix.seconds is None:
            return self.kept.add(prefix)
        length = self.reusable_length(min(prefix.length, len(tokens)))
        if not length:
            return False
        adapters = self._chosen(adapters)
        from perdure.cache.slots.checkpoint_store import PrefixHash

        checkpoint = PrefixHash(self.context.identity_of(adapters).digest).advance(tokens[:length])
        names = self.blocks.names(tokens, namespace, length, adapters)
        blocks: list[tuple[bytes, int]] = [(checkpoint, 0), *names]
        return self.kept.add(replace(prefix, namespace=namespace), blocks)

    def is_ready(self, prefix: PendingPrefix) -> bool:
        is_over = self.table.used[prefix.seq] != prefix.since
        return is_over or self.context.length(prefix.seq) >= prefix.length

    def release(self, seq: int) -> None:
        slot = self.table.all[seq]
        self.table.release(slot)
        if slot.forget:
            self._swapper.empty(slot)

    def chunk(self, seq: int, cached: int, count: int, checkpoint_at: Collection[int]) -> int:
        count = self.context.same_adapters(seq, cached, count)
        return self._checkpoints.chunk(cached, count, checkpoint_at)

    def reached(self, seq: int, length: int, checkpoint_at: Collection[int]) -> None:
        places = (
            checkpoint_at if self._exact is None else {self.reusable_length(place) for place in checkpoint_at}
        )
        self._checkpoints.reached(seq, length, places)

    def timed(self, tokens: int, seconds: float) -> None:
        self.tiers.rates.computed(tokens, seconds)

    def reusable_length(self, length: int) -> int:
        """How much of a prompt of `length` tokens can be used again: in exact mode, its whole steps."""
        return self._swapper.reusable_length(length)

    # For callers that store, move or clear kept state.

    def swap_in(self, tokens: Ids, namespace: str, adapters: AdapterSet | None = None) -> ReuseReport:
        """Bring the state of `tokens` into a sequence, as far as it is kept. The rest is computed when it
        is next asked for."""
        place = self._bring(tokens, Use(namespace), adapters)
        if not isinstance(place, SlotAssignment):
            why = "all sequences are busy: it comes with the next request"
            return ReuseReport(computed=len(tokens), why=why)
        self.release(place.seq)
        return replace(place.report, computed=len(tokens) - place.cached)

    def swap_out(self, tokens: Ids, namespace: str, adapters: AdapterSet | None = None) -> None:
        """Put the state of `tokens` into the tiers and let go of its sequence."""
        for slot in self.table.on_path(tokens, namespace, self._chosen(adapters)):
            if not slot.busy:
                self._swapper.store(slot)
                self._swapper.empty(slot)

    def pack(
        self, tokens: Ids, namespace: str, adapters: AdapterSet | None = None
    ) -> tuple[Identity, list[Block]]:
        """The blocks of a prefix, as far as it is kept, and the identity under which they hold."""
        from perdure.cache.transfer import pack_prefix

        self.store(tokens, namespace, adapters)
        blocks = pack_prefix(self.blocks, tokens, namespace, adapters)
        length = blocks[-1].end if blocks else 0
        return self.context.identity_of(self._chosen(adapters), length), blocks

    def unpack(
        self,
        identity: Identity,
        blocks: Sequence[Block],
        namespace: str,
        adapters: AdapterSet | None = None,
    ) -> int:
        """Take in blocks that were packed elsewhere; how many tokens they hold."""
        from perdure.cache.transfer import unpack_prefix

        return unpack_prefix(self.blocks, identity, blocks, namespace, adapters)

    def drop_stored(self, tokens: Ids, namespace: str, adapters: AdapterSet | None = None) -> None:
        """Drop from memory what a lower tier has of `tokens` and nothing else in memory goes on from."""
        for block in reversed(self.blocks.blocks_on_path(self.tier, tokens, namespace, adapters)):
            is_leaf = next(self.tier.children(block.id), None) is None
            if is_leaf and any(tier.lookup(block.id) is not None for tier in self.tiers.lower):
                self.tier.drop(block.id)

    def store(self, tokens: Ids, namespace: str, adapters: AdapterSet | None = None) -> tuple[int, BlockId]:
        """Put the state of `tokens`, if a sequence holds it, into the tiers. How many are kept, and where
        their chain starts."""
        for slot in self.table.on_path(tokens, namespace, self._chosen(adapters)):
            self._swapper.store(slot)
        hit = self.blocks.lookup(tokens, namespace, adapters)
        self.tiers.store_lower([block for block in hit.blocks if isinstance(block, Block)])
        return hit.length, self.blocks.root(namespace, adapters)

    def store_conversation(self, namespace: str, conversation: str) -> None:
        """Put what idle slots hold of a conversation into the tiers: what was read ahead for it too."""
        for slot in self.table.all:
            if not slot.busy and not slot.use.side and slot.use.key == (namespace, conversation):
                self._swapper.store(slot)

    def held(self, tokens: Ids, namespace: str, adapters: AdapterSet | None = None) -> list[Block]:
        """The blocks in memory that hold a beginning of `tokens`."""
        blocks = self.blocks.lookup(tokens, namespace, adapters).blocks
        return [block for block in blocks if isinstance(block, Block)]

    @functools.cached_property
    def kept(self) -> KeptPrefixes:
        """Loaded for the first prefix that is to be kept."""
        from perdure.cache.kept_prefixes import KeptPrefixes

        return KeptPrefixes(pins=self.pins, changed=self._kept_changed)

    def _kept_changed(self, prefix: KeptPrefix, listed: bool) -> None:
        """A warmed prefix is listed, or is not any more."""
        names = list(chain(BlockId(prefix.root), prefix.ids, self._block_size))
        (self.eviction.keep if listed else self.eviction.release)(names)
        self.tiers.revalue(names)

    def _chosen(self, adapters: AdapterSet | None) -> AdapterSet:
        return self.context.adapters if adapters is None else adapters

    def store_all(self) -> None:
        """Put what every idle sequence holds into the lower tiers: the one used last comes last, and where
        room is short, those before make way. Then what is in memory and was turned down before."""
        for slot in sorted(self.table.all, key=lambda slot: self.table.used[slot.seq]):
            if not slot.busy:
                self._swapper.store(slot)
                for tier in self.tiers.lower:
                    tier.flush()
        for tier in self.tiers.lower:
            tier.backfill(self.tier.blocks())

    def clear(self) -> None:
        """Drop everything."""
        self.blocks.clear()
        self.kept.clear()
        self.eviction.clear()
        self.reused, self.computed = {}, 0
        # What is left in it of states that passed goes too.
        self.context.limit_scratch(0)
        self.context.limit_scratch(self.budget // 8)
        for slot in self.table.all:
            self._forget(slot)

    def drop(self, dropped: Sequence[KeptPrefix], blocks: Iterable[BlockId]) -> None:
        """Drop `blocks`, and the sequences that go on from prefixes and lead to none that is still kept."""
        self.blocks.replace(blocks, ())
        for slot in self.table.all:
            adapters = self.context.adapters_of(slot.seq)
            root = self.blocks.root(slot.namespace, adapters, self.context.length(slot.seq))
            leads = [
                len(prefix.tokens)
                for prefix in dropped
                if prefix.root == root
                and self.context.common_prefix(prefix.ids, slot.seq) == len(prefix.tokens)
            ]
            tokens = self.context.token_array(slot.seq)
            if leads and self.kept.longest_beginning(root, tokens) < max(leads):
                self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        if slot.busy:
            slot.forget = True
        else:
            self._swapper.empty(slot)
