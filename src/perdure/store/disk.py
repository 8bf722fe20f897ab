"""The tier of the block cache on disk."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from perdure.cache.block import Block, BlockId
from perdure.errors import CorruptStateError, StoreDamagedError, StoreLockedError, StoreReadOnlyError
from perdure.store import block_file
from perdure.store.durable import TEMPORARY, explained, sync_folder, write_file
from perdure.store.index import Index


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index says of a block; its state is still on the disk."""

    id: BlockId
    parent: BlockId
    start: int
    tokens: NDArray[np.int32]
    has_rest: bool
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a walk over everything found, and did about it."""

    blocks: int
    nbytes: int
    missing: int
    """Entries without a file, dropped."""
    adopted: int
    """Whole files without an entry, entered."""
    quarantined: int
    """Damaged files, moved aside."""
    leftovers: int
    """Temporary files of writers that are gone, deleted."""

    @property
    def sound(self) -> bool:
        return not (self.missing or self.quarantined)


class DiskTier:
    """Blocks in a folder, within a byte budget.

    Always holds: an entry is committed only after its file and the file's name are on the disk, and its
    file goes only after the entry is gone. So a crash leaves at worst a file without an entry.
    """

    name = "disk"

    def __init__(self, folder: Path, *, budget: int, readonly: bool = False) -> None:
        self.folder = folder
        self.budget = budget
        self.readonly = readonly
        self._blocks = folder / "blocks"
        self._lock: FileLock | None = None
        if not readonly:
            self._make_folders()
            self._take_lock()
        try:
            self.index = Index(folder / "index.sqlite", readonly=readonly)
        except BaseException:
            self._let_go()
            raise
        self._clock = int(self.index.rows("SELECT coalesce(max(used), 0) FROM block")[0][0])
        self._touched: dict[BlockId, int] = {}
        self.nbytes = int(self.index.rows("SELECT coalesce(sum(nbytes), 0) FROM block")[0][0])

    def __len__(self) -> int:
        return int(self.index.rows("SELECT count(*) FROM block")[0][0])

    # Reading.

    def entry(self, block: BlockId) -> Entry | None:
        found = self.index.rows(f"{_SELECT} WHERE id = ?", block)
        return _entry(found[0]) if found else None

    def ancestry(self, block: BlockId) -> Iterator[BlockId]:
        """`block` and the blocks before it, as far as they are kept, the last first."""
        while (found := self.entry(block)) is not None:
            yield block
            block = found.parent

    def children(self, parent: BlockId) -> Iterator[Entry]:
        for row in self.index.rows(f"{_SELECT} WHERE parent = ?", parent):
            yield _entry(row)

    def get(self, block: BlockId) -> Block | None:
        """A block from its file, all of it verified; None where it is missing or damaged."""
        try:
            data = self._path(block).read_bytes()
            found = block_file.unpack(data, block)
        except (OSError, CorruptStateError):
            return None
        self._clock += 1
        self._touched[block] = self._clock
        return found

    # Writing.

    def put(self, blocks: Sequence[Block]) -> int:
        """Make blocks durable, parents before children; how many are now kept.

        When this returns they are on the disk. Those that no longer fit the budget are left out.
        """
        if self.readonly:
            raise StoreReadOnlyError(f"the store {self.folder} was opened for reading")
        fitting = self._make_room(blocks)
        folders = set()
        sizes: dict[BlockId, int] = {}
        for block in fitting:
            path = self._path(block.id)
            parts = block_file.pack(block)
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                folders.add(self._blocks)
            write_file(path, parts)
            sizes[block.id] = sum(len(part) for part in parts)
            folders.add(path.parent)
        for folder in sorted(folders):
            sync_folder(folder)
        with self.index.writing():
            self._flush_touches()
            for block in fitting:
                self._clock += 1
                self._enter(block, sizes[block.id], self._clock)
        self.nbytes = int(self.index.rows("SELECT coalesce(sum(nbytes), 0) FROM block")[0][0])
        return len(fitting)

    def drop(self, blocks: Iterable[BlockId]) -> None:
        """Forget blocks and all that follow them."""
        doomed = list(blocks)
        gone: list[BlockId] = []
        with self.index.writing():
            while doomed:
                block = doomed.pop()
                doomed += [row[0] for row in self.index.rows("SELECT id FROM block WHERE parent = ?", block)]
                self.index.run("DELETE FROM block WHERE id = ?", block)
                gone.append(block)
        for block in gone:
            self._path(block).unlink(missing_ok=True)
        self.nbytes = int(self.index.rows("SELECT coalesce(sum(nbytes), 0) FROM block")[0][0])

    def clear(self) -> None:
        self.drop([BlockId(row[0]) for row in self.index.rows("SELECT id FROM block WHERE start = 0")])

    # Upkeep.

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Findings:
        """Walk everything: drop entries without files, enter whole files, move damaged ones aside."""
        if self.readonly:
            raise StoreReadOnlyError(f"the store {self.folder} was opened for reading")
        leftovers = self._delete_leftovers()
        known = {BlockId(row[0]) for row in self.index.rows("SELECT id FROM block")}
        files = sorted(self._blocks.glob("*/*"))
        there: dict[BlockId, tuple[Block, int]] = {}
        quarantined = 0
        for number, path in enumerate(files):
            try:
                block = block_file.unpack(path.read_bytes(), BlockId(bytes.fromhex(path.name)))
            except (CorruptStateError, ValueError):
                self._quarantine(path)
                quarantined += 1
            else:
                # The state itself is not kept here: a store may be larger than memory.
                bare = Block(block.id, block.parent, block.start, block.tokens, None, block.rest, b"")
                there[block.id] = (bare, path.stat().st_size)
            if progress is not None:
                progress(number + 1, len(files))
        missing = known - set(there)
        adopted = 0
        with self.index.writing():
            for name in missing:
                self.index.run("DELETE FROM block WHERE id = ?", name)
            for name, (block, size) in there.items():
                if name not in known:
                    self._enter(block, size, 0)
                    adopted += 1
        self.nbytes = int(self.index.rows("SELECT coalesce(sum(nbytes), 0) FROM block")[0][0])
        return Findings(
            blocks=len(there),
            nbytes=self.nbytes,
            missing=len(missing),
            adopted=adopted,
            quarantined=quarantined,
            leftovers=leftovers,
        )

    def close(self) -> None:
        if not self.readonly and self._touched:
            with contextlib.suppress(Exception), self.index.writing():
                self._flush_touches()
        self.index.close()
        self._let_go()

    # Inside.

    def _make_folders(self) -> None:
        try:
            self._blocks.mkdir(parents=True, exist_ok=True)
            sync_folder(self.folder)
        except OSError as error:
            raise explained(error, self.folder, 0) from error

    def _take_lock(self) -> None:
        # The system drops it with the process, however that ends.
        lock = FileLock(self.folder / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StoreLockedError(
                f"another process writes to {self.folder}: close it, or open the store for reading"
            ) from None
        except OSError as error:
            raise explained(error, self.folder / "lock", 0) from error
        self._lock = lock

    def _let_go(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _path(self, block: BlockId) -> Path:
        name = block.hex()
        return self._blocks / name[:2] / name

    def _enter(self, block: Block, size: int, used: int) -> None:
        self.index.run(
            "INSERT OR REPLACE INTO block VALUES (?, ?, ?, ?, ?, ?, ?)",
            block.id,
            block.parent,
            block.start,
            block.tokens.astype("<i4").tobytes(),
            block.rest is not None,
            size,
            used,
        )

    def _flush_touches(self) -> None:
        for block, used in self._touched.items():
            self.index.run("UPDATE block SET used = ? WHERE id = ?", used, block)
        self._touched.clear()

    def _make_room(self, blocks: Sequence[Block]) -> list[Block]:
        """The blocks, from the first on, for which there is room once old leaves are gone."""
        spared = {block.parent for block in blocks} | {block.id for block in blocks}
        fitting: list[Block] = []
        needed = 0
        for block in blocks:
            size = block.nbytes
            while self.nbytes + needed + size > self.budget:
                if not self._evict_one(spared):
                    return fitting
            needed += size
            fitting.append(block)
        return fitting

    def _evict_one(self, spared: set[BlockId]) -> bool:
        leaves = self.index.rows(
            "SELECT id FROM block AS b WHERE NOT EXISTS (SELECT 1 FROM block WHERE parent = b.id)"
            " ORDER BY used LIMIT ?",
            len(spared) + 1,
        )
        for (name,) in leaves:
            if BlockId(name) not in spared:
                self.drop([BlockId(name)])
                return True
        return False

    def _delete_leftovers(self) -> int:
        count = 0
        for path in self._blocks.glob(f"*/*{TEMPORARY}"):
            path.unlink(missing_ok=True)
            count += 1
        return count

    def _quarantine(self, path: Path) -> None:
        aside = self.folder / "quarantine"
        aside.mkdir(exist_ok=True)
        shutil.move(path, aside / path.name)


_SELECT = "SELECT id, parent, start, tokens, has_rest, nbytes FROM block"


def _entry(row: tuple[bytes, bytes, int, bytes, int, int]) -> Entry:
    name, parent, start, tokens, has_rest, nbytes = row
    ids = np.frombuffer(tokens, "<i4").astype(np.int32)
    return Entry(BlockId(name), BlockId(parent), start, ids, bool(has_rest), nbytes)


def rebuild(folder: Path) -> None:
    """Set a damaged index aside, so that the next `verify` enters every whole file anew."""
    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
        path = folder / name
        if path.exists():
            aside = folder / "quarantine"
            aside.mkdir(exist_ok=True)
            os.replace(path, aside / name)


__all__ = ["DiskTier", "Entry", "Findings", "StoreDamagedError", "rebuild"]
