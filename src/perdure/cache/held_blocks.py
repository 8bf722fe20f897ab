"""Held blocks: those of prefixes that are kept for a time, which are not evicted before their end."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

HELD = 256
"""Prefixes with an end of one namespace, at most: the oldest goes for a new one."""


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
