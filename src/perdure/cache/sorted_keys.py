"""Values by key, sorted: what stands next to a key is found however many there are."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

from perdure.cache.block import BlockId

V = TypeVar("V")

_RUN = 512
"""Keys in one list, at most: what an insertion moves."""


class SortedKeys(Generic[V]):
    """Values by key, sorted. Adding, removing and finding cost the same whatever their number."""

    __slots__ = ("_runs", "_values")

    def __init__(self) -> None:
        self._values: dict[bytes, V] = {}
        self._runs: list[list[bytes]] = []

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> V | None:
        return self._values.get(key)

    def add(self, key: bytes, value: V) -> None:
        if key not in self._values:
            at = min(bisect_left(self._runs, key, key=_last), len(self._runs) - 1)
            if at < 0:
                self._runs.append([key])
            else:
                run = self._runs[at]
                insort(run, key)
                if len(run) > _RUN:
                    self._runs[at : at + 1] = [run[: _RUN // 2], run[_RUN // 2 :]]
        self._values[key] = value

    def remove(self, key: bytes) -> None:
        if self._values.pop(key, None) is not None:
            at = bisect_left(self._runs, key, key=_last)
            run = self._runs[at]
            del run[bisect_left(run, key)]
            if not run:
                del self._runs[at]

    def walk(self, start: bytes = b"", *, back: bool = False) -> Iterator[V]:
        """The values from `start` on, or back from it. They may be removed on the way."""
        key = self.at_or_before(start) if back else self.at_or_after(start)
        while key is not None:
            yield self._values[key]
            key = self._before(key) if back else self.at_or_after(key + b"\0")

    def at_or_after(self, key: bytes) -> bytes | None:
        at = bisect_left(self._runs, key, key=_last)
        if at == len(self._runs):
            return None
        run = self._runs[at]
        return run[bisect_left(run, key)]

    def at_or_before(self, key: bytes) -> bytes | None:
        return key if key in self._values else self._before(key)

    def _before(self, key: bytes) -> bytes | None:
        at = bisect_left(self._runs, key, key=_first)
        # Only the run before the first that starts at or after the key can hold what stands before it.
        if not at:
            return None
        run = self._runs[at - 1]
        return run[bisect_left(run, key) - 1]


def _first(run: list[bytes]) -> bytes:
    return run[0]


def _last(run: list[bytes]) -> bytes:
    return run[-1]


ChildIndex = SortedKeys[BlockId]
"""The names of the blocks that follow one, by the bytes of their tokens."""
