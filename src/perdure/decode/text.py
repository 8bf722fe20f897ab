"""Bytes to text, piece by piece."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from encodings.utf_8 import IncrementalDecoder


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

    def finish(self) -> str:
        """What was held back, once nothing more will come."""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        known, found, held = self._held + text, [], 0
        for at, stop in enumerate(self._stops):
            if (matched := self._matched[at]) or stop[0] in text:
                end, self._matched[at] = _read(stop, self._borders[at], matched, text)
                if end is not None:
                    found.append((end, -len(stop)))
                held = max(held, self._matched[at])
        if found:
            end, minus = min(found)
            cut = len(self._held) + end + minus
            self.stopped, self._held = known[cut : cut - minus], ""
        else:
            cut = len(known) - held
            self._held = known[cut:]
        return known[:cut]


def _read(stop: str, borders: Sequence[int], matched: int, text: str) -> tuple[int | None, int]:
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
