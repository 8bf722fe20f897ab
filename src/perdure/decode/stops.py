"""Where a reply ends before the model ends it: at a stop, or when it says one phrase again and again.

the cat sat on the mat. the cat sat on the mat. the cat sat on the mat. the cat sat …
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from encodings.utf_8 import IncrementalDecoder

import numpy as np


class TextStream:
    """Text out of pieces that may end within a character, cut at the first stop string.

    The work for a piece depends on the piece and the number of stops, never on the text so far. Text that
    may yet turn out to be the start of a stop is held back, so a stop never shows, wherever it was split.
    The first stop is the one that is complete first, and of those complete at once the longest: so the
    result does not depend on how the text was cut into pieces.

    `Request` bounds the number and the length of stops.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = IncrementalDecoder("replace")
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        """How much of each stop the text now ends with."""
        self._held = ""
        self.stopped: str | None = None

    def push(self, piece: bytes) -> str:
        """The text that `piece` makes certain."""
        # Most pieces are ASCII, and whole characters.
        whole = not self._decoder.buffer and piece.isascii()
        text = piece.decode("ascii") if whole else self._decoder.decode(piece)
        return self._release(text) if self._stops else text

    def push_mark(self, piece: bytes) -> str:
        """The same for a control token that is shown: its mark is no text, so a stop can be all of it, and
        not a part."""
        before = self.finish()
        if self.stopped is not None:
            return before
        self._matched = [0] * len(self._stops)
        mark = piece.decode("utf-8", "replace")
        if mark in self._stops:
            self.stopped = mark
            return before
        return before + mark

    def finish(self) -> str:
        """What was held back, once nothing more will come."""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        known, matches, started = self._held + text, [], 0
        for at, stop in enumerate(self._stops):
            if (matched := self._matched[at]) or stop[0] in text:
                end, self._matched[at] = advance(stop, self._borders[at], matched, text)
                if end is not None:
                    matches.append((end, -len(stop)))
                started = max(started, self._matched[at])
        if matches:
            end, minus = min(matches)
            cut = len(self._held) + end + minus
            self.stopped, self._held = known[cut : cut - minus], ""
        else:
            cut = len(known) - started
            self._held = known[cut:]
        return known[:cut]


def advance(stop: str, borders: Sequence[int], matched: int, text: str) -> tuple[int | None, int]:
    """Read `text` behind one that ends with the first `matched` characters of `stop` (Knuth, Morris and
    Pratt): where in it the stop is complete, if it is, and how much of the stop it ends with now."""
    for at, char in enumerate(text, 1):
        while matched and stop[matched] != char:
            matched = borders[matched - 1]
        matched += stop[matched] == char
        if matched == len(stop):
            return at, 0
    return None, matched


@functools.lru_cache(maxsize=256)
def _borders(stop: str) -> array[int]:
    """For each start of `stop`, the length of its longest proper start that it also ends with.

    A stop has at most 1,024 characters: all that is kept here is less than 2 MiB.
    """
    borders = array("I", [0])
    for char in stop[1:]:
        size = borders[-1]
        while size and stop[size] != char:
            size = borders[size - 1]
        borders.append(size + (stop[size] == char))
    return borders


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
        later = -(len(prefix) + 1 - window) % _EVERY if len(prefix) >= window else window - len(prefix) - 1
        self.due = later + 1 if window else _NEVER
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
