"""How long steps of so many tokens take, as measured."""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 16
"""The latest steps of a size, which say how long such a step takes."""
_ENOUGH = 3
"""Steps of a size after which its time is known: one alone may have been held up."""
_PREPARED = 3
"""First steps of a size on a device, which prepares that size in them: they say nothing."""
_FORGOTTEN = 1000
"""Steps after which a size that did not come again is unknown: the machine may have been busy then."""
_UNKNOWN = 0.1
"""What each token more is taken to cost, as a part of a step, before that was measured."""


class StepCosts:
    """The cost of a step by its tokens, and of a change to another size.

    Of the latest steps of a size the fastest counts: the others were held up. The first one says nothing. The
    first two behind a step of another size may take longer, as on a GPU, which launches the first bit by bit
    and records the second: that is the cost of the change.
    """

    def __init__(self, *, prepares: bool = False) -> None:
        self._ignored = _PREPARED if prepares else 1
        self._steps = 0
        self._latest: dict[int, int] = {}
        """Which step was the latest of each size."""
        self._counts: dict[int, int] = {}
        self._taken: dict[int, deque[float]] = {}
        self._seconds: dict[int, float] = {}
        self._excess = (deque[float](maxlen=WINDOW), deque[float](maxlen=WINDOW))
        self._last = 0
        self._run = 0
        """Steps of that size in a row."""
        self.change = 0.0
        """Seconds that a change of size takes."""
        self.largest = 0
        """The most tokens of a step that was measured; 0 where none was."""

    def observe(self, tokens: int, seconds: float) -> None:
        self._run = self._run + 1 if tokens == self._last else 1
        self._last = tokens
        self._steps += 1
        self._latest[tokens] = self._steps
        self._counts[tokens] = self._counts.get(tokens, 0) + 1
        if self._counts[tokens] <= self._ignored:
            return
        taken = self._taken.setdefault(tokens, deque(maxlen=WINDOW))
        taken.append(seconds)
        if len(taken) < _ENOUGH:
            return
        self._seconds[tokens] = min(taken)
        if tokens > self.largest:
            self.largest = tokens
        if self._run <= len(self._excess):
            self._excess[self._run - 1].append(seconds - self._seconds[tokens])
            self.change = sum(statistics.median(each) for each in self._excess if each)

    def leave(self) -> None:
        """A prompt was read: the next step is the first of its size, whichever that is."""
        self._last = self._run = 0
        for tokens in [each for each, step in self._latest.items() if self._steps - step > _FORGOTTEN]:
            del self._latest[tokens]
            self._taken.pop(tokens, None)
            self._seconds.pop(tokens, None)
        self.largest = max(self._seconds, default=0)

    def is_change(self, tokens: int) -> bool:
        """Whether a step of so many tokens is of another size than the last one."""
        return tokens != self._last

    def believed(self, tokens: int, seconds: float) -> float:
        """What is believed of a step that took so long: what is known of its size; of a new size at most
        twice what was expected, and on a device that, which has still to prepare it."""
        expected = self.seconds(tokens)
        return expected if tokens in self._seconds or self._ignored > 1 else min(seconds, 2 * expected)

    def seconds(self, tokens: int) -> float:
        """Of a step of so many tokens, estimated from the nearest sizes where it was not measured."""
        if (known := self._seconds.get(tokens)) is not None:
            return known
        below = max((size for size in self._seconds if size < tokens), default=None)
        above = min((size for size in self._seconds if size > tokens), default=None)
        if below is None:
            return self._seconds[above] if above is not None else 0.0
        low = self._seconds[below]
        if above is not None:
            return low + (tokens - below) / (above - below) * max(0.0, self._seconds[above] - low)
        least = min(self._seconds)
        rise = (low - self._seconds[least]) / (below - least) if below > least else 0.0
        # Half as steep as before: on most machines a token costs less the more there are, and one try tells.
        return low + (tokens - below) * max(rise / 2, _UNKNOWN * low / below)
