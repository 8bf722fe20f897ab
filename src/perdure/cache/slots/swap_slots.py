"""Swap slots: sequences of the context where conversations wait that have no slot at the moment.

A copy from one sequence of a device to another takes milliseconds, where the way through memory takes a
hundred times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perdure.cache.slots.slot import Slot
from perdure.cache.slots.slot_checkpoints import SlotCheckpoints
from perdure.engine.context import Context
from perdure.errors import EngineError


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
