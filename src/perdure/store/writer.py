"""Writing behind the reply, never in its way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence

from perdure.cache.block import Block, BlockId
from perdure.errors import PerdureError
from perdure.store.disk import DiskTier, Entry

log = logging.getLogger("perdure.store")


class WriteBehind:
    """A disk tier whose writes happen in a thread of their own, in the order in which they were offered.

    What waits to be written can be read already. Past `limit` bytes, offers are turned down instead of
    waited for: they cost a computation later, not a pause now.
    """

    def __init__(self, disk: DiskTier, *, limit: int = 256 << 20) -> None:
        self.disk = disk
        self.name = disk.name
        self.turned_down = 0
        self.error: PerdureError | None = None
        self._limit = limit
        self._changed = threading.Condition()
        self._queue: list[Block] = []
        self._pending: dict[BlockId, Block] = {}
        self._bytes = 0
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="perdure-store", daemon=True)
        self._thread.start()

    # As a lower tier of the block cache.

    def entry(self, block: BlockId) -> Entry | Block | None:
        with self._changed:
            waiting = self._pending.get(block)
        return waiting or self.disk.entry(block)

    def children(self, parent: BlockId) -> Iterator[Entry | Block]:
        with self._changed:
            waiting = [block for block in self._pending.values() if block.parent == parent]
        yield from waiting
        known = {block.id for block in waiting}
        yield from (entry for entry in self.disk.children(parent) if entry.id not in known)

    def get(self, block: BlockId) -> Block | None:
        with self._changed:
            waiting = self._pending.get(block)
        return waiting or self.disk.get(block)

    def offer(self, blocks: Sequence[Block]) -> None:
        with self._changed:
            for block in blocks:
                known = self.disk.entry(block.id)
                if known is not None and known.has_rest >= block.has_rest:
                    continue
                if self._bytes + block.nbytes > self._limit or self._closing:
                    self.turned_down += 1
                    continue
                if block.id not in self._pending:
                    self._pending[block.id] = block
                    self._queue.append(block)
                    self._bytes += block.nbytes
            self._changed.notify_all()

    def drop(self, blocks: Iterable[BlockId]) -> None:
        self.flush()
        self.disk.drop(blocks)

    def clear(self) -> None:
        self.flush()
        self.disk.clear()

    # Durability.

    def flush(self) -> None:
        """Return when all that was offered is on the disk, or could not be put there (see `error`)."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

    def close(self) -> None:
        self.flush()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self.disk.close()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                batch, self._queue = self._queue, []
            try:
                self.disk.put(batch)
                self.error = None
            except PerdureError as error:
                # The state is still in memory, and the tokens with whoever asked: nothing is lost but time.
                log.warning("blocks could not be kept: %s", error)
                self.error = error
            with self._changed:
                for block in batch:
                    del self._pending[block.id]
                    self._bytes -= block.nbytes
                self._changed.notify_all()
