"""Tiers: the longest prefix that can be put back, over memory and what lies behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import Block, BlockId, Entry, Found, Match
from perdure.cache.memory_tier import MemoryTier
from perdure.cache.reuse_rule import ReuseRule
from perdure.cache.siblings import common, merged
from perdure.engine.parallel import spread
from perdure.errors import CorruptStateError

Ids = NDArray[np.int32]

_WEIGHT = 0.25
"""Of the latest measurement of a rate, against all before it."""


class LowerTier(Protocol):
    """A slower place behind the memory. It reads at once, and writes when it can."""

    name: str

    @property
    def nbytes(self) -> int:
        """What it keeps now; what waits to be written is not in it."""
        ...

    def lookup(self, block: BlockId) -> Entry | None: ...
    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[Entry]:
        """The blocks that follow `parent`, by their tokens' bytes: from `start` on, or back from it."""
        ...

    def load(self, block: BlockId) -> Block | None:
        """The block, all of it verified; None where it is missing or damaged, and is then forgotten."""
        ...

    def store(self, blocks: Sequence[Block]) -> None:
        """Take blocks, parents before children, to be kept. It never waits."""
        ...

    def drop(self, blocks: Iterable[BlockId]) -> None: ...
    def clear(self) -> None: ...


class Rates:
    """Seconds a byte read from the lower tier and seconds a token computed, both learned in use."""

    def __init__(self) -> None:
        self._read: float | None = None
        self._computed: float | None = None

    def read(self, nbytes: int, seconds: float) -> None:
        if nbytes > 0:
            self._read = _mixed(self._read, seconds / nbytes)

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens > 0:
            self._computed = _mixed(self._computed, seconds / tokens)

    def cost(self, nbytes: int) -> float:
        """What reading so many bytes costs, in tokens computed; 0 while either rate is unknown."""
        if self._read is None or not self._computed:
            return 0.0
        return nbytes * self._read / self._computed


class Tiers:
    """The memory, and behind it perhaps something slower, searched as one."""

    def __init__(self, memory: MemoryTier, lower: LowerTier | None = None) -> None:
        self.memory = memory
        self.lower = lower
        self.rates = Rates()

    def longest_prefix(
        self, root: BlockId, names: Iterable[BlockId], tokens: Ids, *, size: int, rule: ReuseRule
    ) -> Found:
        """The longest prefix of `tokens` that can be put back by `rule`. Their whole blocks of `size` have
        these `names`."""
        path = self._path(names, tokens, size)
        found = rule.longest(self, root, path, tokens, size)
        last = len(found.entries) - 1
        if found.entries and not (last < len(path) and path[last] is found.entries[last]):
            # The whole blocks were touched on the way; this tail was not.
            self.memory.lookup(found.entries[last].id)
        return found

    def _path(self, names: Iterable[BlockId], tokens: Ids, size: int) -> list[Entry]:
        """The whole blocks that are kept, one after the other."""
        path: list[Entry] = []
        for name in names:
            entry = self.lookup(name)
            if entry is None:
                break
            path.append(entry)
        # A hash names the tokens; the tokens themselves decide.
        if path and common(np.concatenate([entry.tokens for entry in path]), tokens) < len(path) * size:
            same = (np.array_equal(each.tokens, tokens[i * size :][:size]) for i, each in enumerate(path))
            return [entry for entry, _ in zip(path, takewhile(bool, same), strict=False)]
        return path

    def lower_bytes(self, found: Found) -> int:
        """How much of `found` would have to be read."""
        return sum(entry.nbytes for entry in found.entries if entry.id not in self.memory)

    def held(self, found: Found, rule: ReuseRule) -> Found:
        """What of `found` needs no reading."""
        entries = []
        for entry in found.entries:
            if entry.id not in self.memory:
                break
            entries.append(entry)
        entries = rule.usable(entries)
        if len(entries) == len(found.entries):
            return found
        return Found(tuple(entries), len(entries[-1].tokens) if entries else 0)

    def load(self, found: Found, rule: ReuseRule, *, fits: Callable[[Block], bool] | None = None) -> Match:
        """The blocks of `found`, up to the first that is damaged, gone or does not fit; that is dropped."""
        blocks: list[Block] = []
        lower = 0
        read = self._read([entry for entry in found.entries if not isinstance(entry, Block)])
        for entry in found.entries:
            block = read[entry.id] if entry.id in read else self.load_block(entry)
            if block is not None and fits is not None and not fits(block):
                self.drop(block.id)
                block = None
            if block is None:
                blocks = rule.usable(blocks)
                end = blocks[-1].end if blocks else 0
                return Match(tuple(blocks), len(blocks[-1].tokens) if blocks else 0, min(lower, end))
            if block is not entry:
                lower += len(block.tokens) if entry is not found.entries[-1] else found.keep
                self.memory.store(block)
            blocks.append(block)
        return Match(tuple(blocks), found.keep, lower)

    def lookup(self, block: BlockId) -> Entry | None:
        return self.memory.lookup(block) or (self.lower.lookup(block) if self.lower else None)

    def load_block(self, entry: Entry) -> Block | None:
        """The block of `entry`, verified; None where it is damaged or gone, and is then dropped."""
        if not isinstance(entry, Block):
            return self._read([entry])[entry.id]
        try:
            entry.verify()
        except CorruptStateError:
            self.memory.drop(entry.id)
            return None
        return entry

    def _read(self, entries: Sequence[Entry]) -> dict[BlockId, Block | None]:
        """Blocks out of the lower tier, several at a time: most of it is waiting and hashing."""
        if self.lower is None or not entries:
            return {entry.id: None for entry in entries}
        start = time.perf_counter()
        names = [entry.id for entry in entries]
        # Even small ones are mostly waited for.
        found = list(spread(self.lower.load, names, sum(entry.nbytes for entry in entries), large=0))
        nbytes = sum(block.nbytes for block in found if block is not None)
        self.rates.read(nbytes, time.perf_counter() - start)
        # What an index says of a block may be wrong; the block itself is verified.
        return {
            entry.id: block if block is not None and block.has_tail_state >= entry.has_tail_state else None
            for entry, block in zip(entries, found, strict=True)
        }

    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[Entry]:
        """The blocks that follow `parent`, in whatever tier they are, sorted by their tokens."""
        here: Iterator[Entry] = self.memory.children(parent, start=start, back=back)
        if self.lower is None:
            return here
        return merged(here, self.lower.children(parent, start=start, back=back), back=back)

    def drop(self, block: BlockId) -> None:
        self.memory.drop(block)
        if self.lower is not None:
            self.lower.drop([block])

    def clear(self) -> None:
        self.memory.clear()
        if self.lower is not None:
            self.lower.clear()


def _mixed(before: float | None, latest: float) -> float:
    return latest if before is None else before + _WEIGHT * (latest - before)
