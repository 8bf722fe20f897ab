"""Labelled prefixes, kept with the blocks that they name."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from perdure.cache.block import BlockId
from perdure.cache.book import Record
from perdure.store.disk import DiskTier


class Records:
    """The records of a store. A record's labels live and go with it."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self._index = disk.index

    def all(self) -> list[Record]:
        labels: dict[int, set[str]] = {}
        for number, name in self._index.rows("SELECT record, name FROM label"):
            labels.setdefault(number, set()).add(name)
        return [
            Record(
                tokens=tuple(np.frombuffer(tokens, "<i4").tolist()),
                kept=kept,
                labels=frozenset(labels.get(number, ())),
                namespace=namespace,
                leaf=BlockId(leaf),
            )
            for number, namespace, tokens, kept, leaf in self._index.rows(
                "SELECT number, namespace, tokens, kept, leaf FROM record ORDER BY number"
            )
        ]

    def put(self, record: Record) -> None:
        key = (record.namespace, _packed(record))
        with self._index.writing():
            self._index.run(
                "INSERT INTO record (namespace, tokens, kept, leaf) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (namespace, tokens) DO UPDATE SET kept = excluded.kept, leaf = excluded.leaf",
                *key,
                record.kept,
                record.leaf,
            )
            [(number,)] = self._index.rows(
                "SELECT number FROM record WHERE namespace = ? AND tokens = ?", *key
            )
            for name in record.labels:
                self._index.run("INSERT OR IGNORE INTO label VALUES (?, ?)", number, name)

    def remove(self, records: Iterable[Record]) -> None:
        with self._index.writing():
            for record in records:
                self._index.run(
                    "DELETE FROM record WHERE namespace = ? AND tokens = ?", record.namespace, _packed(record)
                )

    def clear(self, labels: Iterable[str]) -> int:
        """Drop the records that carry one of `labels`, with the blocks that only they need. How many."""
        wanted = set(labels)
        every = self.all()
        gone = [record for record in every if wanted & record.labels]
        needed = {
            block for record in every if record not in gone for block in self._disk.ancestry(record.leaf)
        }
        self.remove(gone)
        for record in gone:
            for block in self._disk.ancestry(record.leaf):
                if block in needed or any(child.id in needed for child in self._disk.children(block)):
                    break
                self._disk.drop([block])
        return len(gone)


def _packed(record: Record) -> bytes:
    return np.array(record.tokens, "<i4").tobytes()
