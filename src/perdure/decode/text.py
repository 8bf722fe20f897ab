"""Bytes to text, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from perdure.errors import InvalidInputError


class TextStream:
    """Text out of pieces that may end within a character, cut at the first stop string.

    The work for a piece depends on the piece and the stops, never on the text so far. Text that may yet
    turn out to be the start of a stop is held back, so a stop never shows, wherever it was split.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise InvalidInputError("stops are a list of texts, none of them empty")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.stopped: str | None = None

    def push(self, piece: bytes) -> str:
        """The text that `piece` makes certain."""
        return self._release(self._decoder.decode(piece))

    def finish(self) -> str:
        """What was held back, once nothing more will come."""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        found = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found)
            self._held = ""
            return held[:at]
        keep = max(_overlap(held, stop) for stop in self._stops)
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` starts with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
