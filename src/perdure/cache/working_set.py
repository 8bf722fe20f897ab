"""Sequences as a working set: who gets which, from what, at the least cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import BLOCK, Block, BlockId, block_id, root_id
from perdure.cache.prefix import Found, LowerTier, Match, Tiers, common
from perdure.cache.tier import MemoryTier
from perdure.decode.placement import LATER, Later, Place, ReuseReport
from perdure.engine.context import Context
from perdure.engine.contract import MemoryKind
from perdure.engine.state import Checkpoint
from perdure.errors import EngineError
from perdure.identity import Identity

Ids = NDArray[np.int32]

# What moving a token's state costs, in tokens computed. Moving is hundreds of times cheaper; these only
# have to rank the choices, so round figures do.
_PUT_BACK = 0.001
_TAKE_OUT = 0.002
_LOST = 0.5
"""A token whose state nobody keeps may be asked for again, or not."""
_WORTH_WAITING = 32
"""Tokens that another request must be about to compute before it pays to wait for it."""


@dataclass(slots=True, eq=False)
class _Slot:
    """A sequence of the context. What it holds outlives its request."""

    seq: int
    busy: bool = False
    used: int = 0
    namespace: str = ""
    script: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    checkpoints: list[Checkpoint] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Option:
    """A way to serve a prompt: which sequence, and where its first `length` tokens come from."""

    slot: _Slot
    length: int
    cost: float
    source: _Slot | Found | None


class WorkingSet:
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
    ) -> None:
        self.tier = MemoryTier(budget)
        self.tiers = Tiers(self.tier, lower)
        self._context = context
        self._size = block_size
        self._spacing = spacing
        self._slots = [_Slot(seq) for seq in range(context.n_seq)]
        self._clock = 0
        self._cuts = context.memory.kind is MemoryKind.FULL
        self._whole = not self._cuts
        self.reused: dict[str, int] = {}
        self.computed = 0
        self._identities: dict[bytes, Identity] = {}

    # For the scheduler.

    def acquire(self, tokens: Ids, *, namespace: str = "", reuse: bool = True) -> Place | Later | None:
        idle = [slot for slot in self._slots if not slot.busy]
        if not idle:
            return None
        limit = len(tokens) if reuse else 0
        found = self._find(tokens, namespace, limit) if limit else Found()
        options = self._options(idle, tokens, namespace, limit, found)
        best = min(options, key=lambda option: (option.cost, option.slot.used, option.slot.seq))
        if limit and self._soon(tokens, namespace) - best.length >= _WORTH_WAITING:
            return LATER
        slot = best.slot
        tiers = self._move_in(best, tokens)
        reused = sum(tiers.values())
        self._clock += 1
        slot.busy, slot.used, slot.script, slot.namespace = True, self._clock, tokens, namespace
        if reused:
            self.reached(slot.seq, reused, len(tokens) + 1)
        why = self._why_not_more(tokens, namespace, reused) if reuse else "reuse was not wanted"
        if tokens.size:
            for tier, count in tiers.items():
                self.reused[tier] = self.reused.get(tier, 0) + count
            self.computed += len(tokens) + 1 - reused
        report = ReuseReport(tiers=tiers, computed=len(tokens) + 1 - reused, why=why)
        return Place(slot.seq, reused, report)

    def release(self, seq: int) -> None:
        self._clock += 1
        slot = self._slots[seq]
        slot.busy, slot.used = False, self._clock

    def chunk(self, seq: int, cached: int, count: int, prompt: int) -> int:
        """Where a memory cannot be cut, steps end at the places that are worth coming back to."""
        if self._cuts:
            return count
        stops = [(cached // self._spacing + 1) * self._spacing, prompt - 1, prompt]
        return min([count, *(stop - cached for stop in stops if stop > cached)])

    def reached(self, seq: int, length: int, prompt: int) -> None:
        """A step ended at `length`: keep a checkpoint if it is such a place."""
        if self._cuts or (length % self._spacing and length != prompt - 1):
            return
        slot = self._slots[seq]
        if length and all(known.length != length for known in slot.checkpoints):
            slot.checkpoints.append(self._context.checkpoint(seq))
            self._thin_out()

    # For whoever asks about, or clears, what is kept.

    def store(self, tokens: Ids, namespace: str) -> tuple[int, BlockId]:
        """Put the state of `tokens`, if a sequence holds it, into the tiers. How many are kept, and where."""
        for slot in self._slots:
            if slot.namespace == namespace and self._context.common_prefix(tokens, slot.seq) == len(tokens):
                self._stash(slot)
        found = self._find(tokens, namespace, len(tokens))
        return found.length, found.entries[-1].id if found.entries else BlockId(b"")

    def store_all(self) -> None:
        """Put what every idle sequence holds into the tiers."""
        for slot in self._slots:
            if not slot.busy:
                self._stash(slot)

    def forget(self, tokens: Ids | None = None, namespace: str = "", *, spare: Iterable[Ids] = ()) -> None:
        """Drop everything, or what starts with `tokens` and does not lead to one of `spare`."""
        if tokens is None:
            self.tiers.clear()
            self.reused, self.computed = {}, 0
        else:
            kept = {block for other in spare for block in self._path(other, namespace)}
            for block in reversed(self._path(tokens, namespace)):
                if block in kept:
                    break
                self.tiers.drop(block)
        for slot in self._slots:
            if slot.busy or (tokens is not None and not self._leads(slot, tokens, namespace)):
                continue
            self._context.clear(slot.seq)
            slot.checkpoints.clear()

    def _leads(self, slot: _Slot, tokens: Ids, namespace: str) -> bool:
        return slot.namespace == namespace and self._context.common_prefix(tokens, slot.seq) == len(tokens)

    def _thin_out(self) -> None:
        """Keep the checkpoints of all sequences within their share of the budget: every second one goes."""
        while sum(point.nbytes for slot in self._slots for point in slot.checkpoints) > self.tier.budget // 4:
            slot = max(self._slots, key=lambda slot: sum(point.nbytes for point in slot.checkpoints))
            if len(slot.checkpoints) < 2:
                slot.checkpoints.clear()
            # The newest stays: it is where the next regeneration starts.
            slot.checkpoints = slot.checkpoints[::-1][::2][::-1]

    # Choosing.

    def _options(
        self, idle: list[_Slot], tokens: Ids, namespace: str, limit: int, found: Found
    ) -> Iterator[_Option]:
        reach = {
            slot.seq: self._reach(slot, tokens, limit) if slot.namespace == namespace and limit else 0
            for slot in self._slots
        }
        for slot in idle:
            here = reach[slot.seq]
            cost = len(tokens) - here + self._displaced(slot, here)
            yield _Option(slot, here, cost, slot if here else None)
            moved = self._displaced(slot, 0)
            if found.length:
                cost = len(tokens) - found.length + found.length * _PUT_BACK
                yield _Option(slot, found.length, cost + moved, found)
            for other in self._slots:
                there = reach[other.seq]
                if other is not slot and there:
                    # A copy between streams moves all their cells, whatever they hold.
                    cost = len(tokens) - there + self._context.n_ctx * _PUT_BACK
                    yield _Option(slot, there, cost + moved, other)

    def _reach(self, slot: _Slot, tokens: Ids, limit: int) -> int:
        """The longest prefix of `tokens` that `slot` can be brought to."""
        held = self._context.length(slot.seq)
        shared = min(self._context.common_prefix(tokens, slot.seq), limit)
        if shared in (0, held) or self._cuts:
            return shared
        if self._context.shortest_cut(slot.seq) <= shared:
            return shared
        return max((point.length for point in slot.checkpoints if point.length <= shared), default=0)

    def _displaced(self, slot: _Slot, kept: int) -> float:
        """The cost of what `slot` holds beyond `kept`: moving it out, or losing it."""
        held = self._context.length(slot.seq)
        if held <= kept:
            return 0.0
        fits = self.tier.budget > 0
        return held * (_TAKE_OUT + _PUT_BACK) if fits else (held - kept) * _LOST

    def _soon(self, tokens: Ids, namespace: str) -> int:
        """The longest prefix of `tokens` that a running request is about to have computed."""
        best = 0
        for slot in self._slots:
            if not slot.busy or slot.namespace != namespace:
                continue
            shared = common(slot.script, tokens)
            if not self._cuts and shared < len(slot.script):
                shared -= shared % self._spacing
            if shared > self._context.length(slot.seq):
                best = max(best, shared)
        return best

    # Moving.

    def _move_in(self, option: _Option, tokens: Ids) -> dict[str, int]:
        """Bring a prefix into its slot; how many tokens of it came from which tier."""
        slot, source = option.slot, option.source
        context = self._context
        try:
            if source is slot:
                if option.length < context.length(slot.seq):
                    self._stash(slot)
                self._bring(slot, option.length)
                return {"slot": option.length}
            held = (
                [each for each in source.entries if each.id in self.tier] if isinstance(source, Found) else []
            )
            self.tier.pin(held)
            self._stash(slot)
            self.tier.unpin(held)
            slot.checkpoints = []
            if isinstance(source, Found):
                match = self.tiers.load(source, whole=self._whole)
                if match.length:
                    context.assemble(tokens[: match.length], match.pieces, match.rest, slot.seq)
                    slot.checkpoints = self._checkpoints(match)
                    return _by_tier(match, self.tiers)
            elif source is not None:
                context.fork(source.seq, slot.seq)
                slot.checkpoints = list(source.checkpoints)
                self._bring(slot, option.length)
                return {"slot": option.length}
        except EngineError:
            # What could not be moved is computed; the ledger says what is there.
            pass
        context.clear(slot.seq)
        slot.checkpoints = []
        return {}

    def _bring(self, slot: _Slot, length: int) -> None:
        """Cut `slot` to `length`, which `_reach` found that it can be cut to."""
        context = self._context
        if length < context.length(slot.seq):
            if self._cuts or length == 0 or context.shortest_cut(slot.seq) <= length:
                context.truncate(length, slot.seq)
            else:
                point = next(point for point in slot.checkpoints if point.length == length)
                context.restore(point, slot.seq)
        slot.checkpoints = [point for point in slot.checkpoints if point.length <= length]

    def _checkpoints(self, match: Match) -> list[Checkpoint]:
        """The points on the way that a sequence put back from blocks can go back to."""
        if self._cuts or not match.pieces:
            return []
        digest = self._context.identity.digest
        points = []
        for index, block in enumerate(match.blocks):
            if block.rest is not None:
                tokens = np.concatenate([each.tokens for each in match.blocks[: index + 1]])
                points.append(Checkpoint(digest, tokens, block.rest))
        return points

    def _stash(self, slot: _Slot) -> None:
        """Copy what `slot` holds into the memory tier, as far as it is not there and there is room."""
        context = self._context
        if not self.tier.budget or not context.length(slot.seq):
            return
        tokens = np.array(context.tokens(slot.seq), np.int32)
        points = {point.length: point.state for point in slot.checkpoints if point.state is not None}
        ranges = list(self._ranges(len(tokens), points))
        if self._has_all(slot.namespace, tokens, ranges, points):
            return
        capture = context.capture(slot.seq)
        self._whole = capture.rest is not None
        if capture.rows is None and not self._is_partial():
            points = {}
        if capture.rest is not None:
            points[len(tokens)] = capture.rest
        parent = self._root(slot.namespace)
        new: list[Block] = []
        for start, end in ranges:
            ids = tokens[start:end]
            whole = end - start == self._size
            name = block_id(parent, ids)
            known = self.tier.get(name)
            rest = points.get(end)
            if known is None or (rest is not None and known.rest is None):
                rows = None if capture.rows is None else capture.rows.cut(start, end)
                block = Block.make(parent, start, ids, rows, rest)
                new.append(block)
                if not self.tier.put(block) and whole and self.tiers.lower is None:
                    break
            if whole:
                parent = name
        if self.tiers.lower is not None:
            self.tiers.lower.offer(new)

    def _is_partial(self) -> bool:
        return self._context.memory.kind is MemoryKind.RECURRENT

    def _ranges(self, length: int, points: Iterable[int]) -> Iterator[tuple[int, int]]:
        """The blocks of a sequence: at each place the tails that end there, then the whole block."""
        ends = sorted({*points, length})
        for start in range(0, length, self._size):
            for end in ends:
                if start < end < start + self._size:
                    yield start, end
            if start + self._size <= length:
                yield start, start + self._size

    def _has_all(
        self, namespace: str, tokens: Ids, ranges: list[tuple[int, int]], points: dict[int, NDArray[np.uint8]]
    ) -> bool:
        parent = self._root(namespace)
        for start, end in ranges:
            name = block_id(parent, tokens[start:end])
            known = self.tier.get(name)
            needs = end in points or (end == len(tokens) and self._whole)
            if known is None or (needs and known.rest is None):
                return False
            if end - start == self._size:
                parent = name
        return True

    # Finding.

    def _root(self, namespace: str) -> BlockId:
        identity = self._context.identity
        self._identities.setdefault(identity.digest, identity)
        return self._root_of(identity, namespace)

    def _root_of(self, identity: Identity, namespace: str) -> BlockId:
        kind = self._context.memory.kind.value
        if not self._whole:
            # Rows by token are the same in however many streams.
            identity = dataclasses.replace(identity, layout="by token")
        return root_id(identity, block_size=self._size, mode=kind, namespace=namespace)

    def _find(self, tokens: Ids, namespace: str, limit: int) -> Found:
        root = self._root(namespace)
        return self.tiers.find(root, tokens, size=self._size, limit=limit, whole=self._whole)

    def _path(self, tokens: Ids, namespace: str) -> list[BlockId]:
        """The kept blocks that hold `tokens` and nothing else."""
        path: list[BlockId] = []
        parent = self._root(namespace)
        for start in range(0, len(tokens), self._size):
            parent = block_id(parent, tokens[start : start + self._size])
            if not self.tiers.holds(parent):
                break
            path.append(parent)
        return path

    def _why_not_more(self, tokens: Ids, namespace: str, reused: int) -> str:
        if reused >= len(tokens):
            return "all but the last token, whose logits are needed"
        slots = [slot for slot in self._slots if slot.namespace == namespace]
        shared = max([0, *(self._context.common_prefix(tokens, slot.seq) for slot in slots)])
        if shared > reused and not self._cuts:
            kind = self._context.memory.kind.value
            return f"a {kind} memory could not go back to token {shared}: the window or checkpoint is gone"
        parent, start = self._root(namespace), reused - reused % self._size
        for at in range(0, start, self._size):
            parent = block_id(parent, tokens[at : at + self._size])
        if self.tier.was_evicted(block_id(parent, tokens[start : start + self._size])):
            return f"the block from token {start} on was evicted: the budget is {self.tier.budget} bytes"
        if reused:
            return f"first difference at token {reused}"
        for identity in self._identities.values():
            field_name = self._context.identity.difference(identity)
            first = block_id(self._root_of(identity, namespace), tokens[: self._size])
            if field_name and self.tiers.holds(first):
                return f"the identity changed in its {field_name}"
        return "nothing like it is held"


def _by_tier(match: Match, tiers: Tiers) -> dict[str, int]:
    found = {tiers.memory.name: match.length - match.lower}
    if tiers.lower is not None:
        found[tiers.lower.name] = match.lower
    return {tier: count for tier, count in found.items() if count}
