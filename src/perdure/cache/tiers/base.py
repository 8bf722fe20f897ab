"""The contract of a block tier: where blocks lie behind the memory of the process.

    memory (memory.py)  ->  disk (disk.py)  ->  any number of others, the faster first

The tiers are searched in this order as one (tiered.py), each behind a `WriteBehind` (write_behind.py).

Threads: every call may come from any thread, several at once. `lookup` and `children` come from the engine
thread between two steps, `load` from several threads at once while that one waits, `store` and `forget` from
the tier's own writing thread, `drop`, `clear` and the calls about prefixes from the caller's thread.

Waiting: `lookup` and `children` hold up every reply, so they answer from an index at hand, in microseconds.
`load` may take as long as reading does: what it costs is measured, and where computing is cheaper, nothing is
read. `store` may take as long as it likes. A tier that may have to wait for another machine sets `patience`:
its calls are then given up after so many seconds, and it is asked nothing more until the late one returned.

Failure: a tier says "I do not have it" (None) or raises, `StoreError` where it can. Either costs a
computation, never a reply: the cache goes on without it. `load` alone must be right: it returns a block that
was verified byte by byte, or None. What it does not return is dropped through `forget`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, cast

from perdure.cache.block import Block, BlockId, BlockMeta
from perdure.cache.eviction import Eviction
from perdure.decode.request import KeptPrefix
from perdure.errors import InvalidInputError
from perdure.extension import by_name, imported


class BlockTier(ABC):
    """Blocks behind the memory, within a byte budget. The module's docstring is the contract."""

    name: str
    """What reuse from it is reported under."""
    budget: int
    """Bytes that it keeps, at most; kept before bytes are written."""
    patience: float | None = None
    """Seconds that one call may take. None: it is on this machine, and is waited for."""
    index_at_hand: ClassVar[bool] = False
    """Whether `lookup` and `children` never wait, whatever `patience` says of the other calls."""
    keeps_prefixes: ClassVar[bool] = False
    """Whether `keep` and `prefixes` do something."""

    def __init__(self) -> None:
        self.pinned: Callable[[BlockId], bool] = lambda block: False
        """What is not evicted for now. It is less than the budget."""
        self.written = 0
        """Bytes of blocks that were written since it was opened."""
        self.eviction = Eviction()
        """What blocks are worth: those of the least worth are evicted first."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """What it keeps now, without waiting."""

    @abstractmethod
    def lookup(self, block: BlockId) -> BlockMeta | None: ...

    @abstractmethod
    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[BlockMeta]:
        """The blocks that follow `parent`, by their tokens' bytes: from `start` on, or back from it."""

    @abstractmethod
    def load(self, block: BlockId) -> Block | None:
        """The block, all of it verified; None where it is missing or damaged."""

    @abstractmethod
    def store(self, blocks: Sequence[Block]) -> int:
        """Keep blocks, parents before children; how many are kept when it returns. Left out are those that
        do not fit the budget once old leaves are gone, and those whose parent is not there."""

    @abstractmethod
    def drop(self, blocks: Iterable[BlockId], prefixes: Iterable[KeptPrefix] = ()) -> None:
        """Forget blocks with all that follow them, and kept prefixes: all of it, or on an error nothing."""

    @abstractmethod
    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Let go of blocks that `load` did not return, and of those behind them that are damaged too."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every block."""

    def revalue(self, blocks: Iterable[BlockId]) -> None:  # noqa: B027
        """What these are worth is another now. It never waits, and may be left out."""

    @abstractmethod
    def close(self) -> None: ...

    # Prefixes that are kept without an end outlive the process in the first tier that can keep them.

    def keep(self, prefix: KeptPrefix) -> None:
        """Return when `prefix` is listed for good."""
        raise NotImplementedError(f"the {self.name} tier keeps no prefixes")

    def kept_length(self, prefix: KeptPrefix) -> int:
        """How many tokens of `prefix` can be put back from here."""
        return 0

    def prefixes(self) -> list[KeptPrefix]:
        return []


class TierOpener(ABC):
    """Opens tiers of one scheme of URLs: an extension's (`Extension.tiers`)."""

    @abstractmethod
    def check(self, url: str) -> None:
        """`InvalidInputError` where a URL makes no sense. Nothing is reached."""

    @abstractmethod
    def open(self, url: str, *, key: bytes, identity: bytes) -> BlockTier:
        """A tier whose state `key` encrypts, for engines of that identity. `StoreError` where it cannot be
        reached."""


def tier_opener(url: str) -> TierOpener:
    """What opens the place that a URL names."""
    openers = by_name("tiers")
    scheme = url.partition("://")[0]
    if scheme not in openers:
        known = ", ".join(f"{each}://" for each in sorted(openers)) or "nothing that is installed"
        raise InvalidInputError(f"a place for blocks begins with {known}, got {url!r}")
    return cast(TierOpener, imported(openers[scheme]))
