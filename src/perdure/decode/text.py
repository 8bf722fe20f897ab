"""Bytes to text, piece by piece."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from encodings.utf_8 import IncrementalDecoder

from perdure.errors import InvalidInputError


class TextStream:
    """Text out of pieces that may end within a character, cut at the first stop string.

    The work for a piece depends on the piece and the number of stops, never on the text so far. Text that
    may yet turn out to be the start of a stop is held back, so a stop never shows, wherever it was split.
    The first stop is the one that is complete first, and of those complete at once the longest: so the
    result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise InvalidInputError("stops are a list of texts, none of them empty")
        self._decoder = IncrementalDecoder("replace")
        self._watches = [_Watch(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self.stopped: str | None = None

    def push(self, piece: bytes) -> str:
        """The text that `piece` makes certain."""
        # Most pieces are ASCII, and whole characters.
        whole = not self._decoder.buffer and piece.isascii()
        return self._release(piece.decode("ascii") if whole else self._decoder.decode(piece))

    def finish(self) -> str:
        """What was held back, once nothing more will come."""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        if not self._watches:
            return text
        known = self._held + text
        found = [(end, -len(watch.stop)) for watch in self._watches if (end := watch.take(text)) is not None]
        if found:
            end, minus = min(found)
            cut = len(self._held) + end + minus
            self.stopped, self._held = known[cut : cut - minus], ""
        else:
            cut = len(known) - max(watch.matched for watch in self._watches)
            self._held = known[cut:]
        return known[:cut]


class _Watch:
    """One stop string, and how much of it the text now ends with (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = _borders(stop)

    def take(self, text: str) -> int | None:
        """Read `text`; where in it the stop is complete, if it is."""
        stop, borders, matched = self.stop, self._borders, self.matched
        if not matched and stop[0] not in text:
            return None
        for at, char in enumerate(text, 1):
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                return at
        self.matched = matched
        return None


@functools.lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """For each start of `stop`, the length of its longest proper start that it also ends with."""
    borders = [0]
    for char in stop[1:]:
        size = borders[-1]
        while size and stop[size] != char:
            size = borders[size - 1]
        borders.append(size + (stop[size] == char))
    return tuple(borders)
