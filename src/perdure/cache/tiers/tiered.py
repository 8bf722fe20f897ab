"""Tiers: the longest prefix that can be put back, over the memory and all that lies behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import AnyBlock, Block, BlockId, BlockMeta, LoadedPrefix, PrefixHit
from perdure.cache.prefix_search import ReuseRule, common_prefix_length, merged
from perdure.cache.tiers.memory import MemoryTier
from perdure.errors import CorruptStateError

if TYPE_CHECKING:
    from perdure.cache.tiers.write_behind import WriteBehind


Ids = NDArray[np.int32]

_WEIGHT = 0.25
"""Of the latest measurement of a rate, against all before it."""


class Rates:
    """Seconds a byte read from each lower tier and seconds a token computed, all learned in use."""

    def __init__(self) -> None:
        self._read: dict[str, float] = {}
        self._computed: float | None = None

    def read(self, tier: str, nbytes: int, seconds: float) -> None:
        if nbytes > 0:
            self._read[tier] = _mixed(self._read.get(tier), seconds / nbytes)

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens > 0:
            self._computed = _mixed(self._computed, seconds / tokens)

    def cost(self, tier: str, nbytes: int) -> float:
        """What reading so many bytes costs, in tokens computed; 0 while either rate is unknown."""
        if not self._computed:
            return 0.0
        return nbytes * self._read.get(tier, 0.0) / self._computed


class Tiers:
    """The memory, and behind it any number of slower tiers in order, searched as one.

    Always holds: a block that is stored goes into every tier; one that was read from a lower tier is in those
    before it afterwards, as far as they have room.
    """

    def __init__(self, memory: MemoryTier, lower: Sequence[WriteBehind] = ()) -> None:
        self.memory = memory
        self.lower = tuple(lower)
        self.rates = Rates()

    # Finding.

    def longest_prefix(
        self, root: BlockId, names: Iterable[BlockId], tokens: Ids, *, size: int, rule: ReuseRule
    ) -> PrefixHit:
        """The longest prefix of `tokens` that can be put back by `rule`. Their whole blocks of `size` have
        these `names`."""
        path = self._path(names, tokens, size)
        hit = rule.longest(self, root, path, tokens, size)
        last = len(hit.blocks) - 1
        if hit.blocks and not (last < len(path) and path[last] is hit.blocks[last]):
            # The whole blocks were touched on the way; this tail was not.
            self.memory.lookup(hit.blocks[last].id)
        return hit

    def _path(self, names: Iterable[BlockId], tokens: Ids, size: int) -> list[AnyBlock]:
        """The whole blocks that are kept, one after the other."""
        path: list[AnyBlock] = []
        for name in names:
            block = self.lookup(name)
            if block is None:
                break
            path.append(block)
        # A hash names the tokens; the tokens themselves decide.
        if path:
            joined = np.concatenate([block.tokens for block in path])
            if common_prefix_length(joined, tokens) < len(path) * size:
                same = (np.array_equal(each.tokens, tokens[i * size :][:size]) for i, each in enumerate(path))
                return [block for block, _ in zip(path, takewhile(bool, same), strict=False)]
        return path

    def lookup(self, block: BlockId) -> AnyBlock | None:
        if (here := self.memory.lookup(block)) is not None:
            return here
        return next((meta for tier in self.lower if (meta := tier.lookup(block)) is not None), None)

    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[AnyBlock]:
        """The blocks that follow `parent`, in whatever tier they are, sorted by their tokens."""
        here: Iterator[AnyBlock] = self.memory.children(parent, start=start, back=back)
        if not self.lower:
            return here
        walks = (tier.children(parent, start=start, back=back) for tier in self.lower)
        return merged([here, *walks], back=back)

    def ways(self, hit: PrefixHit, rule: ReuseRule) -> list[tuple[PrefixHit, float]]:
        """`hit`, and what is left of it without reading from the last tier, from the one before it, and so
        on: each with what reading it costs, in tokens computed."""
        ways = [(hit, self._cost(hit))] if hit.length else []
        for tier in reversed(self.lower):
            if not ways or not ways[-1][1]:
                break
            blocks = list(takewhile(lambda block, name=tier.name: block.tier != name, ways[-1][0].blocks))  # type: ignore[misc]
            if len(blocks) < len(ways[-1][0].blocks) and (blocks := rule.usable(blocks)):
                shorter = PrefixHit(tuple(blocks), len(blocks[-1].tokens))
                ways.append((shorter, self._cost(shorter)))
        return ways

    def _cost(self, hit: PrefixHit) -> float:
        return sum(self.rates.cost(each.tier, each.nbytes) for each in hit.blocks if each.tier != Block.tier)

    # Loading.

    def load(
        self, hit: PrefixHit, rule: ReuseRule, *, fits: Callable[[Block], bool] | None = None
    ) -> LoadedPrefix:
        """The blocks of `hit`, up to the first that is damaged, gone or does not fit; that is dropped."""
        blocks: list[Block] = []
        sources: list[tuple[str, int]] = []
        began, seconds = time.perf_counter(), dict[str, float]()
        read = self._read([block for block in hit.blocks if isinstance(block, BlockMeta)], seconds)
        for each, length in hit.lengths():
            block, tier = read[each.id] if each.id in read else (self.load_block(each), Block.tier)
            if block is not None and fits is not None and not fits(block):
                self.drop(block.id)
                block = None
            if block is None:
                blocks = rule.usable(blocks)
                break
            if tier != Block.tier:
                self.memory.store(block)
            blocks.append(block)
            sources.append((tier, length))
        counts: dict[str, int] = {}
        for tier, length in sources[: len(blocks)]:
            counts[tier] = counts.get(tier, 0) + length
        self._store_above(blocks, counts)
        whole = len(blocks) == len(hit.blocks)
        last = hit.last_length if whole else len(blocks[-1].tokens) if blocks else 0
        if Block.tier in counts:
            seconds[Block.tier] = time.perf_counter() - began - sum(seconds.values())
        return LoadedPrefix(tuple(blocks), last, counts, seconds)

    def _store_above(self, blocks: Sequence[Block], counts: dict[str, int]) -> None:
        """Have what was read from one lower tier in those before it too."""
        last = max((at for at, tier in enumerate(self.lower) if tier.name in counts), default=0)
        for tier in self.lower[:last]:
            tier.store(blocks)

    def load_block(self, block: AnyBlock) -> Block | None:
        """The block, verified; None where it is damaged or gone, and is then dropped."""
        if isinstance(block, BlockMeta):
            return self._read([block], {})[block.id][0]
        try:
            block.verify()
        except CorruptStateError:
            self.memory.drop(block.id)
            return None
        return block

    def _read(
        self, metas: Sequence[BlockMeta], seconds: dict[str, float]
    ) -> dict[BlockId, tuple[Block | None, str]]:
        """Blocks out of the lower tiers, each with the tier that it came from. `seconds` gets what each tier
        took."""
        loaded: dict[BlockId, tuple[Block | None, str]] = {meta.id: (None, meta.tier) for meta in metas}
        for tier in self.lower:
            loaded |= self._read_from(tier, [meta for meta in metas if meta.tier == tier.name], seconds)
        for meta in metas:
            # What one tier has lost or damaged, another may have.
            others = (tier for tier in self.lower if tier.name != meta.tier and loaded[meta.id][0] is None)
            for tier in others:
                again = tier.lookup(meta.id)
                if isinstance(again, Block):
                    loaded[meta.id] = self.load_block(again), tier.name
                elif again is not None:
                    loaded |= self._read_from(tier, [again], seconds)
        # What an index says of a block may be wrong; the block itself is verified.
        return {
            meta.id: (
                block if block is not None and block.has_tail_state >= meta.has_tail_state else None,
                tier,
            )
            for meta in metas
            for block, tier in [loaded[meta.id]]
        }

    def _read_from(
        self, tier: WriteBehind, metas: Sequence[BlockMeta], seconds: dict[str, float]
    ) -> dict[BlockId, tuple[Block | None, str]]:
        """Several at a time: most of it is waiting and hashing, even where they are small."""
        if not metas:
            return {}
        from perdure.engine.parallel import spread

        start = time.perf_counter()
        names = [meta.id for meta in metas]
        blocks = list(spread(tier.load, names, sum(meta.nbytes for meta in metas), large=0))
        nbytes = sum(block.nbytes for block in blocks if block is not None)
        took = time.perf_counter() - start
        self.rates.read(tier.name, nbytes, took)
        seconds[tier.name] = seconds.get(tier.name, 0.0) + took
        return {name: (block, tier.name) for name, block in zip(names, blocks, strict=True)}

    # Storing and dropping.

    def store_lower(self, blocks: Sequence[Block]) -> None:
        """Have blocks, parents before children, in every lower tier. It never waits."""
        for tier in self.lower:
            tier.store(blocks)

    def revalue(self, blocks: Sequence[BlockId]) -> None:
        """What these are worth is another now."""
        if blocks:
            self.memory.revalue(blocks)
            for tier in self.lower:
                tier.revalue(blocks)

    def flush(self) -> None:
        """Return when a lower tier has all that was stored; raise where none could take it."""
        errors = []
        for tier in self.lower:
            tier.flush()
            if tier.error is None:
                return
            errors.append(tier.error)
        if errors:
            raise errors[0]

    def drop(self, block: BlockId) -> None:
        self.memory.drop(block)
        for tier in self.lower:
            tier.drop([block])

    def clear(self) -> None:
        self.memory.clear()
        for tier in self.lower:
            tier.clear()

    @property
    def prefix_tier(self) -> WriteBehind | None:
        """The tier in which prefixes that are kept without an end outlive the process."""
        return next((tier for tier in self.lower if tier.keeps_prefixes), None)


def _mixed(before: float | None, latest: float) -> float:
    return latest if before is None else before + _WEIGHT * (latest - before)
