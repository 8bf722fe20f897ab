"""The tier of the block cache on disk."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from perdure.atomic import TEMPORARY
from perdure.cache.block import Block, BlockId
from perdure.errors import (
    InvalidInputError,
    StoreDamagedError,
    StoreError,
    StoreLockedError,
    StoreReadOnlyError,
)
from perdure.store import block_file
from perdure.store.block_folder import NAME, BlockFolder
from perdure.store.durable import explained, make_folder, sync_folder, write_file
from perdure.store.entry import SELECT, IndexEntry, entries_of, row_of
from perdure.store.findings import Findings
from perdure.store.holder import described
from perdure.store.index import Index


class DiskTier:
    """Blocks in a folder, within a byte budget. For any thread.

    Always holds: an entry is committed only after its file and the file's name are on the disk, and its
    file goes only after the entry is gone. So a crash leaves at worst files without entries, which are
    deleted when the store is next opened for writing. A block is entered only after the one before it.
    """

    name = "disk"

    def __init__(self, folder: Path, *, budget: int, readonly: bool = False, rebuild: bool = False) -> None:
        """With `rebuild`, an index that cannot be read is made anew from the files."""
        self.folder = folder
        self.budget = budget
        self.readonly = readonly
        self.pinned: Callable[[BlockId], bool] = lambda block: False
        """What is not evicted for now. It must be less than the budget."""
        self.files = BlockFolder(folder)
        self._lock: FileLock | None = None
        self._changing = threading.RLock()
        self._touched: dict[BlockId, int] = {}
        self.rebuilt = False
        with ExitStack() as undo:
            undo.callback(self._let_go)
            if not readonly:
                self._make_folders()
                self._take_lock()
            interrupted = self._log.exists()
            if not readonly and not self._has_index() and next(self.files.files(), None) is not None:
                self._mark_unlisted()
            try:
                self._open_index()
            except StoreDamagedError:
                if readonly or not rebuild:
                    raise
                self._set_index_aside()
                self._open_index()
            undo.callback(self.index.close)
            if not readonly:
                self._recover(interrupted)
            undo.pop_all()

    def __len__(self) -> int:
        return self._total("blocks")

    # Reading.

    def lookup(self, block: BlockId) -> IndexEntry | None:
        return next(entries_of(self.index.rows(f"{SELECT} WHERE id = ?", block)), None)

    def page(self, *, limit: int | None = None, after: str | None = None) -> list[IndexEntry]:
        """Blocks by their ids: up to `limit`, behind the one with the id `after`."""
        try:
            behind = b"" if after is None else bytes.fromhex(after)
        except ValueError:
            raise InvalidInputError(f"{after!r} is no id of a block: it has 64 digits of 0 to f") from None
        query = f"{SELECT} WHERE id > ? ORDER BY id LIMIT ?"
        return list(entries_of(self.index.rows(query, behind, -1 if limit is None else limit)))

    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[IndexEntry]:
        """The blocks that follow `parent`, by their tokens' bytes: from `start` on, or back from it."""
        within, order, limit = ("<=", "tokens DESC", 1) if back else (">=", "tokens", 1)
        while True:
            query = f"{SELECT} WHERE parent = ? AND tokens {within} ? ORDER BY {order} LIMIT {limit}"
            rows = self.index.rows(query, parent, start)
            yield from entries_of(rows)
            if len(rows) < limit:
                return
            # Who wants more than the first wants perhaps all.
            within, start, limit = within[0], rows[-1][3], 64

    def load(self, block: BlockId) -> Block | None:
        """A block from its file, all of it verified; None where it is missing or damaged."""
        try:
            found = self.files.read(self.files.path(block))
        except StoreError:
            return None
        if found is not None:
            self._touched[block] = next(self._clock)
        return found

    # Writing.

    def store(self, blocks: Sequence[Block]) -> int:
        """Make blocks durable, parents before children; how many are now kept.

        When this returns they are on the disk. Left out are those that no longer fit the budget, and those
        whose parent is not there.
        """
        self._check_writable()
        with self._changing:
            fitting = self._make_room(self._rooted(blocks))
            if not fitting:
                return 0
            new = {block.id for block in fitting if self.lookup(block.id) is None}
            try:
                self.files.write(fitting)
                with self._writing():
                    self._flush_touches()
                    for block in fitting:
                        self._enter(block, block_file.size(block), next(self._clock))
            except BaseException:
                # What has no entry would fill the disk uncounted.
                for name in new:
                    with suppress(OSError):
                        self.files.path(name).unlink(missing_ok=True)
                raise
            return len(fitting)

    def drop(self, blocks: Iterable[BlockId], *, then: Callable[[], None] | None = None) -> None:
        """Forget blocks and all that follow them. `then` is part of the same transaction."""
        doomed = list(blocks)
        with self._changing:
            gone: list[BlockId] = []
            with self._writing():
                while doomed:
                    block = doomed.pop()
                    doomed += [
                        row[0] for row in self.index.rows("SELECT id FROM block WHERE parent = ?", block)
                    ]
                    self._unlist(block)
                    gone.append(block)
                if then is not None:
                    then()
            self.files.delete(
                itertools.chain.from_iterable(
                    (self.files.path(b), self.files.quarantined / b.hex()) for b in gone
                )
            )

    def clear(self) -> None:
        """Forget every block, and whatever else lies about."""
        with self._changing:
            with self._writing():
                self.index.run("DELETE FROM block")
                self._count = self.nbytes = 0
            self.files.delete([*self.files.files(), *self.files.quarantined.glob("*")])

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Let go of blocks that are damaged or gone, and of those behind them that are so too.

        Whole ones behind them stay: they are of use again once the gap is closed.
        """
        self._check_writable()
        with self._changing:
            suspects, gone = list(blocks), []
            for name in suspects:
                suspects += [entry.id for entry in self.children(name)]
                if self.files.read(self.files.path(name)) is None:
                    gone.append(name)
            if not gone:
                return
            with self._writing():
                for name in gone:
                    self._unlist(name)
            for name in gone:
                self.files.quarantine(self.files.path(name))

    # Upkeep.

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Findings:
        """Walk everything: make the index say what the files say, and move damaged files aside."""
        self._check_writable()
        with self._changing:
            try:
                self.index.check()
                return self._walk(progress)
            except StoreDamagedError:
                self.index.close()
                self._set_index_aside()
                self._open_index()
                findings = self._walk(progress)
                self.files.delete([self._unlisted])
                return findings

    def close(self) -> None:
        if not self.readonly and self._touched:
            with suppress(StoreError), self._writing():
                self._flush_touches()
        self.index.close()
        self._let_go()

    # Opening.

    @property
    def _index(self) -> Path:
        return self.folder / "index.sqlite"

    @property
    def _unlisted(self) -> Path:
        """There while the index is made anew from the files."""
        return self.folder / "unlisted"

    @property
    def _log(self) -> Path:
        """There only while somebody writes, or did so when he was interrupted."""
        return self.folder / "index.sqlite-wal"

    def _open_index(self) -> None:
        self.index = Index(self._index, readonly=self.readonly)
        try:
            self._clock = itertools.count(1 + self._total("clock"))
            self._count, self.nbytes = self._total("blocks"), self._total("nbytes")
        except BaseException:
            self.index.close()
            raise

    def _make_folders(self) -> None:
        make_folder(self.folder)
        make_folder(self.files.folder, ours=True)
        sync_folder(self.folder)

    def _take_lock(self) -> None:
        # The system drops it with the process, however that ends. Any thread may close what another opened.
        lock = FileLock(self.folder / "lock", thread_local=False, mode=0o600)
        with explained(self.folder / "lock"):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise StoreLockedError(
                    f"the store {self.folder} is in use by {described(self.folder)}: close that one, choose "
                    "another store, or open this one for reading"
                ) from None
        self._lock = lock

    def _let_go(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _has_index(self) -> bool:
        return self._index.exists() and self._index.stat().st_size > 0

    def _mark_unlisted(self) -> None:
        """Note that there are files which the index does not list, yet are not to be deleted."""
        write_file(self._unlisted, [])
        sync_folder(self.folder)

    def _recover(self, interrupted: bool) -> None:
        """Put right what a crash, or the loss of the index, has left behind."""
        if self._unlisted.exists():
            self._walk(None)
            self.files.delete([self._unlisted])
            self.rebuilt = True
        elif interrupted:
            known = {row[0] for row in self.index.rows("SELECT id FROM block")}
            for path in self.files.files():
                ours = NAME.fullmatch(path.name) and bytes.fromhex(path.name) not in known
                if ours or path.name.endswith(TEMPORARY):
                    with suppress(OSError):
                        path.unlink(missing_ok=True)

    def _set_index_aside(self) -> None:
        self._mark_unlisted()
        with explained(self._index):
            make_folder(self.files.quarantined, ours=True)
            for path in (self._index, self._log, self.folder / "index.sqlite-shm"):
                if path.exists():
                    os.replace(path, self.files.quarantined / path.name)
        self.rebuilt = True

    # Inside.

    def _check_writable(self) -> None:
        if self.readonly:
            raise StoreReadOnlyError(f"the store {self.folder} was opened for reading")

    def _total(self, name: str) -> int:
        """A running total of the index. It changes with what it counts, in one transaction."""
        found = self.index.rows("SELECT value FROM total WHERE name = ?", name)
        return _number(found[0][0]) if found else 0

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction that changes blocks, and the totals with them."""
        before = self._count, self.nbytes
        try:
            with self.index.writing():
                yield
                for name, value in (
                    ("blocks", self._count),
                    ("nbytes", self.nbytes),
                    ("clock", next(self._clock)),
                ):
                    self.index.run("INSERT OR REPLACE INTO total VALUES (?, ?)", name, value)
        except BaseException:
            self._count, self.nbytes = before
            raise

    def _enter(self, block: Block | IndexEntry, size: int, used: int) -> None:
        before = self.index.rows("SELECT nbytes FROM block WHERE id = ?", block.id)
        self._count += not before
        self.nbytes += size - (_number(before[0][0]) if before else 0)
        self.index.run(
            "INSERT OR REPLACE INTO block VALUES (?, ?, ?, ?, ?, ?, ?,"
            " NOT EXISTS (SELECT 1 FROM block WHERE parent = ?))",
            block.id,
            block.parent,
            block.start,
            block.tokens.astype("<i4").tobytes(),
            block.has_tail_state,
            size,
            used,
            block.id,
        )
        self.index.run("UPDATE block SET leaf = 0 WHERE id = ? AND leaf = 1", block.parent)

    def _unlist(self, block: BlockId) -> None:
        found = self.index.rows("SELECT parent, nbytes FROM block WHERE id = ?", block)
        for parent, nbytes in found:
            self.index.run("DELETE FROM block WHERE id = ?", block)
            self.index.run(
                "UPDATE block SET leaf = 1 WHERE id = ? AND NOT EXISTS"
                " (SELECT 1 FROM block WHERE parent = ?)",
                parent,
                parent,
            )
            self._count -= 1
            self.nbytes -= _number(nbytes)

    def _flush_touches(self) -> None:
        # Others go on adding to it meanwhile: taken out one by one, none is lost.
        while self._touched:
            block, used = self._touched.popitem()
            self.index.run("UPDATE block SET used = ? WHERE id = ?", used, block)

    def _rooted(self, blocks: Sequence[Block]) -> list[Block]:
        """Those whose parent is there, or comes before them."""
        coming: set[BlockId] = set()
        rooted = []
        for block in blocks:
            if not block.start or block.parent in coming or self.lookup(block.parent) is not None:
                coming.add(block.id)
                rooted.append(block)
        return rooted

    def _make_room(self, blocks: Sequence[Block]) -> list[Block]:
        """The blocks, from the first on, for which there is room once old leaves are gone."""
        needed, ends = 0, []
        for block in blocks:
            known = self.lookup(block.id)
            needed += block_file.size(block) - (known.nbytes if known else 0)
            ends.append(needed)
        if not blocks or self.nbytes + max(ends) <= self.budget:
            return list(blocks)
        spared = {block.parent for block in blocks} | {block.id for block in blocks}
        victims: list[BlockId] = []
        count = 0
        with self._writing():
            # Who was read lately must be known before somebody is chosen.
            self._flush_touches()
            for block, end in zip(blocks, ends, strict=True):
                while block_file.size(block) <= self.budget < self.nbytes + end:
                    leaf = self._oldest_leaf(spared)
                    if leaf is None:
                        break
                    victims.append(leaf)
                    self._unlist(leaf)
                if self.nbytes + end > self.budget:
                    break
                count += 1
        for name in victims:
            with explained(self.files.path(name)):
                self.files.path(name).unlink(missing_ok=True)
        return list(blocks[:count])

    def _oldest_leaf(self, spared: set[BlockId]) -> BlockId | None:
        limit = 1
        while True:
            leaves = self.index.rows("SELECT id FROM block WHERE leaf = 1 ORDER BY used LIMIT ?", limit)
            free = (
                BlockId(name) for (name,) in leaves if name not in spared and not self.pinned(BlockId(name))
            )
            found = next(free, None)
            if found is not None or len(leaves) < limit:
                return found
            limit *= 2

    def _walk(self, progress: Callable[[int, int], None] | None) -> Findings:
        known: dict[Any, tuple[Any, ...]] = {row[0]: row for row in self.index.rows(SELECT)}
        there: dict[BlockId, IndexEntry] = {}
        quarantined = leftovers = 0
        files = sorted(self.files.files())
        for number, path in enumerate(files, 1):
            if path.name.endswith(TEMPORARY):
                with explained(path):
                    path.unlink(missing_ok=True)
                leftovers += 1
            elif (entry := self.files.inspect(path)) is not None:
                there[entry.id] = entry
            else:
                self.files.quarantine(path)
                quarantined += 1
            if progress is not None:
                progress(number, len(files))
        missing = [name for name in known if name not in there]
        new = [entry for name, entry in there.items() if name not in known]
        wrong = [entry for name, entry in there.items() if name in known and known[name] != row_of(entry)]
        with self._writing():
            for name in missing:
                self.index.run("DELETE FROM block WHERE id = ?", name)
            for entry in [*new, *wrong]:
                self._enter(entry, entry.nbytes, 0)
            self.index.run("UPDATE block SET leaf = id NOT IN (SELECT parent FROM block)")
            self._count, self.nbytes = len(there), sum(entry.nbytes for entry in there.values())
        rebuilt, self.rebuilt = self.rebuilt, False
        return Findings(
            blocks=len(there),
            nbytes=self.nbytes,
            missing=len(missing),
            adopted=len(new),
            mended=len(wrong),
            quarantined=quarantined,
            leftovers=leftovers,
            rebuilt=rebuilt,
        )


def _number(value: Any) -> int:
    """A number of the index. SQLite has no checksums: what is none counts for nothing until it is mended."""
    return value if isinstance(value, int) else 0


__all__ = ["DiskTier", "Findings", "IndexEntry"]
