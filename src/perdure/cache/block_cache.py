"""Block cache: sequences cut into blocks, stored in the tiers, and looked up by their tokens."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import (
    AnyBlock,
    Block,
    BlockId,
    LoadedPrefix,
    PrefixHit,
    block_id,
    chain,
    cost,
    cost_of_token,
    root_id,
)
from perdure.cache.eviction import Use
from perdure.cache.prefix_search import (
    ANY_TOKEN,
    AT_TAIL_STATES,
    ReuseRule,
    Source,
    beginnings,
    best_child,
    common_prefix_length,
)
from perdure.cache.tiers.tiered import Tiers
from perdure.decode.request import KeptPrefix
from perdure.engine.adapters import AdapterSet
from perdure.engine.context import Context
from perdure.engine.contract import Capture
from perdure.events.hub import EventHub
from perdure.identity import Identity

if TYPE_CHECKING:
    from perdure.cache.kept_prefixes import KeptPrefixes

Ids = NDArray[np.int32]
E = TypeVar("E", bound=AnyBlock)
_IDENTITIES = 256
"""Identities that are remembered, to say what changed."""
_ROOTS = 1024
"""Starts of chains that are remembered."""
_Range: TypeAlias = tuple[BlockId, BlockId, int, int]
"""A block to be: its name, what it follows, where it starts and where it ends."""


class BlockNames:
    """The names of the whole blocks of prompts, `size` tokens each.

    Those of the last prompt are remembered: what is asked next is mostly about the same one, or about one
    that goes on from it, and hashing is most of what a lookup costs.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._root = BlockId(b"")
        self._tokens: Ids = np.empty(0, np.int32)
        self._names: list[BlockId] = []

    def of(self, root: BlockId, tokens: Ids) -> Iterator[BlockId]:
        """From the first on; each is hashed when it is asked for."""
        shared = common_prefix_length(self._tokens, tokens) if root == self._root else 0
        if shared < len(tokens):
            self._root, self._tokens = root, tokens.copy()
            self._names = self._names[: shared // self._size]
        # A copy: another thread may add to them before all of these are taken.
        known = self._names[: len(tokens) // self._size]
        start = known[-1] if known else root
        return itertools.chain(known, self._hashed(start, len(known), tokens, self._names))

    def _hashed(self, start: BlockId, count: int, tokens: Ids, names: list[BlockId]) -> Iterator[BlockId]:
        """Those behind the first `count`, of which `start` is the last. They are added to `names`."""
        for at, name in enumerate(chain(start, tokens[count * self._size :], self._size), count):
            if at == len(names):
                names.append(name)
            yield name


class BlockCache:
    """What the tiers hold of one context, by namespace and tokens.

    Always holds: a block is found only under the identity with which its state was computed, in the
    namespace that it was computed for; room is made before bytes are copied.
    """

    def __init__(
        self,
        context: Context,
        tiers: Tiers,
        *,
        block_size: int,
        exact: bool = False,
        events: EventHub | None = None,
    ) -> None:
        """With `exact`, a block is the work of one step of `block_size` tokens, kept and put back whole."""
        self.tiers = tiers
        self.events = events or EventHub()
        self._exact = exact
        self.eviction = tiers.memory.eviction
        self.rule: ReuseRule = AT_TAIL_STATES if context.memory.needs_checkpoint else ANY_TOKEN
        self._context = context
        self._size = block_size
        self._names = BlockNames(block_size)
        self._row_bytes = self._tail_bytes = 0
        self._captured = False
        self._identities: dict[bytes, Identity] = {}
        self._roots: dict[tuple[bytes, str, str, bool], BlockId] = {}
        """Where chains start: to hash an identity takes longer than to look."""

    @property
    def memory(self) -> str:
        """The name of the kind of memory whose state this is."""
        return self._context.memory.name

    # Keeping.

    def fits(self, lengths: NDArray[np.int64]) -> NDArray[np.bool_] | bool:
        """Whether the state of so many tokens has room in the tiers, as far as is known."""
        if self.tiers.lower:
            return True
        needed = cost(0, 0, self._tail_bytes) + lengths * cost_of_token(self._row_bytes)
        return needed <= self.tiers.memory.budget

    def store(
        self,
        seq: int,
        namespace: str,
        checkpoints: Mapping[int, NDArray[np.uint8]],
        length: int,
        use: Use | None = None,
    ) -> None:
        """Copy the first `length` tokens of `seq`, and its tail states at the lengths of its checkpoints, as
        far as they are new and there is room. `use` says whose they are."""
        adapters = self._context.adapters_of(seq)
        use = use or Use(namespace)
        self._store(seq, self.root(namespace, adapters, length), checkpoints, length, use)
        if adapters.before is not None and adapters.start < length:
            # The next prompt may switch the adapter on elsewhere, and have in common what comes before both.
            start = int(adapters.start)
            self._store(seq, self.root(namespace, adapters.before), checkpoints, start, use)

    def _store(
        self, seq: int, root: BlockId, checkpoints: Mapping[int, NDArray[np.uint8]], length: int, use: Use
    ) -> None:
        tokens = self._context.token_array(seq, 0, length)
        if not self.tiers.memory.budget or not len(tokens):
            return
        points = {end: state for end, state in checkpoints.items() if end <= length}
        if use.is_known:
            self._name_parts(root, tokens, points, use)
        new: dict[BlockId, Block] = {}
        at_end = len(tokens) == self._context.length(seq)
        if not self._has_all(root, tokens, points, at_end=at_end):
            evicted = self.tiers.memory.evicted
            new = {block.id: block for block in self._copy(seq, root, tokens, points)}
            if self.events.on:
                self._emit_stored(list(new.values()), self.tiers.memory.evicted - evicted)
        if self.tiers.lower:
            # All of it: what a lower tier turned down or lost before, it may take now.
            ranges = self._ranges(root, tokens, points)
            blocks = (new.get(name) or self.tiers.memory.lookup(name) for name, _, _, _ in ranges)
            self.tiers.store_lower([block for block in blocks if block is not None])

    def _name_parts(self, root: BlockId, tokens: Ids, points: Iterable[int], use: Use) -> None:
        """Have it known whose the blocks of a sequence are, before there are any."""
        names: list[BlockId] = []
        tails: list[BlockId] = []
        for name, _, start, end in self._ranges(root, tokens, points):
            (tails if end - start < self._size else names).append(name)
        self.eviction.write(names, tails, use)

    def _emit_stored(self, blocks: Sequence[Block], evicted: int) -> None:
        memory = self.tiers.memory
        if not blocks and not evicted:
            return
        from perdure.events.event import BlocksStored, CachePressure

        if blocks:
            tokens, nbytes = (sum(len(each.tokens) for each in blocks), sum(each.nbytes for each in blocks))
            self.events.emit(BlocksStored, "", "memory", len(blocks), tokens, nbytes)
        if evicted:
            self.events.emit(CachePressure, "", "memory", evicted, memory.nbytes, memory.budget)

    def _copy(
        self, seq: int, root: BlockId, tokens: Ids, points: dict[int, NDArray[np.uint8]]
    ) -> Iterator[Block]:
        """Make the blocks of `seq` that are not in memory, and put them there as far as there is room."""
        memory = self.tiers.memory
        capture = self._capture(seq)
        if capture.rows is None and self._context.memory.has_rows:
            # The state comes in one piece, of which a checkpoint is only a part.
            points.clear()
        if capture.tail_state is not None and len(tokens) == self._context.length(seq):
            points[len(tokens)] = capture.tail_state
        elif capture.rows is None and not points:
            # All there is of this state belongs to its end, which is not to be kept.
            return

        def room(which: _Range) -> int:
            _, _, start, end = which
            return cost(end - start, self._row_bytes, points[end].nbytes if end in points else 0)

        def make(which: _Range) -> Block:
            _, parent, start, end = which
            rows = None if capture.rows is None else capture.rows.cut(start, end)
            return Block.make(parent, start, tokens[start:end].copy(), rows, points.get(end))

        missing = [
            (name, parent, start, end)
            for name, parent, start, end in self._ranges(root, tokens, points)
            if not self._has(name, parent, tokens[start:end], needs_tail=end in points)
        ]
        from perdure.engine.parallel import spread, threads

        # Several at a time, as long as there is room for all of them; then one by one.
        ahead = 2 * threads()
        while missing:
            some, parent = missing[:ahead], missing[0][1]
            total = sum(map(room, some))
            eviction_class = max(self.eviction.class_of(name) for name, _, _, _ in some)
            if not memory.make_room(total, keep=parent, eviction_class=eviction_class):
                if len(some) > 1:
                    ahead = 1
                    continue
                if not self.tiers.lower:
                    _, _, start, end = some[0]
                    missing = [] if end - start == self._size else missing[1:]
                    continue
            missing = missing[len(some) :]
            for block in spread(make, some, total):
                memory.store(block)
                yield block

    def _capture(self, seq: int) -> Capture:
        capture = self._context.capture(seq)
        self.rule = ANY_TOKEN if capture.tail_state is None else AT_TAIL_STATES
        self._captured = True
        self._row_bytes = 0 if capture.rows is None else capture.rows.row_bytes
        self._tail_bytes = 0 if capture.tail_state is None else capture.tail_state.nbytes
        return capture

    def _ranges(self, root: BlockId, tokens: Ids, points: Iterable[int]) -> Iterator[_Range]:
        """The blocks of a sequence, each after its parent: at each place first the tails that end there."""
        ends = sorted({*points, len(tokens)})
        parent, names = root, self._names.of(root, tokens)
        for start in range(0, len(tokens), self._size):
            for end in ends:
                if start < end < start + self._size:
                    yield block_id(parent, tokens[start:end]), parent, start, end
            if start + self._size <= len(tokens):
                name = next(names)
                yield name, parent, start, start + self._size
                parent = name

    def _has_all(self, root: BlockId, tokens: Ids, points: Iterable[int], *, at_end: bool) -> bool:
        ends = {*points, *([len(tokens)] if at_end and not self.rule.cuts_blocks else [])}
        return all(
            self._has(name, parent, tokens[start:end], needs_tail=end in ends)
            for name, parent, start, end in self._ranges(root, tokens, points)
        )

    def _has(self, name: BlockId, parent: BlockId, tokens: Ids, *, needs_tail: bool) -> bool:
        memory = self.tiers.memory
        known = memory.lookup(name)
        if known is None:
            return not needs_tail and len(tokens) < self._size and memory.covers(parent, tokens)
        return known.has_tail_state or not needs_tail

    def use(self, tokens: Ids, use: Use, adapters: AdapterSet | None = None) -> BlockId | None:
        """A request has these tokens for its prompt: have it known whose their blocks are. Gives the last
        whole one."""
        if not use.is_known:
            return None
        names = list(self._names.of(self.root(use.namespace, adapters, len(tokens)), tokens))
        self.tiers.revalue(self.eviction.use(names, use))
        return names[-1] if names else None

    def names(
        self, tokens: Ids, namespace: str, length: int, adapters: AdapterSet | None = None
    ) -> Iterator[tuple[BlockId, int]]:
        """The names that the blocks of the first `length` of `tokens` have once they are kept, and what each
        takes. Where a state can be cut, the end of `length` lies in a block that may go on behind it."""
        root, row_bytes = self.root(namespace, adapters, length), self._context.row_bytes() or 0
        whole = length // self._size
        if self.rule.cuts_blocks:
            whole = min(-(-length // self._size), len(tokens) // self._size)
        parent = root
        for parent in self._names.of(root, tokens[: whole * self._size]):
            yield parent, cost(self._size, row_bytes, 0)
        if (start := whole * self._size) < length:
            yield block_id(parent, tokens[start:length]), cost(length - start, row_bytes, self._tail_bytes)

    # Finding.

    def root(self, namespace: str, adapters: AdapterSet | None = None, length: float = math.inf) -> BlockId:
        """Where the chain of a state of `length` tokens starts that was computed with `adapters`, or with
        those of the context."""
        identity = self._context.identity_of(self._context.adapters if adapters is None else adapters, length)
        if identity.digest not in self._identities:
            if len(self._identities) >= _IDENTITIES:
                self._identities.clear()
            self._identities[identity.digest] = identity
        root = self._root_of(identity, namespace)
        self.eviction.owns(root, namespace)
        return root

    def _root_of(self, identity: Identity, namespace: str) -> BlockId:
        # What was computed in steps of other sizes, or by another number of threads, is other bits.
        threads = self._context.capabilities.threads
        mode = self.memory + (f"/exact by {threads}" if self._exact else "")
        key = identity.digest, mode, namespace, self.rule.cuts_blocks
        if (root := self._roots.get(key)) is None:
            if len(self._roots) >= _ROOTS:
                self._roots.clear()
            if self.rule.cuts_blocks:
                # Rows by token are the same in however many streams.
                identity = dataclasses.replace(identity, layout="by token")
            root = root_id(identity, block_size=self._size, mode=mode, namespace=namespace)
            self._roots[key] = root
        return root

    def lookup(self, tokens: Ids, namespace: str, adapters: AdapterSet | None = None) -> PrefixHit:
        """The longest prefix of `tokens` that can be put back."""
        hit = self._search(tokens, namespace, self.rule, adapters)
        if not hit.length and not self._captured and self.rule.cuts_blocks and self.tiers.lower:
            # Whether this state can be cut by token shows when it is first captured, or here: by what an
            # earlier process has kept of it.
            self.rule = AT_TAIL_STATES
            hit = self._search(tokens, namespace, self.rule, adapters)
            self.rule = AT_TAIL_STATES if hit.length else ANY_TOKEN
        return hit

    def shared(self, tokens: Ids, namespace: str, hit: PrefixHit, adapters: AdapterSet | None = None) -> int:
        """How many of `tokens` are kept, whether or not a sequence could be put back to there, as it can to
        the end of `hit`."""
        if self.rule.cuts_blocks:
            return hit.length
        return self._search(tokens, namespace, ANY_TOKEN, adapters).length

    def _search(self, tokens: Ids, namespace: str, rule: ReuseRule, adapters: AdapterSet | None) -> PrefixHit:
        if adapters is not None and adapters.before is not None:
            # What comes before the adapter is switched on may have been computed without it.
            whole = self._search_from(self.root(namespace, adapters), tokens, rule)
            before = self.root(namespace, adapters.before)
            start = self._search_from(before, tokens[: int(adapters.start)], rule)
            return whole if whole.length >= start.length else start
        return self._search_from(self.root(namespace, adapters), tokens, rule)

    def _search_from(self, root: BlockId, tokens: Ids, rule: ReuseRule) -> PrefixHit:
        names = self._names.of(root, tokens)
        hit = self.tiers.longest_prefix(root, names, tokens, size=self._size, rule=rule)
        return hit.in_blocks(self._size) if self._exact else hit

    def blocks_on_path(
        self, source: Source[E], tokens: Ids, namespace: str, adapters: AdapterSet | None = None
    ) -> list[E]:
        """The blocks of a tier that hold nothing but a beginning of `tokens`, each after its parent."""
        path: list[E] = []
        level = [(self.root(namespace, adapters, len(tokens)), 0)]
        while level:
            parent, at = level.pop()
            for block in beginnings(source, parent, tokens[at : at + self._size]):
                path.append(block)
                level.append((block.id, block.end))
        return path

    def was_evicted(self, tokens: Ids, namespace: str, at: int, adapters: AdapterSet | None = None) -> bool:
        """Whether a block that went on with `tokens` where `at` lies had to go."""
        memory = self.tiers.memory
        if not memory.evicted:
            return False
        start = at - at % self._size
        root = self.root(namespace, adapters)
        parent = [root, *self._names.of(root, tokens[:start])][-1]
        ends = range(at + 1, min(start + self._size, len(tokens)) + 1)
        return any(memory.was_evicted(block_id(parent, tokens[start:end])) for end in ends)

    def changed(self, tokens: Ids, namespace: str, adapters: AdapterSet | None = None) -> str | None:
        """The field in which the identity differs from one under which these tokens are kept."""
        here = self._context.identity_of(self._context.adapters if adapters is None else adapters)
        for identity in self._identities.values():
            if identity != here:
                root = self._root_of(identity, namespace)
                if best_child(self.tiers, root, tokens[: self._size])[0]:
                    return here.difference(identity)
        return None

    def load(self, hit: PrefixHit) -> LoadedPrefix:
        """A prefix with its state; only what is whole and fits this context."""
        prefix = self.tiers.load(hit, self.rule, fits=self._fits)
        if self.events.on and prefix.length:
            from perdure.events.event import BlocksLoaded

            nbytes = sum(block.nbytes for block in prefix.blocks)
            fields = (dict(prefix.tiers), len(prefix.blocks), nbytes, dict(prefix.seconds))
            self.events.emit(BlocksLoaded, "", *fields)
        return prefix

    def _fits(self, block: Block) -> bool:
        """Whether a block is laid out as this context's own are. Its name does not say so: it may have come
        from elsewhere."""
        if block.rows is None:
            return block.tail_state is not None or self._context.row_bytes() is None
        return row_width(block) == self._context.row_bytes() and len(block.rows) == len(block.tokens)

    # Forgetting.

    def drop_plan(
        self, dropped: Sequence[KeptPrefix], needs: KeptPrefixes
    ) -> tuple[list[BlockId], list[Block]]:
        """The blocks that go with the prefixes `dropped`, and what of those is to be kept in their place."""
        from perdure.cache.drop_plan import drop_plan

        plan = drop_plan(self.tiers, dropped, needs, self.rule)
        drop, instead = list(plan.drop), []
        for each, length in plan.shorten:
            block = self.tiers.load_block(each)
            if block is not None and block.rows is not None:
                drop.append(each.id)
                instead.append(block.beginning(length - block.start))
        return drop, instead

    def clear(self) -> None:
        """Drop everything from all tiers."""
        self._names = BlockNames(self._size)
        self.tiers.clear()

    def replace(self, dropped: Iterable[BlockId], instead: Sequence[Block]) -> None:
        """Drop blocks and all that follow them from memory, and keep others."""
        self._names = BlockNames(self._size)
        for name in dropped:
            self.tiers.memory.drop(name)
        for block in instead:
            self.tiers.memory.store(block)
        if instead:
            self.tiers.store_lower(instead)


def row_width(block: Block) -> int | None:
    return None if block.rows is None else block.rows.shape[1]
