"""Swap slots: sequences in which conversations wait on the device while others are served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from perdure.cache.eviction import Eviction
from perdure.cache.slots.checkpoints import SlotCheckpoints
from perdure.cache.slots.placement import Slot, eviction_classes
from perdure.engine.context import Context
from perdure.errors import EngineError

log = logging.getLogger("perdure.cache")


class SwapSlots:
    """The sequences that serve no request. All but one of them can hold a waiting conversation: one that
    comes back needs an empty one to change places with.

    Always holds: what one of them has is stored before something else takes its place; one that could not be
    filled is empty.
    """

    def __init__(
        self,
        context: Context,
        slots: Sequence[Slot],
        checkpoints: SlotCheckpoints,
        *,
        eviction: Eviction,
        store: Callable[[Slot], None],
        changed: Callable[[int], None],
    ) -> None:
        """`store` puts what a slot holds into the tiers, and `changed` hears of each sequence that holds
        something else."""
        self._context = context
        self._checkpoints = checkpoints
        self._slots = list(slots)
        """The one that was filled longest ago comes first."""
        self._eviction = eviction
        self._store = store
        self._changed = changed
        self._warned = False
        """Whether failing copies were logged: once is enough."""

    def __contains__(self, slot: object) -> bool:
        return slot in self._slots

    def swap_out(self, slot: Slot, source: object) -> bool:
        """Copy what `slot` holds into a swap slot other than `source`; False where that cannot be, or nobody
        is expected to go on from it."""
        if eviction_classes([slot], self._eviction)[0].is_unwanted:
            return False
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
        except Exception as error:
            # Whatever it was, `slot` has what it had: it goes through memory.
            if not self._warned:
                log.warning("a conversation cannot wait on the device, and goes through memory: %s", error)
            self._warned = True
            self._empty(place)
            return False
        place.namespace, place.exact = slot.namespace, slot.exact
        place.use, place.tip = slot.use, slot.tip
        self._checkpoints.copy(slot.seq, place.seq)
        return True

    def _is_covered(self, place: Slot, slot: Slot) -> bool:
        """Whether `slot` has all that `place` has."""
        length = self._context.length(place.seq)
        if not length or place.namespace != slot.namespace:
            return not length
        if self._context.adapters_of(place.seq) != self._context.adapters_of(slot.seq):
            return False
        tokens = self._context.token_array(place.seq)
        return place.exact <= slot.exact and self._context.common_prefix(tokens, slot.seq) == length

    def swapped_in(self, source: Slot, length: int) -> None:
        """A slot has the first `length` tokens of `source`: if these are all, it waits here no longer."""
        if source in self and length == self._context.length(source.seq):
            self._empty(source)

    def _empty(self, place: Slot) -> None:
        """One that the engine fails to empty is empty by the context's books: that spoils nothing else."""
        self._changed(place.seq)
        self._checkpoints.forget(place.seq)
        with suppress(EngineError):
            self._context.clear(place.seq)
