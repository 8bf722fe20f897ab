"""Labelled prefixes, found by namespace, label and beginning, within a budget of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import BLOCK, BlockId, Entry, block_id
from perdure.cache.reuse_rule import ReuseRule
from perdure.cache.siblings import SortedKeys, Source, beginnings, common, continuations, key_of
from perdure.errors import InvalidInputError, StoreFullError

Ids = NDArray[np.int32]

RECORDS = 10_000
"""Records of one namespace, at most."""
RECORD_BYTES = 64 << 20
"""Memory for the records of all namespaces, at most."""
LABELS = 64
"""Labels of one record, at most, and each of so many characters:"""
LABEL_LENGTH = 256


def check_labels(labels: frozenset[str]) -> None:
    """Raise unless one record may carry all of `labels`."""
    if len(labels) > LABELS or any(len(label) > LABEL_LENGTH for label in labels):
        raise InvalidInputError(
            f"a prefix carries at most {LABELS} labels of {LABEL_LENGTH} characters, got {len(labels)} "
            f"of up to {max(map(len, labels))}"
        )
    for label in labels:
        try:
            label.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"a label must be valid Unicode text: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A prefix that was warmed: its tokens, how many of them are kept, and the labels it carries."""

    tokens: tuple[int, ...]
    kept: int
    labels: frozenset[str]
    namespace: str = ""
    root: BlockId
    """Where its chain of blocks starts: what its state depends on besides the tokens."""

    @property
    def id(self) -> str:
        """What tells it from others, also after a restart."""
        return block_id(self.root, self.ids).hex()

    @property
    def ids(self) -> Ids:
        return np.array(self.tokens, np.int32)

    @property
    def nbytes(self) -> int:
        """What keeping it in memory costs, about: a token is a number of Python's own."""
        return 1024 + 44 * len(self.tokens) + sum(64 + len(label) for label in self.labels)

    def carries(self, labels: frozenset[str] | None, namespace: str) -> bool:
        """Whether it is of that namespace and has one of `labels`, if there are any to have."""
        return self.namespace == namespace and (labels is None or bool(labels & self.labels))


class RecordIndex:
    """Records in memory, sorted by where their chain starts and by their tokens.

    Always holds: no namespace has more than its share, and all of them keep to one budget.
    """

    def __init__(
        self, records: Iterable[Record] = (), *, limit: int = RECORDS, budget: int = RECORD_BYTES
    ) -> None:
        self.nbytes = 0
        self._limit = limit
        self._budget = budget
        self._records: dict[str, SortedKeys[Record]] = {}
        """By namespace, in the order in which they came."""
        self._places: dict[str, bytes] = {}
        """Where each stands in that order, by its id."""
        self._last = 0
        self._keys: SortedKeys[Record] = SortedKeys()
        for record in records:
            self.put(record)

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, record: Record) -> Record | None:
        return self.find(record.root, record.ids)

    def find(self, root: BlockId, tokens: Ids) -> Record | None:
        return self._keys.get(root + key_of(tokens))

    def of(self, labels: frozenset[str] | None, namespace: str) -> list[Record]:
        """The records of a namespace, or those of them that carry one of `labels`."""
        return self.page(labels, namespace)

    def page(
        self,
        labels: frozenset[str] | None,
        namespace: str,
        *,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Record]:
        """Up to `limit` of them, those that came after the one whose id is `after`."""
        records: SortedKeys[Record] = self._records.get(namespace, SortedKeys())
        place = b"" if after is None else self._places.get(after, b"")
        if after is not None and records.get(place) is None:
            raise InvalidInputError(f"there is no record {after!r}, or none any more: list from the first on")
        fitting = (each for each in records.walk(place + b"\0") if each.carries(labels, namespace))
        return list(islice(fitting, limit))

    def all(self) -> list[Record]:
        return [record for each in self._records.values() for record in each.walk()]

    def check_room(self, tokens: int, namespace: str) -> None:
        """Raise unless one more record of this size may be kept."""
        held = len(self._records.get(namespace, ()))
        if held >= self._limit:
            raise StoreFullError(
                f"{held} warmed prefixes of this namespace are kept, {self._limit} may be: clear some first",
                needed=1,
            )
        needed = 1024 + 44 * tokens
        if self.nbytes + needed > self._budget:
            raise StoreFullError(
                f"warmed prefixes take {self.nbytes} bytes of memory, this one {needed} more, and "
                f"{self._budget} may be used: clear some by label",
                needed=needed,
            )

    def put(self, record: Record) -> None:
        self.remove(record)
        key = record.root + key_of(record.ids)
        self._keys.add(key, record)
        self._last += 1
        place = self._places[record.id] = self._last.to_bytes(8, "big")
        self._records.setdefault(record.namespace, SortedKeys()).add(place, record)
        self.nbytes += record.nbytes

    def remove(self, record: Record) -> None:
        key = record.root + key_of(record.ids)
        known = self._keys.get(key)
        if known is None:
            return
        self._keys.remove(key)
        self.nbytes -= known.nbytes
        records = self._records[known.namespace]
        records.remove(self._places.pop(known.id))
        if not len(records):
            del self._records[known.namespace]

    def clear(self) -> None:
        self._records, self._places, self._keys, self.nbytes = {}, {}, SortedKeys(), 0

    # Who needs what.

    def passes(self, root: BlockId, tokens: Ids) -> bool:
        """Whether a record starts with `tokens`, or is just them."""
        key = root + key_of(tokens)
        found = self._keys.at_or_after(key)
        return found is not None and found.startswith(key)

    def ends_within(self, root: BlockId, tokens: Ids, start: int) -> Iterable[int]:
        """The lengths above `start` and below all of `tokens` at which records end, the longest first."""
        data = root + key_of(tokens)
        for length in range(len(tokens) - 1, start, -1):
            if self._keys.get(data[: len(root) + 4 * length]) is not None:
                yield length

    def longest_beginning(self, root: BlockId, tokens: Ids) -> int:
        """The length of the longest record that `tokens` start with."""
        while len(tokens):
            key = self._keys.at_or_before(root + key_of(tokens))
            if key is None or not key.startswith(root):
                return 0
            theirs = np.frombuffer(key[len(root) :], "<i4").astype(np.int32)
            shared = common(theirs, tokens)
            if shared == len(theirs):
                return shared
            tokens = tokens[:shared]
        return 0


class Blocks(Source[Entry], Protocol):
    """Where blocks are found."""

    def lookup(self, block: BlockId) -> Entry | None: ...


@dataclass(frozen=True, slots=True)
class Doomed:
    """What goes with records: blocks, and the lengths that are still needed of some of those."""

    drop: tuple[BlockId, ...]
    shorten: tuple[tuple[Entry, int], ...]


def doomed(blocks: Blocks, gone: Sequence[Record], needs: RecordIndex, rule: ReuseRule) -> Doomed:
    """What goes on from the records `gone`, and what leads only there; what one of `needs` needs stays.

    Where blocks cannot be cut, one that runs on past a record is of no use to it.
    """
    drop: dict[BlockId, None] = {}
    met: dict[BlockId, tuple[Entry, int]] = {}
    for record in gone:
        tokens = record.ids
        level: list[tuple[BlockId, int]] = [(record.root, 0)]
        after: list[tuple[Entry, Ids]] = []
        while level:
            parent, at = level.pop()
            for entry in beginnings(blocks, parent, tokens[at : min(at + BLOCK, len(tokens) - 1)]):
                level.append((entry.id, at + len(entry.tokens)))
                if entry.id not in met:
                    met[entry.id] = (
                        entry,
                        _needed(blocks, record.root, entry, tokens[:at], needs, rule),
                    )
            if len(tokens) - at <= BLOCK:
                after += ((entry, tokens[:at]) for entry in continuations(blocks, parent, tokens[at:]))
        for entry, prefix in after:
            needed = _needed(blocks, record.root, entry, prefix, needs, rule)
            if needed:
                met[entry.id] = entry, needed
                so_far = np.concatenate([prefix, entry.tokens])
                after += ((child, so_far) for child in blocks.children(entry.id))
            else:
                drop[entry.id] = None
    shorten = []
    # The last ones first: what has nothing behind it any more is cut to what is needed of it, or goes too.
    for entry, needed in sorted(met.values(), key=lambda each: -each[0].start):
        if entry.id in drop or any(child.id not in drop for child in blocks.children(entry.id)):
            continue
        if not needed:
            drop[entry.id] = None
        elif needed < entry.end and not entry.has_tail_state:
            shorten.append((entry, needed))
    return Doomed(tuple(drop), tuple(shorten))


def _needed(
    blocks: Blocks, root: BlockId, entry: Entry, prefix: Ids, needs: RecordIndex, rule: ReuseRule
) -> int:
    """How long a prefix that needs this block is; 0 where none does."""
    so_far = np.concatenate([prefix, entry.tokens])
    if needs.passes(root, so_far):
        return len(so_far)
    if rule.cuts_blocks:
        for length in needs.ends_within(root, so_far, len(prefix)):
            # It may be kept to its end without this one.
            if blocks.lookup(block_id(entry.parent, entry.tokens[: length - len(prefix)])) is None:
                return length
    return 0
