"""Placement: the slots, which one a prompt gets, and from where its beginning comes: the way that costs
least. And why no more of it could be reused.

Costs are in tokens computed. Nothing is moved here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import BlockId, PrefixHit
from perdure.cache.block_cache import BlockCache
from perdure.cache.eviction import Eviction, EvictionClass, Use, worth
from perdure.cache.prefix_search import common_prefix_length
from perdure.cache.slots.checkpoints import SlotCheckpoints
from perdure.decode.sequence import PendingPrefix
from perdure.engine.adapters import AdapterSet
from perdure.engine.context import Context

Ids = NDArray[np.int32]
Counts = NDArray[np.int64]

_NOTHING: Ids = np.empty(0, np.int32)
_HEAD = 512
"""Tokens, from the first on, that are compared with those of all slots in one call: at 32 slots that takes
19 µs, where one comparison each takes 135 (`python -m bench.growth`, admission of one of a burst)."""

# Moving a token's state is hundreds of times cheaper than computing it; these only have to rank the choices,
# so round figures do.
_PUT_BACK = 0.001
_TAKE_OUT = 0.002
_LOST = 0.5
"""A token whose state nobody keeps may be asked for again, or not."""
_ON_DEVICE = 1 / 32
"""What a copy costs where there are swap slots, in the time that it takes to put state back from memory."""
_PLACE = 16.0
"""Taking the place of a conversation that may go on, even where it can be moved out and back."""


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence of the context. What it holds outlives its request."""

    seq: int
    busy: bool = False
    namespace: str = ""
    use: Use = field(default_factory=Use)
    """The request that has it, or had it last."""
    tip: BlockId | None = None
    """The last whole block of the prompt that it was given for."""
    exact: int = 0
    """Tokens of it, from the first on, that were or will be computed in the steps of exact mode."""
    forget: bool = False
    """What it holds was cleared while it was busy: it goes when that is over."""
    tokens: Ids = field(default_factory=lambda: _NOTHING)
    """What it holds as far as is known, or is about to hold."""


def eviction_classes(slots: Sequence[Slot], eviction: Eviction) -> list[EvictionClass]:
    """The eviction class of each slot's sequence."""
    return [EvictionClass.SIDE if slot.use.side else eviction.class_of(slot.tip) for slot in slots]


class SlotTable:
    """All slots of a context. The last ones may be swap slots, which serve no request.

    Always holds: `idle` are those that serve requests and have none.
    """

    def __init__(self, context: Context, *, swap_slots: int) -> None:
        self._context = context
        self.count = context.n_seq - swap_slots
        """How many of them serve requests."""
        self.all = [Slot(seq) for seq in range(context.n_seq)]
        self.serving = np.arange(context.n_seq) < self.count
        self.idle = self.serving.copy()
        self.used = np.zeros(context.n_seq, np.int64)
        """The larger, the later."""
        self._clock = 0
        self.lengths: Counts = np.zeros(context.n_seq, np.int64)
        """How many tokens of each slot are known here."""
        self._heads = np.zeros((context.n_seq, min(_HEAD, context.n_ctx)), np.int32)
        """The first tokens of each slot, as many as are known and fit."""

    def acquire(self, slot: Slot, namespace: str) -> None:
        slot.busy, slot.namespace = True, namespace
        self.idle[slot.seq] = False
        self._clock += 1
        self.used[slot.seq] = self._clock

    def release(self, slot: Slot) -> None:
        slot.busy = False
        self.idle[slot.seq] = True
        self._clock += 1
        self.used[slot.seq] = self._clock

    def on_path(self, tokens: Ids, namespace: str, adapters: AdapterSet) -> list[Slot]:
        """The slots that hold nothing but a beginning of `tokens`, or go on from them, computed with
        `adapters`."""
        path = []
        for slot in self.all:
            if slot.namespace == namespace:
                shared = self._context.common_prefix(tokens, slot.seq)
                if shared > self._context.same_state_until(slot.seq, adapters):
                    continue
                if shared > 0 and shared in (len(tokens), self._context.length(slot.seq)):
                    path.append(slot)
        return path

    # What they hold. A slot that changed without notice is read again at the next choice.

    def put(self, seq: int, tokens: Ids) -> None:
        """Slot `seq` holds these, or is about to."""
        self.all[seq].tokens = tokens.copy()
        self.lengths[seq] = len(tokens)
        head = tokens[: self._heads.shape[1]]
        self._heads[seq, : len(head)] = head

    def remove(self, seq: int) -> None:
        self.all[seq].tokens = _NOTHING
        self.lengths[seq] = 0

    def shared(self, namespace: str, tokens: Ids, adapters: AdapterSet) -> Counts:
        """How many of `tokens` each slot starts with, computed with `adapters`."""
        head = tokens[: self._heads.shape[1]]
        if not len(head):
            return np.zeros_like(self.lengths)
        differ = self._heads[:, : len(head)] != head
        counts = np.where(differ.any(axis=1), differ.argmax(axis=1), len(head))
        counts = np.minimum(counts, self.lengths)
        counts[[slot.namespace != namespace for slot in self.all]] = 0
        if len(tokens) > len(head):
            for seq in (counts == len(head)).nonzero()[0].tolist():
                counts[seq] = common_prefix_length(self.all[seq].tokens, tokens)
        if self._context.mixed or adapters is not self._context.adapters:
            # Also of a busy one: it was given its set before it was given its tokens.
            for seq in counts.nonzero()[0].tolist():
                counts[seq] = min(counts[seq], self._context.same_state_until(seq, adapters))
        return counts


@dataclass(frozen=True, slots=True)
class Placement:
    """A way to serve a prompt: in which slot, and where its first `length` tokens come from."""

    seq: int
    length: int
    cost: float
    source: int | PrefixHit | None
    """A slot, blocks, or nothing at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChoice:
    """The best placement, and how much of the prompt the placements that there are would bring."""

    best: Placement
    from_idle: int
    """From what is not being computed at the moment."""
    from_anywhere: int
    shared: Counts
    """How much of the prompt each slot has or will have."""
    lengths: Counts
    """How many tokens each slot holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """What the slots hold now, an element each."""

    idle: NDArray[np.bool_]
    used: Counts
    lengths: Counts
    restorable: Counts
    """How many tokens of the prompt each can be brought to."""
    unwanted: NDArray[np.bool_] | None = None
    """Which hold what nobody is expected to go on from. None: none of them."""


def choose(
    length: int,
    slots: SlotView,
    hits: Sequence[tuple[PrefixHit, float]],
    *,
    fits: Callable[[Any], NDArray[np.bool_] | np.bool_ | bool],
    copy: float | None,
) -> tuple[Placement, int, int]:
    """The best way to serve a prompt of `length` tokens: a pure function of what the slots hold. And how
    much of it what is not being computed would bring, and how much anything would.

    `hits` are prefixes in the tiers with what reading them costs, `fits` says whether the state of so many
    tokens can be moved out, and `copy` is what a copy of a slot costs; None where there can be none.
    """
    seqs = slots.idle.nonzero()[0]
    lengths, here, used = slots.lengths[seqs], slots.restorable[seqs], slots.used[seqs]
    largest, longest = int(lengths.max()), int(here.max())
    # Mostly all of them do, and the largest says so.
    all_fit = bool(fits(largest))
    room = all_fit or fits(lengths)
    moving = lengths * (_TAKE_OUT + _PUT_BACK) + _PLACE if largest else None
    unwanted = None if slots.unwanted is None else slots.unwanted[seqs]

    def displaced(used_again: Counts | int) -> NDArray[np.float64]:
        """What it costs to move out, or to lose, what the idle slots hold beyond what is `used_again`."""
        if moving is None:
            return np.zeros(len(seqs))
        cost = moving if all_fit else np.where(room, moving, (lengths - used_again) * _LOST + _PLACE)
        if unwanted is not None:
            # Nobody will put it back, and it may be lost.
            cost = np.where(unwanted, lengths * _TAKE_OUT, cost)
        return np.where(lengths > used_again, cost, 0.0)

    moved = displaced(0)
    target = _cheapest(moved, used) if largest else int(used.argmin())
    options = []
    if longest:
        in_place = length - here + displaced(here)
        first = _cheapest(in_place, used)
        stays = int(seqs[first]) if here[first] else None
        options.append(Placement(int(seqs[first]), int(here[first]), float(in_place[first]), stays))
    else:
        options.append(Placement(int(seqs[target]), 0, float(length + moved[target]), None))
    source = int(slots.restorable.argmax())
    there = int(slots.restorable[source]) if copy is not None else 0
    for hit, read in hits:
        cost = length - hit.length + hit.length * _PUT_BACK + read + moved[target]
        options.append(Placement(int(seqs[target]), hit.length, float(cost), hit))
    if there and seqs[target] == source:
        # What is copied from cannot be what is copied to: the next cheapest.
        moved[target] = np.inf
        target = _cheapest(moved, used)
    if copy is not None and there and seqs[target] != source:
        cost = length - there + copy + moved[target]
        options.append(Placement(int(seqs[target]), there, float(cost), source))
    best = min(options, key=lambda option: (option.cost, slots.used[option.seq], option.seq))
    from_idle = max([longest, *(hit.length for hit, _ in hits)])
    return best, from_idle, max(from_idle, there)


def _cheapest(cost: NDArray[np.float64], used: Counts) -> int:
    """Which costs least; of several, the one that was used longest ago."""
    best = (cost == cost.min()).nonzero()[0]
    return int(best[used[best].argmin()])


class SlotPlanner:
    """Weighs the ways to serve a prompt. It moves no state.

    Always holds: a slot that was chosen to start from holds what the choice says, also where another caller
    used the context meanwhile.
    """

    def __init__(
        self,
        context: Context,
        table: SlotTable,
        blocks: BlockCache,
        checkpoints: SlotCheckpoints,
        *,
        exact: int | None,
        restorable_length: Callable[[Slot, Ids, AdapterSet], int],
    ) -> None:
        """`restorable_length` says which prefix of a prompt a slot can be brought to, by what it holds in
        truth."""
        self.inexact = None if exact is None else why_not_exact(context)
        """Why exact mode can reuse nothing here, if so."""
        self._context = context
        self._table = table
        self._blocks = blocks
        self._checkpoints = checkpoints
        self._exact = exact
        self._restorable_length = restorable_length
        self._identity = b""

    def choose(
        self,
        idle: NDArray[np.bool_],
        tokens: Ids,
        reusable: Ids,
        namespace: str,
        adapters: AdapterSet,
        hit: PrefixHit,
    ) -> PlacementChoice:
        """The best way to serve a prompt in one of the slots `idle`. Of its tokens that may be `reusable`,
        `hit` is in the tiers."""

        def weigh(lengths: Counts) -> PlacementChoice:
            shared = self._table.shared(namespace, reusable, adapters)
            return self._weigh(idle, lengths, tokens, shared, hit)

        choice = weigh(self._lengths(idle))
        best = choice.best
        if isinstance(best.source, int):
            source = self._table.all[best.source]
            if self._restorable_length(source, reusable, adapters) < best.length:
                # Another caller used the context meanwhile, and left as many tokens as there were.
                choice = weigh(self._lengths(idle, all_of_them=True))
        return choice

    def pending_prefix(self, choice: PlacementChoice) -> PendingPrefix:
        """The longest prefix of a prompt that a running request is about to have computed."""
        table = self._table
        usable = self._usable(choice.shared)
        shared = self._checkpoints.restorable_when_computed(usable, table.lengths)
        pending = np.where(~table.idle & (shared > choice.lengths), shared, 0)
        seq = int(pending.argmax())
        return PendingPrefix(seq, int(pending[seq]), int(table.used[seq]))

    def _weigh(
        self,
        idle: NDArray[np.bool_],
        lengths: Counts,
        tokens: Ids,
        shared: Counts,
        hit: PrefixHit,
    ) -> PlacementChoice:
        table = self._table
        restorable = self._checkpoints.restorable_lengths(np.minimum(self._usable(shared), lengths), lengths)
        memory, pool = self._context.memory, self._context.capabilities.shared
        copies = not pool or memory.forks_in_pool
        # A copy between streams moves all their cells, whatever they hold; in a pool it moves none.
        copy = 0.0 if pool else self._context.n_ctx * _PUT_BACK
        if table.count < self._context.n_seq:
            copy *= _ON_DEVICE
        # Whether reading beats computing is for the measured rates to say.
        ways = self._blocks.tiers.ways(hit, self._blocks.rule)
        ranks = eviction_classes(table.all, self._blocks.eviction)
        used, unwanted = table.used, None
        if min(ranks) < EvictionClass.CONVERSATION:
            used = np.array([worth(*each, 0) for each in zip(ranks, used.tolist(), strict=True)])
            unwanted = np.array(ranks) < EvictionClass.CONVERSATION
        view = SlotView(idle=idle, used=used, lengths=lengths, restorable=restorable, unwanted=unwanted)
        best, from_idle, from_anywhere = choose(
            len(tokens), view, ways, fits=self._blocks.fits, copy=copy if copies else None
        )
        return PlacementChoice(
            best=best, from_idle=from_idle, from_anywhere=from_anywhere, shared=shared, lengths=lengths
        )

    def _usable(self, shared: Counts) -> Counts:
        """What of `shared` was or will be computed as it must be to be used."""
        if self._exact is None:
            return shared
        usable: Counts = np.minimum(shared, [slot.exact for slot in self._table.all])
        return usable - usable % self._exact

    def _lengths(self, idle: NDArray[np.bool_], *, all_of_them: bool = False) -> Counts:
        """The length of each slot. The tokens of an idle slot that has changed are read again."""
        lengths: Counts = np.array(self._context.lengths(), np.int64)
        identity = self._context.identity.digest
        at_rest = idle | ~self._table.serving
        changed = at_rest & (lengths != self._table.lengths)
        if all_of_them or identity != self._identity:
            changed, self._identity = at_rest, identity
        for seq in changed.nonzero()[0].tolist():
            self._table.put(seq, self._context.token_array(seq))
            self._checkpoints.on_path(seq)
        return lengths


def why_not_more(
    blocks: BlockCache,
    tokens: Ids,
    namespace: str,
    adapters: AdapterSet,
    *,
    reused: int,
    restorable: int,
    shared: int,
    exact: int | None,
    budget: int,
) -> str:
    """Why just `reused` of `tokens` were, where `restorable` could have been moved from elsewhere and
    `shared` are held in some form. `exact` is the step of exact mode, `budget` that of the whole cache."""
    if reused >= len(tokens):
        return "all but the last token, which is always computed"
    if restorable > reused:
        return f"moving {restorable} tokens from elsewhere costs more than computing them"
    if shared > reused and exact is not None:
        return (
            f"exact mode resumes after whole steps of {exact} prompt tokens: tokens behind "
            f"token {reused}, such as a reply, are computed again"
        )
    if shared > reused:
        went = f"it went back to {reused}" if reused else "nothing before it is left to go back to"
        return f"a {blocks.memory} memory has no checkpoint at token {shared}: {went}"
    if blocks.was_evicted(tokens, namespace, shared, adapters):
        return f"what followed token {shared} was evicted: the budget is {budget} bytes"
    if reused:
        return f"the prompt is new from token {reused} on"
    if field_name := blocks.changed(tokens, namespace, adapters):
        return f"the identity changed in its {field_name}"
    return "no cached prefix matches"


def why_not_exact(context: Context) -> str | None:
    """Why state that is put back would not be the same bits as state that was computed in place, if so."""
    if context.capabilities.shared:
        return "exact mode reuses nothing in a pool of cells: what follows depends on where they lie"
    if context.identity.attention == "plain":
        return "exact mode reuses nothing without flash attention: what follows depends on where cells lie"
    if not context.memory.restores_bits:
        return "exact mode reuses nothing of a window that is not kept: it comes back in another order"
    return None
