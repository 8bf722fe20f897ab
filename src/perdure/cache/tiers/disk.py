"""Disk tier: blocks in a folder, listed in an index, crash-safe."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path

from filelock import FileLock, Timeout

from perdure.atomic import TEMPORARY, make_folder, sync_folder, translate_os_errors, write_file
from perdure.cache.block import Block, BlockId, BlockMeta
from perdure.cache.tiers.base import BlockTier
from perdure.cache.tiers.block_folder import NAME, BlockFolder
from perdure.cache.tiers.block_index import BlockTable, PrefixTable
from perdure.cache.tiers.codec import MARK, Encryption, codec_of
from perdure.cache.tiers.shares import Shares
from perdure.decode.request import KeptPrefix
from perdure.errors import (
    StoreDamagedError,
    StoreError,
    StoreLockedError,
    StoreReadOnlyError,
)
from perdure.store.index import Index
from perdure.store.owner import described

log = logging.getLogger("perdure.store")


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a walk over everything found, and did about it."""

    blocks: int
    nbytes: int
    missing: int
    """Entries without a whole file, dropped."""
    adopted: int
    """Whole files without an entry, entered."""
    mended: int
    """Entries that said something else than their files, put right."""
    quarantined: int
    """Damaged files, moved aside."""
    leftovers: int
    """Temporary files of writers that are gone, deleted."""
    rebuilt: bool
    """Whether the index could not be used, and was made anew from the files."""

    def __add__(self, other: Findings) -> Findings:
        """What was found in two folders."""
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return Findings(**{**sums, "rebuilt": self.rebuilt or other.rebuilt})

    @property
    def sound(self) -> bool:
        return not (self.missing or self.quarantined or self.mended or self.rebuilt)


class DiskTier(BlockTier):
    """Blocks in a folder, within a byte budget. For any thread.

    Always holds: an entry is committed only after its file and the file's name are on the disk, and its
    file goes only after the entry is gone. So a crash leaves at worst files without entries, which are
    deleted when the store is next opened for writing. A block is entered only after the one before it.
    Leaves of the least worth go first, and of a namespace within its share only for its own blocks.
    """

    name = "disk"
    keeps_prefixes = True

    def __init__(
        self,
        folder: Path,
        *,
        budget: int,
        readonly: bool = False,
        rebuild: bool = False,
        encryption: Encryption | None = None,
    ) -> None:
        """With `rebuild`, an index that cannot be read is made anew from the files. With `encryption` what is
        written is encrypted, and what was plain is so before it is read."""
        super().__init__()
        self.folder = folder
        self.budget = budget
        self.readonly = readonly
        self._lock: FileLock | None = None
        self._changing = threading.RLock()
        self._uncertain: set[BlockId] = set()
        """Blocks with a file whose entry may be there or not: a transaction whose sync failed can be in the
        log all the same, until another one takes its place there or the log is gone."""
        self.rebuilt = False
        with ExitStack() as undo:
            if not readonly:
                if encryption is not None:
                    encryption.prepare(folder, rebuild=rebuild)
                self._lock = lock_folder(folder)
                undo.callback(self._lock.release)
            self.files = BlockFolder(folder, codec_of(folder, encryption))
            interrupted = self._log.exists()
            if not readonly and not _is_filled(self._index) and self._has_files():
                self._set_index_aside()
            try:
                self._open_index()
            except StoreDamagedError:
                if readonly or not rebuild:
                    raise
                self._set_index_aside()
                self._open_index()
            undo.callback(self.index.close)
            if self._unlisted.exists() and not readonly:
                self._rebuild(None)
                # The next `verify` reports it.
                self.rebuilt = True
            elif interrupted and not readonly:
                self._delete_leftovers()
            undo.pop_all()

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    # Reading.

    def lookup(self, block: BlockId) -> BlockMeta | None:
        return self.table.lookup(block)

    def page(self, *, limit: int | None = None, after: str | None = None) -> list[BlockMeta]:
        """Blocks by their ids: up to `limit`, behind the one with the id `after`."""
        return self.table.page(limit=limit, after=after)

    def children(self, parent: BlockId, *, start: bytes = b"", back: bool = False) -> Iterator[BlockMeta]:
        """The blocks that follow `parent`, by their tokens' bytes: from `start` on, or back from it."""
        return self.table.children(parent, start=start, back=back)

    def load(self, block: BlockId) -> Block | None:
        """A block from its file, all of it verified; None where it is missing or damaged."""
        try:
            loaded = self.files.read(self.files.path(block))
        except StoreError:
            return None
        if loaded is not None:
            self.table.touch(block)
        return loaded

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
            except BaseException:
                self._delete_files(new - self._uncertain)
                raise
            self.written += sum(self.files.size(block) for block in fitting)
            self._uncertain |= new
            with self.table.writing():
                self.table.flush_touches()
                for block in fitting:
                    self.table.add(block, self.files.size(block))
            self._delete_files(self._without_entry())
            return len(fitting)

    def _without_entry(self) -> list[BlockId]:
        """The blocks of transactions that failed whose files nobody would count."""
        names = [name for name in self._uncertain if self.lookup(name) is None]
        self._uncertain.clear()
        return names

    def _delete_files(self, names: Iterable[BlockId]) -> None:
        for name in names:
            with suppress(OSError):
                self.files.path(name).unlink(missing_ok=True)

    def drop(self, blocks: Iterable[BlockId], prefixes: Iterable[KeptPrefix] = ()) -> None:
        """Forget blocks with all that follow them, and kept prefixes, in one transaction."""
        left = list(blocks)
        with self._changing:
            dropped: list[BlockId] = []
            with self.table.writing():
                while left:
                    block = left.pop()
                    left += self.table.child_ids(block)
                    self.table.remove(block)
                    dropped.append(block)
                for prefix in prefixes:
                    self.prefix_table.remove(prefix)
            self.files.delete(
                itertools.chain.from_iterable(
                    (path, self.files.quarantined / path.name) for path in map(self.files.path, dropped)
                )
            )

    def revalue(self, blocks: Iterable[BlockId]) -> None:
        if not self.readonly:
            for block in blocks:
                self.table.touch(block)

    def clear(self) -> None:
        """Forget every block, and whatever else lies about."""
        with self._changing:
            with self.table.writing():
                self.table.clear()
            self.files.delete([*self.files.files(), *self.files.quarantined.glob("*")])

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Let go of blocks that are damaged or gone, and of those behind them that are so too.

        Whole ones behind them stay: they are of use again once the gap is closed.
        """
        self._check_writable()
        with self._changing:
            suspects, damaged = list(blocks), []
            for name in suspects:
                suspects += [child.id for child in self.children(name)]
                if self.files.read(self.files.path(name)) is None:
                    damaged.append(name)
            if not damaged:
                return
            with self.table.writing():
                for name in damaged:
                    self.table.remove(name)
            for name in damaged:
                self.files.quarantine(self.files.path(name))

    # Kept prefixes.

    def keep(self, prefix: KeptPrefix) -> None:
        self.prefix_table.add(prefix)

    def kept_length(self, prefix: KeptPrefix) -> int:
        return self.prefix_table.kept_length(BlockId(prefix.root), prefix.ids)

    def prefixes(self) -> list[KeptPrefix]:
        return self.prefix_table.all()

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
                self.rebuilt = True
                return self._rebuild(progress)

    def close(self) -> None:
        if not self.readonly and self.table.has_touched:
            with suppress(StoreError), self.table.writing():
                self.table.flush_touches()
        unlisted: list[BlockId] = []
        with suppress(StoreError):
            unlisted = self._without_entry()
        self.index.close()
        if not self._log.exists():
            # Otherwise the next process that opens the store deletes the files without an entry.
            self._delete_files(unlisted)
        if self._lock is not None:
            self._lock.release()

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
        """There only during a write, or after one was interrupted."""
        return self.folder / "index.sqlite-wal"

    def _open_index(self) -> None:
        self.index = Index(self._index, readonly=self.readonly)
        try:
            self.table = BlockTable(self.index, self.name, self.files.codec)
            self.table.worth = lambda block, clock: self.eviction.worth(block, clock, self.budget)
            self.prefix_table = PrefixTable(self.index, self.table, self.files.codec)
        except BaseException:
            self.index.close()
            raise

    def _has_files(self) -> bool:
        return next(self.files.files(), None) is not None

    def _set_index_aside(self) -> None:
        """Move what is left of an index aside, once it is noted that there are files which the next one does
        not list, yet are not to be deleted."""
        write_file(self._unlisted, [])
        sync_folder(self.folder)
        with translate_os_errors(self._index):
            for path in (self._index, self._log, self.folder / "index.sqlite-shm"):
                if path.exists():
                    make_folder(self.files.quarantined, ours=True)
                    os.replace(path, self.files.quarantined / path.name)

    def _rebuild(self, progress: Callable[[int, int], None] | None) -> Findings:
        """List what the files say in a new index."""
        findings = self._walk(progress)
        self.files.delete([self._unlisted])
        return findings

    def _delete_leftovers(self) -> None:
        """Delete what a writer left that was interrupted: files without an entry, and those half written."""
        known = self.table.names()
        for path in self.files.files():
            ours = NAME.fullmatch(path.name) and bytes.fromhex(path.name) not in known
            if ours or path.name.endswith(TEMPORARY):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    # Inside.

    def _check_writable(self) -> None:
        if self.readonly:
            raise StoreReadOnlyError(f"the store {self.folder} was opened for reading")

    def _rooted(self, blocks: Sequence[Block]) -> list[Block]:
        """Those whose parent is there, or comes before them."""
        rooted: dict[BlockId, Block] = {}
        for block in blocks:
            if not block.start or block.parent in rooted or self.lookup(block.parent) is not None:
                rooted[block.id] = block
        return list(rooted.values())

    def _make_room(self, blocks: Sequence[Block]) -> list[Block]:
        """The blocks, from the first on, for which there is room once old leaves are gone."""
        needed, ends = 0, []
        for block in blocks:
            known = self.lookup(block.id)
            needed += self.files.size(block) - (known.nbytes if known else 0)
            ends.append(needed)
        if not blocks or self.nbytes + max(ends) <= self.budget:
            return list(blocks)
        own = {block.parent for block in blocks} | {block.id for block in blocks}
        victims: list[BlockId] = []
        count = 0

        def is_spared(block: BlockId) -> bool:
            return block in own or self.pinned(block)

        with self.table.writing():
            # The latest reads must be known before a block is chosen.
            self.table.flush_touches()
            several = self.table.has_several_chains(blocks)
            shares = Shares(self.table, self.eviction, self.budget) if several else None
            for block, end in zip(blocks, ends, strict=True):
                if shares is not None:
                    shares.wants(block, self.files.size(block))
                while self.files.size(block) <= self.budget < self.nbytes + end:
                    leaf = (
                        self.table.least_worth(is_spared)
                        if shares is None
                        else shares.victim(block, is_spared)
                    )
                    if leaf is None or not self.eviction.may_evict(block.id, leaf[1]):
                        break
                    victims.append(leaf[0])
                    self.table.remove(leaf[0])
                if self.nbytes + end > self.budget:
                    break
                count += 1
        for name in victims:
            with translate_os_errors(self.files.path(name)):
                self.files.path(name).unlink(missing_ok=True)
        return list(blocks[:count])

    def _walk(self, progress: Callable[[int, int], None] | None) -> Findings:
        known = self.table.rows()
        there: dict[BlockId, BlockMeta] = {}
        quarantined = leftovers = 0
        files = sorted(self.files.files())
        for number, path in enumerate(files, 1):
            if path.name.endswith(TEMPORARY):
                with translate_os_errors(path):
                    path.unlink(missing_ok=True)
                leftovers += 1
            elif (meta := self.files.inspect(whole := self.files.encode_plain(path), self.name)) is not None:
                there[meta.id] = meta
            else:
                self.files.quarantine(whole)
                quarantined += 1
            if progress is not None:
                progress(number, len(files))
        adopted, missing, mended = self.table.correct(known, there)
        rebuilt, self.rebuilt = self.rebuilt, False
        return Findings(
            blocks=len(there),
            nbytes=self.nbytes,
            missing=missing,
            adopted=adopted,
            mended=mended,
            quarantined=quarantined,
            leftovers=leftovers,
            rebuilt=rebuilt,
        )


def _is_filled(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def lock_folder(folder: Path) -> FileLock:
    """Make a folder for blocks where there is none, and lock it for one writer."""
    make_folder(folder)
    make_folder(BlockFolder(folder).folder, ours=True)
    sync_folder(folder)
    # The system drops it with the process, however that ends. Any thread may close what another opened.
    lock = FileLock(folder / "lock", thread_local=False, mode=0o600)
    with translate_os_errors(folder / "lock"):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StoreLockedError(
                f"the store {folder} is in use by {described(folder)}: close that one, choose "
                "another store, or open this one for reading"
            ) from None
    return lock


def delete_encrypted(folder: Path) -> int:
    """Delete all blocks of an encrypted folder, without its key; how many bytes they had."""
    files = BlockFolder(folder)
    lock = lock_folder(folder)
    try:
        paths = [*files.files(), *files.quarantined.glob("*")]
        with translate_os_errors(folder):
            nbytes = sum(path.stat().st_size for path in paths)
        index = folder / "index.sqlite"
        files.delete([*paths, index, *(index.with_name(index.name + each) for each in ("-wal", "-shm"))])
        # Last: a folder that is half deleted is still an encrypted one.
        files.delete([folder / MARK])
    finally:
        lock.release()
    return nbytes
