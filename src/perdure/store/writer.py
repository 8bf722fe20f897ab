"""Writing behind the reply, never in its way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from perdure.cache.block import Block, BlockId
from perdure.cache.siblings import Siblings, key_of, merged
from perdure.errors import StoreError
from perdure.store.disk import DiskTier, IndexEntry

log = logging.getLogger("perdure.store")

T = TypeVar("T")


class WriteBehind:
    """A disk tier whose writes happen in a thread of their own, in the order in which they came.

    What waits to be written can be read already. Past `limit` bytes, blocks are turned down instead of
    waited for: they cost a computation later, not a pause now. A store that fails costs a computation too,
    never a reply: reading then finds nothing, and `error` says why.
    """

    def __init__(self, disk: DiskTier, *, limit: int = 256 << 20) -> None:
        self.disk = disk
        self.name = disk.name
        self.turned_down = 0
        self.error: Exception | None = None
        """What went wrong last, if nothing has been written since."""
        self._limit = limit
        self._changed = threading.Condition()
        self._pending: dict[BlockId, Block] = {}
        self._following: dict[BlockId, Siblings] = {}
        """What waits to be written, by what it follows."""
        self._damaged: set[BlockId] = set()
        self._bytes = 0
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="perdure-store", daemon=True)
        self._thread.start()

    # As a lower tier of the block cache.

    @property
    def nbytes(self) -> int:
        return self.disk.nbytes

    def lookup(self, block: BlockId) -> IndexEntry | Block | None:
        with self._changed:
            waiting = self._pending.get(block)
            if waiting is not None or block in self._damaged:
                return waiting
        return self._read(lambda: self.disk.lookup(block), None)

    def children(
        self, parent: BlockId, *, start: bytes = b"", back: bool = False
    ) -> Iterator[IndexEntry | Block]:
        """The blocks that follow `parent`, by their tokens' bytes: from `start` on, or back from it."""
        waiting: Iterator[IndexEntry | Block] = self._waiting(parent, start, back)
        written: Iterator[IndexEntry | Block] = self._written(parent, start, back)
        return merged(waiting, written, back=back)

    def _waiting(self, parent: BlockId, start: bytes, back: bool) -> Iterator[Block]:
        with self._changed:
            siblings = self._following.get(parent)
        names = siblings.walk(start, back=back) if siblings is not None else iter(())
        while True:
            with self._changed:
                name = next(names, None)
                block = None if name is None else self._pending.get(name)
            if name is None:
                return
            if block is not None:
                yield block

    def _written(self, parent: BlockId, start: bytes, back: bool) -> Iterator[IndexEntry]:
        known: Iterator[IndexEntry] = self._read(
            lambda: self.disk.children(parent, start=start, back=back), iter(())
        )
        while (entry := self._read(lambda: next(known, None), None)) is not None:
            with self._changed:
                hidden = entry.id in self._damaged
            if not hidden:
                yield entry

    def load(self, block: BlockId) -> Block | None:
        """The block, all of it verified. One that is damaged or gone is forgotten, and the blocks behind it
        are looked at."""
        with self._changed:
            waiting = self._pending.get(block)
        if waiting is not None:
            return waiting
        found = self.disk.load(block)
        if found is None:
            with self._changed:
                if not self._closing:
                    self._damaged.add(block)
                    self._changed.notify_all()
        return found

    def store(self, blocks: Sequence[Block]) -> None:
        """Take these in for writing, all at once: the thread finds them together."""
        known = {block.id: self.lookup(block.id) for block in blocks}
        with self._changed:
            for block in blocks:
                before = self._pending.get(block.id)
                there = before or known[block.id]
                # While damage is being looked into, what is said to be there may be damaged too.
                sure = isinstance(there, Block) or not self._damaged
                if there is not None and there.has_tail_state + sure > block.has_tail_state:
                    continue
                more = block.nbytes - (before.nbytes if before is not None else 0)
                if self._bytes + more > self._limit or self._closing:
                    # What follows it would be of no use without it.
                    self.turned_down += 1
                    break
                self._pending[block.id] = block
                self._following.setdefault(block.parent, Siblings()).add(key_of(block.tokens), block.id)
                self._bytes += more
            self._changed.notify_all()

    def drop(self, blocks: Iterable[BlockId]) -> None:
        self.flush()
        self.disk.drop(blocks)

    def clear(self) -> None:
        self.flush()
        self.disk.clear()

    # Durability.

    def flush(self) -> None:
        """Return when all that was stored is on the disk, or could not be put there (see `error`)."""
        with self._changed:
            blocks, damaged = dict(self._pending), set(self._damaged)
            self._changed.wait_for(
                lambda: (
                    not (
                        damaged & self._damaged
                        or any(self._pending.get(name) is block for name, block in blocks.items())
                    )
                )
            )

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self.disk.close()

    # Inside.

    def _read(self, question: Callable[[], T], nothing: T) -> T:
        try:
            return question()
        except StoreError as error:
            self._failed("kept state cannot be found", error)
            return nothing

    def _failed(self, what: str, error: Exception) -> None:
        if str(error) != str(self.error):
            log.warning("%s: %s", what, error)
        self.error = error

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._damaged or self._closing)
                batch, damaged = list(self._pending.values()), set(self._damaged)
            if not batch and not damaged:
                return
            try:
                self.disk.forget(damaged)
                self.disk.store(batch)
                self.error = None
            except Exception as error:
                # The state is still in memory, and the tokens with whoever asked: nothing is lost but time.
                # Whatever it was, nobody may be left waiting for a thread that is gone.
                self._failed("blocks could not be kept", error)
            with self._changed:
                self._damaged -= damaged
                for block in batch:
                    # A fuller one may have taken its place meanwhile.
                    if self._pending.get(block.id) is block:
                        del self._pending[block.id]
                        siblings = self._following[block.parent]
                        siblings.remove(key_of(block.tokens))
                        if not len(siblings):
                            del self._following[block.parent]
                        self._bytes -= block.nbytes
                self._changed.notify_all()
