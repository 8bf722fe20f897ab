"""Write-behind: any lower tier, written behind the reply and never in its way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from perdure.cache.block import AnyBlock, Block, BlockId
from perdure.cache.prefix_search import key_of, merged
from perdure.cache.sorted_keys import ChildIndex
from perdure.decode.request import KeptPrefix
from perdure.errors import StoreError
from perdure.events.background import BackgroundThread

if TYPE_CHECKING:
    from perdure.cache.tiers.base import BlockTier


log = logging.getLogger("perdure.store")

T = TypeVar("T")

_BATCH = 16
"""Blocks that are written at once to a tier with a limit on its calls."""


class WriteBehind:
    """A lower tier whose writes happen in a thread of their own, in the order in which they came.

    What waits to be written can be read already. Past `limit` bytes, blocks are turned down instead of
    waited for: they cost a computation later, not a pause now. A tier that fails, or does not answer within
    its patience, costs a computation too, never a reply: reading then finds nothing, and `error` says why.
    """

    def __init__(self, tier: BlockTier, *, limit: int = 256 << 20) -> None:
        self.tier = tier
        self.name = tier.name
        self.keeps_prefixes = tier.keeps_prefixes
        self.turned_down = 0
        self.error: Exception | None = None
        """What went wrong last, if nothing has been written since."""
        self._limit = limit
        self._lacks = False
        """Whether blocks were turned down, or could not be written, since `backfill`."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pending: dict[BlockId, Block] = {}
        self._children: dict[BlockId, ChildIndex] = {}
        """What waits to be written, by what it follows."""
        self._damaged: set[BlockId] = set()
        self._bytes = 0
        self._batches = 0
        """Written, or given up."""
        self._late: set[Future[object]] = set()
        """Calls that were given up and have not returned."""
        self._closing = False
        self._thread = BackgroundThread(self._loop, name=f"perdure-{self.name}", restart=True)
        self._thread.start()

    # Reading.

    @property
    def nbytes(self) -> int:
        """What the tier keeps now; what waits to be written is not in it."""
        return self.tier.nbytes

    @property
    def written(self) -> int:
        return self.tier.written

    def lookup(self, block: BlockId) -> AnyBlock | None:
        with self._lock:
            waiting = self._pending.get(block)
            if waiting is not None or block in self._damaged:
                return waiting
        return self._read(lambda: self.tier.lookup(block), None)

    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[AnyBlock]:
        """The blocks that follow `parent`, by their tokens' bytes: from `start` on, or back from it."""
        written = self._children_written(parent, start, back)
        with self._lock:
            children = self._children.get(parent)
        if children is None:
            return written
        return merged([self._children_waiting(children, start, back), written], back=back)

    def _children_waiting(self, children: ChildIndex, start: bytes, back: bool) -> Iterator[AnyBlock]:
        names = children.walk(start, back=back)
        while True:
            with self._lock:
                name = next(names, None)
                block = None if name is None else self._pending.get(name)
            if name is None:
                return
            if block is not None:
                yield block

    def _children_written(self, parent: BlockId, start: bytes, back: bool) -> Iterator[AnyBlock]:
        metas: Iterator[AnyBlock] = self._read(
            lambda: self.tier.children(parent, start=start, back=back), iter(())
        )
        while (meta := self._read(lambda: next(metas, None), None)) is not None:
            with self._lock:
                hidden = meta.id in self._damaged
            if not hidden:
                yield meta

    def load(self, block: BlockId) -> Block | None:
        """The block, all of it verified. One that is damaged or gone is forgotten, and the blocks behind it
        are looked at."""
        with self._changed:
            waiting = self._pending.get(block)
        if waiting is not None:
            return waiting
        try:
            loaded = self._bounded(lambda: self.tier.load(block))
        except Exception as error:
            # Whether it has the block is not known: it may come back.
            self._failed("kept state cannot be read", error)
            return None
        if loaded is None:
            with self._changed:
                if not self._closing:
                    self._damaged.add(block)
                    self._changed.notify_all()
        return loaded

    # Writing.

    def store(self, blocks: Sequence[Block]) -> None:
        """Take these in for writing, all at once: the thread finds them together. It never waits."""
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
                    self._lacks = True
                    break
                self._pending[block.id] = block
                self._children.setdefault(block.parent, ChildIndex()).add(key_of(block.tokens), block.id)
                self._bytes += more
            self._changed.notify_all()

    def backfill(self, blocks: Iterable[Block]) -> None:
        """Write those of these that were turned down or could not be written before, parents before children,
        as many at a time as may wait. It waits for them; a tier that fails is left alone."""
        if not self._lacks or self.error is not None:
            return
        self._lacks = False
        group, size = list[Block](), 0
        for block in blocks:
            if group and size + block.nbytes > self._limit // 2:
                self._write(group)
                group, size = [], 0
            group.append(block)
            size += block.nbytes
        self._write(group)

    def _write(self, blocks: Sequence[Block]) -> None:
        if self.error is None:
            self.flush()
            self.store(blocks)
            self.flush()

    def drop(self, blocks: Iterable[BlockId], prefixes: Iterable[KeptPrefix] = ()) -> None:
        """Forget blocks with all that follow them, and kept prefixes; raise where that cannot be done."""
        self.flush()
        self._bounded(lambda: self.tier.drop(blocks, prefixes))

    def revalue(self, blocks: Iterable[BlockId]) -> None:
        """What these are worth is another now. It never waits."""
        self.tier.revalue(blocks)

    def clear(self) -> None:
        self.flush()
        self._bounded(self.tier.clear)

    # Durability.

    def keep(self, prefix: KeptPrefix) -> None:
        """Return when `prefix` and its state will outlive the process; raise where they will not."""
        self.flush()
        if self.error is not None and self._bounded(lambda: self.tier.kept_length(prefix)) < prefix.kept:
            raise self.error
        self._bounded(lambda: self.tier.keep(prefix))

    def flush(self) -> None:
        """Return when all that was stored is written, or could not be (see `error`)."""
        with self._changed:
            blocks, damaged = dict(self._pending), set(self._damaged)

            def is_done() -> bool:
                waits = any(self._pending.get(name) is block for name, block in blocks.items())
                return not waits and not damaged & self._damaged

            while not is_done():
                batches = self._batches
                done_or_moved = self._changed.wait_for(
                    lambda before=batches: is_done() or self._batches != before,  # type: ignore[misc]
                    timeout=self.tier.patience,
                )
                if not done_or_moved:
                    self._failed("blocks could not be kept", self._timeout())
                    return

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self.tier.patience is None:
            self._thread.join()
        else:
            self.flush()
            self._thread.join(self.tier.patience)
        try:
            self._bounded(self.tier.close)
        except StoreError as error:
            self._failed("a tier could not be closed", error)

    # Inside.

    def _read(self, question: Callable[[], T], nothing: T) -> T:
        try:
            if self.tier.index_at_hand or self.tier.patience is None:
                return question()
            return self._bounded(question)
        except Exception as error:
            self._failed("kept state cannot be found", error)
            return nothing

    def _bounded(self, call: Callable[[], T]) -> T:
        """What a call of the tier returns, if it does so in time."""
        if self.tier.patience is None:
            return call()
        with self._changed:
            if self._late:
                raise self._timeout()
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(_ordinary(error))
            with self._changed:
                self._late.discard(answer)

        # A daemon: a call that never returns must not keep the process from ending.
        BackgroundThread(run, name=f"perdure-{self.name}-call").start()
        try:
            return answer.result(self.tier.patience)
        except TimeoutError:
            with self._changed:
                if answer.done():
                    raise
                self._late.add(answer)  # type: ignore[arg-type]
            raise self._timeout() from None

    def _timeout(self) -> StoreError:
        return StoreError(f"the {self.name} tier has not answered for {self.tier.patience} seconds")

    def _failed(self, what: str, error: Exception) -> None:
        if str(error) != str(self.error):
            log.warning("%s: %s", what, error)
        self.error = error

    def _loop(self) -> None:
        most = None if self.tier.patience is None else _BATCH
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._damaged or self._closing)
                batch, damaged = list(self._pending.values())[:most], set(self._damaged)
            if not batch and not damaged:
                return
            try:
                self.tier.forget(damaged)
                self.tier.store(batch)
                self.error = None
            except BaseException as error:
                # The state is still in memory, and the tokens with the client: nothing is lost but time.
                # Whatever it was, nobody may be left waiting for a thread that is gone.
                self._failed("blocks could not be kept", _ordinary(error))
                self._lacks = True
            with self._changed:
                self._batches += 1
                self._damaged -= damaged
                for block in batch:
                    # A fuller one may have taken its place meanwhile.
                    if self._pending.get(block.id) is block:
                        del self._pending[block.id]
                        children = self._children[block.parent]
                        children.remove(key_of(block.tokens))
                        if not len(children):
                            del self._children[block.parent]
                        self._bytes -= block.nbytes
                self._changed.notify_all()


def _ordinary(error: BaseException) -> Exception:
    """The error, or one that quotes it where it is none that ends a call alone, such as a panic of native
    code: it must not end the thread that waits."""
    return error if isinstance(error, Exception) else StoreError(f"a tier failed: {error!r}")
