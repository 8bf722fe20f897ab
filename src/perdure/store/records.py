"""Labelled prefixes, kept with the blocks that they name."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import BlockId
from perdure.cache.record import Record, RecordIndex, doomed
from perdure.cache.reuse_rule import ANY_TOKEN
from perdure.cache.siblings import beginnings, continuations
from perdure.errors import InvalidInputError
from perdure.store.disk import DiskTier, IndexEntry
from perdure.store.writer import WriteBehind


class Records:
    """The records of a store. A record's labels live and go with it.

    How much of a prefix is kept is not written down but looked up: blocks come and go without it.
    """

    def __init__(self, disk: DiskTier, *, behind: WriteBehind | None = None) -> None:
        """`behind` is who writes the blocks to `disk`, if somebody does."""
        self._disk = disk
        self._behind = behind

    def __len__(self) -> int:
        [(count,)] = self._disk.index.rows("SELECT count(*) FROM record")
        return int(count)

    def all(self) -> list[Record]:
        return [record for _, record in self.page()]

    def page(self, *, limit: int | None = None, after: int = 0) -> list[tuple[int, Record]]:
        """Records with their numbers, the oldest first: up to `limit`, behind number `after`."""
        rows = self._disk.index.rows(
            "SELECT number, namespace, tokens, root FROM record WHERE number > ? ORDER BY number LIMIT ?",
            after,
            -1 if limit is None else limit,
        )
        labels: dict[int, set[str]] = {}
        if rows:
            # The labels of these and no others.
            for number, name in self._disk.index.rows(
                "SELECT record, name FROM label WHERE record BETWEEN ? AND ?", rows[0][0], rows[-1][0]
            ):
                labels.setdefault(number, set()).add(str(name))
        found = []
        for number, namespace, tokens, root in rows:
            # SQLite has no checksums: what cannot be a record is not one.
            if not isinstance(tokens, bytes) or not isinstance(root, bytes) or len(tokens) % 4:
                continue
            ids = np.frombuffer(tokens, "<i4").astype(np.int32)
            record = Record(
                tokens=tuple(ids.tolist()),
                kept=_kept(self._path(BlockId(root), ids), len(ids)),
                labels=frozenset(labels.get(number, ())),
                namespace=str(namespace),
                root=BlockId(root),
            )
            found.append((number, record))
        return found

    def flush(self) -> None:
        """Return when all that was stored is on the disk; raise where it could not be put there."""
        if self._behind is not None:
            self._behind.flush()
            if self._behind.error is not None:
                raise self._behind.error

    def store(self, record: Record) -> None:
        """Make a record durable, after its blocks."""
        if self._behind is not None:
            self._behind.flush()
            kept = _kept(self._path(record.root, record.ids), len(record.tokens))
            if kept < record.kept and self._behind.error is not None:
                raise self._behind.error
        index = self._disk.index
        key = (record.root, _packed(record))
        try:
            with index.writing():
                index.run(
                    "INSERT OR IGNORE INTO record (root, tokens, namespace) VALUES (?, ?, ?)",
                    *key,
                    record.namespace,
                )
                [(number,)] = index.rows("SELECT number FROM record WHERE root = ? AND tokens = ?", *key)
                for name in record.labels:
                    index.run("INSERT OR IGNORE INTO label VALUES (?, ?)", number, name)
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"a label must be valid Unicode text: {error}") from None

    def drop(self, records: Iterable[Record], blocks: Iterable[BlockId]) -> None:
        """Drop records and blocks, with all that follow those, in one transaction."""
        if self._behind is not None:
            self._behind.flush()
        gone = list(records)

        def unlist() -> None:
            for record in gone:
                self._disk.index.run(
                    "DELETE FROM record WHERE root = ? AND tokens = ?", record.root, _packed(record)
                )

        self._disk.drop(blocks, then=unlist)

    def clear(self, labels: Iterable[str], *, namespace: str = "") -> int:
        """Drop the records of a namespace that carry one of `labels`, with the blocks that only they need and
        all that follow those. How many."""
        wanted = frozenset(labels)
        needs = RecordIndex(self.all())
        gone = needs.of(wanted, namespace)
        for record in gone:
            needs.remove(record)
        self.drop(gone, doomed(self._disk, gone, needs, ANY_TOKEN).drop)
        return len(gone)

    def _path(self, root: BlockId, tokens: NDArray[np.int32]) -> list[IndexEntry]:
        """The blocks that hold nothing but a beginning of `tokens`, and those that run on from its end."""
        path: list[IndexEntry] = []
        level = [(root, 0)]
        while level:
            parent, at = level.pop()
            for entry in beginnings(self._disk, parent, tokens[at:-1]):
                path.append(entry)
                level.append((entry.id, at + len(entry.tokens)))
            path += continuations(self._disk, parent, tokens[at:])
        return path


def _kept(path: list[IndexEntry], length: int) -> int:
    """How much of a prefix can be put back. Where a state has a tail, only to the end of a block with it."""
    if any(entry.has_tail_state for entry in path):
        path = [entry for entry in path if entry.has_tail_state and entry.end <= length]
    return max((min(entry.end, length) for entry in path), default=0)


def _packed(record: Record) -> bytes:
    return np.array(record.tokens, "<i4").tobytes()
