"""Slot planner: the best way to serve a prompt, from what the slots and the tiers hold now."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import Found
from perdure.cache.block_cache import BlockCache
from perdure.cache.slots.slot import Slot, SlotTable
from perdure.cache.slots.slot_checkpoints import SlotCheckpoints
from perdure.cache.slots.slot_choice import PUT_BACK, Choice, Counts, SlotView, choose, why_not_exact
from perdure.cache.slots.slot_index import SlotIndex
from perdure.decode.slots import Later
from perdure.engine.context import Context

Ids = NDArray[np.int32]

_ON_DEVICE = 1 / 32
"""What a copy costs where there are swap slots, in the time that it takes to put state back from memory."""


class SlotPlanner:
    """Weighs the ways to serve a prompt. It moves no state.

    Always holds: a slot that was chosen to start from holds what the choice says, also where somebody else
    used the context meanwhile.
    """

    def __init__(
        self,
        context: Context,
        table: SlotTable,
        index: SlotIndex,
        blocks: BlockCache,
        checkpoints: SlotCheckpoints,
        *,
        exact: int | None,
        reach: Callable[[Slot, Ids], int],
    ) -> None:
        """`reach` tells which prefix of a prompt a slot can be brought to, by what it holds in truth."""
        self.inexact = None if exact is None else why_not_exact(context)
        """Why exact mode can reuse nothing here, if so."""
        self._context = context
        self._table = table
        self._index = index
        self._blocks = blocks
        self._checkpoints = checkpoints
        self._exact = exact
        self._reach = reach
        self._indexed = b""

    def choose(
        self, idle: NDArray[np.bool_], tokens: Ids, wanted: Ids, namespace: str, found: Found
    ) -> tuple[Choice, Counts, Counts]:
        """The best way to serve a prompt in one of the slots `idle`, how much of it each slot has or will
        have, and what each holds. Of `wanted`, `found` is in the tiers."""
        held = self._look(idle)
        choice, shared = self._weigh(idle, held, tokens, wanted, namespace, found)
        source = choice.best.source
        if isinstance(source, int) and self._reach(self._table.all[source], wanted) < choice.best.length:
            # Somebody used the context behind our back, and left as many tokens as there were.
            held = self._look(idle, all_of_them=True)
            choice, shared = self._weigh(idle, held, tokens, wanted, namespace, found)
        return choice, shared, held

    def soon(self, shared: Counts, held: Counts) -> Later:
        """The longest prefix of a prompt that a running request is about to have computed."""
        table = self._table
        shared = self._checkpoints.coming(self._usable(shared), self._index.lengths)
        coming = np.where(~table.idle & (shared > held), shared, 0)
        seq = int(coming.argmax())
        return Later(seq, int(coming[seq]), int(table.used[seq]))

    def _weigh(
        self,
        idle: NDArray[np.bool_],
        held: Counts,
        tokens: Ids,
        wanted: Ids,
        namespace: str,
        found: Found,
    ) -> tuple[Choice, Counts]:
        tiers, table = self._blocks.tiers, self._table
        shared = self._index.shared(namespace, wanted)
        reach = self._checkpoints.reach_all(np.minimum(self._usable(shared), held), held)
        memory, pool = self._context.memory, self._context.capabilities.shared
        copies = not pool or memory.forks_in_pool
        # A copy between streams moves all their cells, whatever they hold; in a pool it moves none.
        copy = 0.0 if pool else self._context.n_ctx * PUT_BACK
        if table.count < self._context.n_seq:
            copy *= _ON_DEVICE
        # Whether reading beats computing is for the measured rates to say.
        kept = [(found, tiers.rates.cost(tiers.lower_bytes(found)))] if found.length else []
        if kept and kept[0][1]:
            at_hand = tiers.held(found, self._blocks.rule)
            kept += [(at_hand, 0.0)] if at_hand.length else []
        view = SlotView(idle=idle, used=table.used, held=held, reach=reach)
        fits = self._blocks.fits
        return choose(len(tokens), view, kept, fits=fits, copy=copy if copies else None), shared

    def _usable(self, shared: Counts) -> Counts:
        """What of `shared` was or will be computed as it must be to be used."""
        if self._exact is None:
            return shared
        usable: Counts = np.minimum(shared, [slot.exact for slot in self._table.all])
        return usable - usable % self._exact

    def _look(self, idle: NDArray[np.bool_], *, all_of_them: bool = False) -> Counts:
        """What each slot holds. Where an idle one holds something else than is known of it, it is read."""
        held: Counts = np.array(self._context.lengths(), np.int64)
        identity = self._context.identity.digest
        at_rest = idle | ~self._table.serving
        changed = at_rest & (held != self._index.lengths)
        if all_of_them or identity != self._indexed:
            changed, self._indexed = at_rest, identity
        for seq in changed.nonzero()[0].tolist():
            if held[seq]:
                self._index.put(seq, self._table.all[seq].namespace, self._context.token_array(seq))
            else:
                self._index.remove(seq)
            self._checkpoints.along(seq)
        return held
