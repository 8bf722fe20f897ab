"""Slot swapper: brings state into slots, and puts what they hold into the tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import PrefixHit
from perdure.cache.block_cache import BlockCache
from perdure.cache.slots.checkpoints import SlotCheckpoints
from perdure.cache.slots.placement import Placement, Slot
from perdure.cache.tiers.tiered import Tiers
from perdure.engine.context import Context
from perdure.errors import EngineError

Ids = NDArray[np.int32]

_ROW = 8
"""What it takes to cut and write the row of a token, in tokens that are only read."""


class SwapSlots:
    """The sequences that serve no request. Of so many, all but one can be waited in: who comes back needs an
    empty one to change places with.

    Always holds: what one of them has is stored before something else takes its place; one that could not be
    filled is empty.
    """

    def __init__(
        self,
        context: Context,
        slots: Sequence[Slot],
        checkpoints: SlotCheckpoints,
        *,
        store: Callable[[Slot], None],
        changed: Callable[[int], None],
    ) -> None:
        """`store` puts what a slot holds into the tiers, and `changed` hears of each sequence that holds
        something else."""
        self._context = context
        self._checkpoints = checkpoints
        self._slots = list(slots)
        """The one that was filled longest ago comes first."""
        self._store = store
        self._changed = changed

    def __contains__(self, slot: object) -> bool:
        return slot in self._slots

    def swap_out(self, slot: Slot, source: object) -> bool:
        """Copy what `slot` holds into a swap slot other than `source`; False where that cannot be."""
        places = [each for each in self._slots if each is not source]
        if not places:
            return False
        # What `slot` has too needs no other place, an empty one has nothing; else the oldest makes room.
        place = next((each for each in places if self._is_covered(each, slot)), None)
        if place is None:
            self._store(place := places[0])
        self._slots.remove(place)
        self._slots.append(place)
        self._changed(place.seq)
        try:
            self._context.fork(slot.seq, place.seq)
        except EngineError:
            self._checkpoints.forget(place.seq)
            self._context.clear(place.seq)
            return False
        place.namespace, place.exact = slot.namespace, slot.exact
        self._checkpoints.copy(slot.seq, place.seq)
        return True

    def _is_covered(self, place: Slot, slot: Slot) -> bool:
        """Whether `slot` has all that `place` has."""
        length = self._context.length(place.seq)
        if not length or place.namespace != slot.namespace:
            return not length
        held = self._context.token_array(place.seq)
        return place.exact <= slot.exact and self._context.common_prefix(held, slot.seq) == length

    def swapped_in(self, source: Slot, length: int) -> None:
        """A slot has the first `length` tokens of `source`: if these are all, it waits here no longer."""
        if source in self and length == self._context.length(source.seq):
            self._checkpoints.forget(source.seq)
            self._context.clear(source.seq)
            self._changed(source.seq)


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
        self._swap_slots = SwapSlots(context, swap_slots, checkpoints, store=self.store, changed=changed)
        self._context = context
        self._slots = slots
        self._blocks = blocks
        self._tiers = tiers
        self._checkpoints = checkpoints
        self._exact = exact

    def reusable_length(self, length: int) -> int:
        """How much of a prompt of `length` tokens can be used again: in exact mode, its whole steps."""
        return length if self._exact is None else length // self._exact * self._exact

    def restorable_length(self, slot: Slot, tokens: Ids) -> int:
        """The longest prefix of `tokens` that `slot` can be brought to, by what it holds in truth."""
        shared = self._context.common_prefix(tokens, slot.seq)
        if self._exact is not None:
            shared = self.reusable_length(min(shared, slot.exact))
        self._checkpoints.on_path(slot.seq)
        return self._checkpoints.restorable_length(slot.seq, shared, self._context.length(slot.seq))

    def fill(self, placement: Placement, tokens: Ids, namespace: str) -> tuple[Mapping[str, int], str]:
        """Bring a prefix into its slot: how many tokens of it came from which tier, and what went wrong."""
        slot = self._slots[placement.seq]
        source = self._slots[placement.source] if isinstance(placement.source, int) else placement.source
        trouble = ""
        try:
            if isinstance(source, Slot) and self.restorable_length(source, tokens) < placement.length:
                raise EngineError(f"sequence {source.seq} holds something else than was known of it")
            if source is slot:
                if placement.length < self._context.length(slot.seq):
                    self.store(slot)
                self._checkpoints.go_back(slot.seq, placement.length)
                return {"slot": placement.length}, ""
            self._swap_out(slot, source)
            slot.namespace = namespace
            if source is None:
                return {}, ""
            if isinstance(source, Slot):
                self._copy(source, slot, tokens[: placement.length])
                slot.exact = source.exact
                self._swap_slots.swapped_in(source, placement.length)
                return {"slot": placement.length}, ""
            tiers, trouble = self._swap_in(slot, source, tokens)
            if tiers:
                return tiers, trouble
        except Exception as error:
            # What could not be moved, for whatever reason, is computed; the ledger says what is there.
            trouble = f"what was held could not be brought in place: {error}"
        self._checkpoints.forget(slot.seq)
        self._context.clear(slot.seq)
        return {}, trouble

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

    def _rows_are_cheaper(self, held: int, length: int) -> bool:
        """Whether the rows of `length` tokens, read out of `held` and written, take less time than a fork. A
        fork between streams copies every cell there is room for, at the speed of memory."""
        context = self._context
        if not context.memory.has_rows or context.memory.needs_checkpoint:
            return False
        # Forks of a pool copy nothing, and those on a device do not pass the bus.
        if context.capabilities.shared or context.capabilities.asynchronous:
            return False
        return held + _ROW * length < context.n_ctx // 2

    def store(self, slot: Slot) -> None:
        """Copy what `slot` holds into the tiers. What cannot be copied is computed again one day."""
        with suppress(EngineError):
            length = self._context.length(slot.seq)
            if self._exact is not None:
                length = self.reusable_length(min(length, slot.exact))
            states = {point.length: point.state for point in self._checkpoints.on_path(slot.seq)}
            self._blocks.store(slot.seq, slot.namespace, states, length)

    def empty(self, slot: Slot) -> None:
        """Let go of what `slot` holds."""
        slot.forget = False
        self._checkpoints.forget(slot.seq)
        with suppress(EngineError):
            self._context.clear(slot.seq)

    def _swap_out(self, slot: Slot, source: Slot | PrefixHit | None) -> None:
        """Empty `slot`, keeping what it holds in a swap slot or the tiers, and there what is about to come in
        its place."""
        if not self._context.length(slot.seq):
            self._checkpoints.forget(slot.seq)
            return
        memory, incoming = self._tiers.memory, source.blocks if isinstance(source, PrefixHit) else ()
        here = [block for block in incoming if block.id in memory]
        memory.pin(here)
        try:
            if not self._swap_slots.swap_out(slot, source):
                self.store(slot)
        finally:
            memory.unpin(here)
        self._checkpoints.forget(slot.seq)
        self._context.clear(slot.seq)

    def _swap_in(self, slot: Slot, hit: PrefixHit, tokens: Ids) -> tuple[Mapping[str, int], str]:
        prefix = self._blocks.load(hit)
        trouble = ""
        if prefix.length < hit.length:
            trouble = f"what was kept from token {prefix.length} on was damaged or is gone"
        if not prefix.length:
            return {}, trouble
        self._context.assemble(tokens[: prefix.length], prefix.pieces, prefix.tail_state, slot.seq)
        self._checkpoints.swapped_in(slot.seq, prefix)
        return prefix.tiers, trouble
