"""Kept prefixes: what callers asked to keep, for a time or without an end, and what goes when they do.

warm("You are terse.", labels=["bot"])   no end: listed by label, also after a restart
cache_control in a message, 5 minutes    an end: its blocks are not evicted until then
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import BLOCK, AnyBlock, BlockId, block_id
from perdure.cache.prefix_search import (
    ReuseRule,
    SortedKeys,
    Source,
    beginnings,
    common_prefix_length,
    continuations,
    key_of,
)
from perdure.decode.request import KeptPrefix, prefix_cost
from perdure.errors import InvalidInputError, StoreFullError

Ids = NDArray[np.int32]

PREFIXES = 10_000
"""Prefixes without an end of one namespace, at most."""
PREFIX_BYTES = 64 << 20
"""Memory for listing those of all namespaces, at most."""
LABELS = 64
"""Labels of one prefix, at most, and each of so many characters:"""
LABEL_LENGTH = 256
HELD = 256
"""Prefixes with an end of one namespace, at most: the oldest goes for a new one."""


def check_labels(labels: frozenset[str]) -> None:
    """Raise unless one prefix may carry all of `labels`."""
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


@dataclass(frozen=True, slots=True)
class _HeldPrefix:
    """The blocks of one prefix."""

    number: int
    """No other prefix ever has it."""
    names: frozenset[bytes]


@dataclass(slots=True)
class _Space:
    """The held prefixes of one namespace by their keys, in the order in which they were last asked for."""

    prefixes: dict[bytes, _HeldPrefix] = field(default_factory=dict)
    counts: dict[bytes, int] = field(default_factory=dict)
    """How many of them hold a name."""
    sizes: dict[bytes, int] = field(default_factory=dict)
    """The bytes that each name stands for."""
    nbytes: int = 0


class HeldBlocks:
    """The blocks and checkpoints of prefixes that are kept for a time, by the names that they have or will
    have. For any thread.

    Always holds: no namespace holds more than half of the budget, and all of them together no more than it;
    what several prefixes share counts once; one whose time is over holds nothing. Whether the block of a name
    is kept, and where, is for others to know. A prefix costs what its own names cost, however many others
    there are.
    """

    def __init__(self, budget: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self.nbytes = 0
        """What all that is held stands for."""
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0
        self._numbers = count()
        self._spaces: dict[str, _Space] = {}
        self._ends: list[tuple[float, int, str, bytes]] = []
        """When each prefix ends, the first one first. Those that were replaced are still in it."""
        self._held: dict[bytes, int] = {}
        """How many namespaces hold a name."""

    def __len__(self) -> int:
        return self._count

    def holds(self, name: bytes) -> bool:
        """Whether a block or a checkpoint is to stay."""
        with self._lock:
            self._expire()
            return name in self._held

    def add(
        self,
        namespace: str,
        key: bytes,
        names: Iterable[tuple[bytes, int]],
        seconds: float,
    ) -> bool:
        """Have `names`, each with its bytes, stay for so many seconds, in the place of what `key` had stay
        before. False: there is no room for them within the budget."""
        sizes = dict(names)
        with self._lock:
            self._expire()
            space = self._spaces.get(namespace) or _Space()
            more = sum(size - space.sizes.get(name, 0) for name, size in sizes.items())
            if (before := space.prefixes.get(key)) is not None:
                # What only the earlier prefix of this key holds will go.
                alone = (name for name in before.names - sizes.keys() if space.counts[name] == 1)
                more -= sum(space.sizes[name] for name in alone)
            if space.nbytes + more > self.budget // 2 or self.nbytes + more > self.budget:
                return False
            self._remove(namespace, key)
            self._enter(namespace, key, sizes, self._clock() + seconds)
            prefixes = self._spaces[namespace].prefixes
            if len(prefixes) > HELD:
                self._remove(namespace, next(iter(prefixes)))
            return True

    def clear(self) -> None:
        with self._lock:
            self._spaces.clear()
            self._ends.clear()
            self._held.clear()
            self._count = self.nbytes = 0

    # With the lock held.

    def _expire(self) -> None:
        """Forget the prefixes whose time is over."""
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            _, number, namespace, key = heapq.heappop(self._ends)
            if self._is_current(number, namespace, key):
                self._remove(namespace, key)

    def _is_current(self, number: int, namespace: str, key: bytes) -> bool:
        space = self._spaces.get(namespace)
        prefix = None if space is None else space.prefixes.get(key)
        return prefix is not None and prefix.number == number

    def _enter(self, namespace: str, key: bytes, sizes: dict[bytes, int], ends: float) -> None:
        space = self._spaces.setdefault(namespace, _Space())
        for name, size in sizes.items():
            if name not in space.counts:
                self._held[name] = self._held.get(name, 0) + 1
            space.counts[name] = space.counts.get(name, 0) + 1
            self._resize(space, name, size)
        prefix = space.prefixes[key] = _HeldPrefix(next(self._numbers), frozenset(sizes))
        self._count += 1
        heapq.heappush(self._ends, (ends, prefix.number, namespace, key))
        if len(self._ends) > 64 + 4 * self._count:
            self._ends = [each for each in self._ends if self._is_current(*each[1:])]
            heapq.heapify(self._ends)

    def _remove(self, namespace: str, key: bytes) -> None:
        space = self._spaces.get(namespace)
        gone = None if space is None else space.prefixes.pop(key, None)
        if space is None or gone is None:
            return
        self._count -= 1
        for name in gone.names:
            space.counts[name] -= 1
            if not space.counts[name]:
                self._resize(space, name, 0)
                del space.counts[name], space.sizes[name]
                self._held[name] -= 1
                if not self._held[name]:
                    del self._held[name]
        if not space.prefixes:
            del self._spaces[namespace]

    def _resize(self, space: _Space, name: bytes, size: int) -> None:
        more = size - space.sizes.get(name, 0)
        space.sizes[name] = size
        space.nbytes += more
        self.nbytes += more


class KeptPrefixes:
    """The one table of kept prefixes. Those without an end are listed, sorted by where their chain starts and
    by their tokens; of those with an end, the blocks are `held`.

    Always holds: no namespace has more than its share, and all of them keep to one budget.
    """

    def __init__(
        self,
        prefixes: Iterable[KeptPrefix] = (),
        *,
        limit: int = PREFIXES,
        budget: int = PREFIX_BYTES,
        changed: Callable[[KeptPrefix, bool], None] = lambda prefix, listed: None,
    ) -> None:
        """`changed` hears of each prefix that is listed (True) or is not any more."""
        self._changed = changed
        self.held = HeldBlocks(0)
        self.nbytes = 0
        """What listing takes."""
        self.limit = limit
        self.budget = budget
        self._spaces: dict[str, SortedKeys[KeptPrefix]] = {}
        """By namespace, in the order in which they came."""
        self._places: dict[str, bytes] = {}
        """Where each stands in that order, by its id."""
        self._last = 0
        self._keys: SortedKeys[KeptPrefix] = SortedKeys()
        for prefix in prefixes:
            self.put(prefix)

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, prefix: KeptPrefix) -> KeptPrefix | None:
        return self.find(prefix.root, prefix.ids)

    def find(self, root: bytes, tokens: Ids) -> KeptPrefix | None:
        return self._keys.get(root + key_of(tokens))

    def of(self, labels: frozenset[str] | None, namespace: str) -> list[KeptPrefix]:
        """The prefixes of a namespace, or those of them that carry one of `labels`."""
        return self.page(labels, namespace)

    def page(
        self,
        labels: frozenset[str] | None,
        namespace: str,
        *,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[KeptPrefix]:
        """Up to `limit` of them, those that came after the one whose id is `after`."""
        prefixes: SortedKeys[KeptPrefix] = self._spaces.get(namespace, SortedKeys())
        place = b"" if after is None else self._places.get(after, b"")
        if after is not None and prefixes.get(place) is None:
            raise InvalidInputError(
                f"there is no warmed prefix {after!r}, or it is gone: list again from the first one"
            )
        fitting = (each for each in prefixes.walk(place + b"\0") if each.carries(labels, namespace))
        return list(islice(fitting, limit))

    def all(self) -> list[KeptPrefix]:
        return [prefix for each in self._spaces.values() for prefix in each.walk()]

    def check_room(self, tokens: int, namespace: str) -> None:
        """Raise unless one more prefix of this size may be kept."""
        count = len(self._spaces.get(namespace, ()))
        if count >= self.limit:
            raise StoreFullError(
                f"{count} warmed prefixes of this namespace are kept, {self.limit} may be: clear some first",
                needed=1,
            )
        needed = prefix_cost(tokens)
        if self.nbytes + needed > self.budget:
            raise StoreFullError(
                f"warmed prefixes take {self.nbytes} bytes of memory, this one {needed} more, and "
                f"{self.budget} may be used: clear some by label",
                needed=needed,
            )

    def add(self, prefix: KeptPrefix, blocks: Iterable[tuple[bytes, int]] = ()) -> bool:
        """Keep a prefix: list it, or hold its `blocks`, each with its bytes, until its end. False: there is
        no room for these."""
        if prefix.seconds is None:
            self.put(prefix)
            return True
        sizes = dict(blocks)
        key = prefix.key.encode() or next(reversed(sizes))
        return self.held.add(prefix.namespace, key, sizes.items(), prefix.seconds)

    def put(self, prefix: KeptPrefix) -> None:
        self.remove(prefix)
        key = prefix.root + key_of(prefix.ids)
        self._keys.add(key, prefix)
        self._last += 1
        place = self._places[prefix.id] = self._last.to_bytes(8, "big")
        self._spaces.setdefault(prefix.namespace, SortedKeys()).add(place, prefix)
        self.nbytes += prefix.nbytes
        self._changed(prefix, True)

    def remove(self, prefix: KeptPrefix) -> None:
        key = prefix.root + key_of(prefix.ids)
        known = self._keys.get(key)
        if known is None:
            return
        self._keys.remove(key)
        self.nbytes -= known.nbytes
        prefixes = self._spaces[known.namespace]
        prefixes.remove(self._places.pop(known.id))
        if not len(prefixes):
            del self._spaces[known.namespace]
        self._changed(known, False)

    def clear(self) -> None:
        for prefix in self.all():
            self._changed(prefix, False)
        self.held.clear()
        self._spaces, self._places, self._keys, self.nbytes = {}, {}, SortedKeys(), 0

    # Which prefix needs which blocks.

    def passes(self, root: bytes, tokens: Ids) -> bool:
        """Whether a prefix starts with `tokens`, or is just them."""
        key = root + key_of(tokens)
        next_key = self._keys.at_or_after(key)
        return next_key is not None and next_key.startswith(key)

    def ends_within(self, root: bytes, tokens: Ids, start: int) -> Iterable[int]:
        """The lengths above `start` and below all of `tokens` at which prefixes end, the longest first."""
        data = root + key_of(tokens)
        for length in range(len(tokens) - 1, start, -1):
            if self._keys.get(data[: len(root) + 4 * length]) is not None:
                yield length

    def longest_beginning(self, root: bytes, tokens: Ids) -> int:
        """The length of the longest prefix that `tokens` start with."""
        while len(tokens):
            key = self._keys.at_or_before(root + key_of(tokens))
            if key is None or not key.startswith(root):
                return 0
            theirs = np.frombuffer(key[len(root) :], "<i4").astype(np.int32)
            shared = common_prefix_length(theirs, tokens)
            if shared == len(theirs):
                return shared
            tokens = tokens[:shared]
        return 0


class Blocks(Source[AnyBlock], Protocol):
    """Where blocks are found."""

    def lookup(self, block: BlockId) -> AnyBlock | None: ...


@dataclass(frozen=True, slots=True)
class DropPlan:
    """What goes with prefixes: blocks, and the lengths that are still needed of some of those."""

    drop: tuple[BlockId, ...]
    shorten: tuple[tuple[AnyBlock, int], ...]


def drop_plan(blocks: Blocks, gone: Sequence[KeptPrefix], needs: KeptPrefixes, rule: ReuseRule) -> DropPlan:
    """What goes on from the prefixes `gone`, and what leads only there; what one of `needs` needs stays.

    Where blocks cannot be cut, one that runs on past a prefix is of no use to it.
    """
    drop: dict[BlockId, None] = {}
    met: dict[BlockId, tuple[AnyBlock, int]] = {}
    for prefix in gone:
        tokens = prefix.ids
        level: list[tuple[BlockId, int]] = [(BlockId(prefix.root), 0)]
        after: list[tuple[AnyBlock, Ids]] = []
        while level:
            parent, at = level.pop()
            for block in beginnings(blocks, parent, tokens[at : min(at + BLOCK, len(tokens) - 1)]):
                level.append((block.id, at + len(block.tokens)))
                if block.id not in met:
                    met[block.id] = (
                        block,
                        _needed(blocks, prefix.root, block, tokens[:at], needs, rule),
                    )
            if len(tokens) - at <= BLOCK:
                after += ((block, tokens[:at]) for block in continuations(blocks, parent, tokens[at:]))
        for block, before in after:
            needed = _needed(blocks, prefix.root, block, before, needs, rule)
            if needed:
                met[block.id] = block, needed
                so_far = np.concatenate([before, block.tokens])
                after += ((child, so_far) for child in blocks.children(block.id))
            else:
                drop[block.id] = None
    shorten = []
    # The last ones first: what has nothing behind it any more is cut to what is needed of it, or goes too.
    for block, needed in sorted(met.values(), key=lambda each: -each[0].start):
        if block.id in drop or any(child.id not in drop for child in blocks.children(block.id)):
            continue
        if not needed:
            drop[block.id] = None
        elif needed < block.end and not block.has_tail_state:
            shorten.append((block, needed))
    return DropPlan(tuple(drop), tuple(shorten))


def _needed(
    blocks: Blocks, root: bytes, block: AnyBlock, before: Ids, needs: KeptPrefixes, rule: ReuseRule
) -> int:
    """How long a prefix that needs this block is; 0 where none does."""
    so_far = np.concatenate([before, block.tokens])
    if needs.passes(root, so_far):
        return len(so_far)
    if rule.cuts_blocks:
        for length in needs.ends_within(root, so_far, len(before)):
            # It may be kept to its end without this one.
            if blocks.lookup(block_id(block.parent, block.tokens[: length - len(before)])) is None:
                return length
    return 0
