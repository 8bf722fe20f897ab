"""Pins: prefixes that callers want kept for a time, by the names that their blocks have or will have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

PINS = 256
"""Pins of one namespace, at most: the oldest goes for a new one."""


@dataclass(frozen=True, slots=True)
class _Held:
    ends: float
    names: frozenset[bytes]


class Pins:
    """The pins of all namespaces, in the order in which they were last asked for.

    Always holds: no namespace pins more than half of the budget, and all of them together no more than it;
    what several pins share counts once; a pin whose time is over holds nothing. A name is a block's or a
    checkpoint's: whether such a thing is kept, and where, is for others to know.
    """

    def __init__(self, budget: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self._clock = clock
        self._held: dict[tuple[str, bytes], _Held] = {}
        self._sizes: dict[str, dict[bytes, int]] = {}
        """The bytes that each name stands for, by namespace."""
        self._counts: dict[bytes, int] = {}
        """How many pins hold a name."""

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, name: bytes) -> bool:
        """Whether a block or a checkpoint is to stay. For any thread."""
        if name not in self._counts:
            return False
        now = self._clock()
        return any(each.ends > now and name in each.names for each in list(self._held.values()))

    def add(
        self,
        namespace: str,
        key: bytes,
        names: Iterable[tuple[bytes, int]],
        seconds: float,
    ) -> bool:
        """Have `names`, each with its bytes, stay for so many seconds, in the place of what `key` had stay
        before. False: there is no room for them within the budget."""
        self.expire()
        sizes = dict(names)
        known = self._sizes.get(namespace, {})
        before = self._held.get((namespace, key))
        # What only the earlier pin of this key holds will go.
        leaving = {
            name for name in (before.names if before else ()) if self._counts[name] == 1 and name not in sizes
        }
        share = sum(size for name, size in (known | sizes).items() if name not in leaving)
        others = sum(sum(each.values()) for space, each in self._sizes.items() if space != namespace)
        if share > self.budget // 2 or share + others > self.budget:
            return False
        self._remove(namespace, key)
        held = self._sizes.setdefault(namespace, {})
        for name, size in sizes.items():
            held[name] = size
            self._counts[name] = self._counts.get(name, 0) + 1
        self._held[namespace, key] = _Held(self._clock() + seconds, frozenset(sizes))
        mine = [each for space, each in self._held if space == namespace]
        if len(mine) > PINS:
            self._remove(namespace, mine[0])
        return True

    def expire(self) -> None:
        """Forget the pins whose time is over."""
        now = self._clock()
        for namespace, key in [place for place, each in self._held.items() if each.ends <= now]:
            self._remove(namespace, key)

    def clear(self) -> None:
        self._held.clear()
        self._sizes.clear()
        self._counts.clear()

    def _remove(self, namespace: str, key: bytes) -> None:
        gone = self._held.pop((namespace, key), None)
        sizes = self._sizes.get(namespace, {})
        for name in gone.names if gone is not None else ():
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]
                sizes.pop(name, None)
        if not sizes:
            self._sizes.pop(namespace, None)
