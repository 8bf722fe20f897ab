"""Repetition guard: whether a reply says one phrase again and again.

the cat sat on the mat. the cat sat on the mat. the cat sat on the mat. the cat sat …
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

TIMES = 4
"""How often a phrase must have been said: the longest one is a quarter of what is looked at."""
_EVERY = 64
"""Tokens between two looks."""
_NEVER = 1 << 40


class RepetitionGuard:
    """Looks at the last `window` tokens of a reply, now and then: one look takes time in proportion to them.

    Always holds: a reply repeats itself only if each of those tokens but the first phrase equals the one a
    phrase before it.
    """

    def __init__(self, window: int, prefix: Sequence[int] = ()) -> None:
        """`prefix` are tokens of the reply that an earlier request wrote. A window of 0 sees nothing."""
        self._window = window
        self._prefix = array("i", prefix[-window:] if window else ())
        self.due = max(1, window - len(self._prefix)) if window else _NEVER
        """How many tokens of this request there are at the next look."""

    def repeats(self, written: array[int]) -> bool:
        """Whether the reply, which goes on with `written`, has come to repeat itself."""
        self.due = len(written) + _EVERY
        tail = np.array((self._prefix + written[-self._window :])[-self._window :], np.int32)
        return len(tail) == self._window and _period(tail) is not None


def _period(tail: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int | None:
    """The length of the phrase that `tail` repeats, of at most a quarter of it."""
    longest = len(tail) // TIMES
    if not longest:
        return None
    # Where the last token stood before: few places, unless it is the phrase itself.
    for period in np.flatnonzero(tail[-1 - longest : -1][::-1] == tail[-1]) + 1:
        if tail[-1 - period] == tail[-1] and np.array_equal(tail[period:], tail[:-period]):
            return int(period)
    return None
