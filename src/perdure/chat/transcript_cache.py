"""Transcript cache: conversations that were had, found again by their text."""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict

from perdure.chat.transcript import ChatTokenizer, Transcript

_LIMIT = 16 << 20
_CUT, _OVERHEAD = 128, 512
"""Bytes that a cut takes, and a transcript besides what it holds."""


class TranscriptCache:
    """The latest transcripts, by namespace and text, up to a number of bytes. Safe from any thread.

    A client that sends its whole history again gets the very tokens that were computed for it.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, limit: int = _LIMIT) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str, str], Transcript] = OrderedDict()
        self._sorted: dict[str, list[str]] = {}
        self.nbytes = 0
        """What it takes of memory, about."""

    def lookup(self, text: str, namespace: str) -> Transcript | None:
        """The longest beginning of `text` that is remembered."""
        with self._lock:
            texts = self._sorted.get(namespace, [])
            at = bisect.bisect_left(texts, text)
            # What shares the longest beginning with a text stands beside it when texts are sorted.
            near = [(namespace, each) for each in texts[max(0, at - 1) : at + 1]]
            for key in near:
                self._held.move_to_end(key)
            known = [self._held[key] for key in near]
        found = [
            each for each in (self._tokenizer.shared_prefix(text, one) for one in known) if each is not None
        ]
        return max(found, key=lambda each: len(each.text), default=None)

    def store(self, transcript: Transcript, namespace: str) -> None:
        """Remember a transcript, in the place of those that it goes on from."""
        text = transcript.text
        if not text or _size(transcript) > self._limit:
            return
        with self._lock:
            texts = self._sorted.setdefault(namespace, [])
            at = bisect.bisect_left(texts, text)
            while at and text.startswith(texts[at - 1]):
                at -= 1
                self._drop((namespace, texts[at]), at)
            if (namespace, text) not in self._held:
                texts.insert(at, text)
            else:
                self.nbytes -= _size(self._held[namespace, text])
            self._held[namespace, text] = transcript
            self._held.move_to_end((namespace, text))
            self.nbytes += _size(transcript)
            while self.nbytes > self._limit:
                oldest = next(iter(self._held))
                self._drop(oldest, bisect.bisect_left(self._sorted[oldest[0]], oldest[1]))
                if not self._sorted[oldest[0]]:
                    # A namespace that has nothing left leaves nothing behind.
                    del self._sorted[oldest[0]]

    def _drop(self, key: tuple[str, str], at: int) -> None:
        self.nbytes -= _size(self._held.pop(key))
        del self._sorted[key[0]][at]


def _size(transcript: Transcript) -> int:
    """In memory, about. Of short ones, most is not their text."""
    characters = len(transcript.text) * (1 if transcript.text.isascii() else 4)
    tokens = transcript.tokens.itemsize * len(transcript.tokens)
    return characters + tokens + _CUT * len(transcript.cuts) + _OVERHEAD
