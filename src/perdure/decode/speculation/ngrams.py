"""N-grams: what followed the last tokens when they came before.

    the prompt and the reply so far:  … return total + 1 ; } … return total
    the last three tokens came before, and `+ 1 ; }` came next: that is the guess.

Of several such places, the one is taken before which most tokens are the same. In an edit, what follows a
changed token is mostly what followed the old one: behind a run of copied tokens one change is stepped over.

A prompt holds the earlier turns of its session, so those are searched too.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from perdure.decode.sequence import TokenSequence
from perdure.decode.speculation.drafter import Draft

SIZE = 3
"""Tokens that must have come before for a guess at what follows."""
INDEXED = 1 << 14
"""Tokens of a sequence that are searched at least, the last ones. An index takes at most 4 MB."""
_LONGEST = 16
"""Tokens before a place that are compared, to take the place that is most alike and say how sure that is."""
_PLACES = 4
"""Places of one n-gram that are compared."""
_RUN = 8
"""Tokens that must have been the same before a changed one, to guess that the text goes on behind it."""
_FACTORS = (1_000_003 * 1_000_003, 1_000_003, 1)
"""Ids of tokens to one number that tells most n-grams apart; a guess is never wrong by a mix-up for long."""


class Continuation(NamedTuple):
    """What may come next, as it came before."""

    tokens: list[int]
    same: int
    """Tokens before it that are the same, of those that were compared."""
    changed: bool = False
    """Whether the last token is another one than there."""


class NgramIndex:
    """Where each n-gram of a sequence was, the last time and the times before.

    Always holds: it has at most twice `INDEXED` places; each is behind its n-gram and before the end of the
    sequence.
    """

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens
        self._places: dict[int, int] = {}
        self._before: dict[int, int] = {}
        """By place, the one where the same n-gram was the time before."""
        self._indexed = 0
        """Ends of n-grams up to here are indexed."""
        self._ahead = 0
        """How far before the end of the sequence the last guess was copied from; 0 for nowhere."""

    def find(self, count: int) -> Continuation | None:
        """At most `count` tokens that came behind the last ones before; None where they did not."""
        tokens = self._tokens
        end = len(tokens)
        if end <= SIZE:
            return None
        self._index_until(end - 1)
        place = self._places.get(_key(tokens[end - 3], tokens[end - 2], tokens[end - 1]))
        best, longest = 0, SIZE - 1
        for _ in range(_PLACES):
            if place is None:
                break
            same = self._same(place, end)
            if same > longest:
                best, longest = place, same
                if same == _LONGEST:
                    break
            place = self._before.get(place)
        if longest >= SIZE:
            self._ahead = end - best
            return Continuation(self._copied(best, count), longest)
        # One token was changed in what is copied: it goes on behind that one.
        place = end - self._ahead
        if not self._ahead or place < _RUN + 1 or self._same(place - 1, end - 1) < _RUN:
            return None
        return Continuation(self._copied(place, count), _RUN, changed=True)

    def _same(self, place: int, end: int) -> int:
        """How many tokens before both are the same."""
        tokens, same = self._tokens, 0
        most = min(_LONGEST, place)
        while same < most and tokens[place - 1 - same] == tokens[end - 1 - same]:
            same += 1
        return same

    def _copied(self, place: int, count: int) -> list[int]:
        end = len(self._tokens)
        found = self._tokens[place : min(place + count, end)].tolist()
        while len(found) < count and place + len(found) >= end:
            # The text repeats itself up to its end: it goes on with what was guessed.
            found.append(found[place + len(found) - end])
        return found

    def _index_until(self, end: int) -> None:
        """Index every n-gram that ends before `end` with the token behind it."""
        tokens, start = self._tokens, max(self._indexed, SIZE)
        if end - start > 64:
            start = max(start, end - INDEXED)
            ids = np.array(tokens[start - SIZE : end], np.int64)
            keys = sum(ids[at : len(ids) - SIZE + 1 + at] * factor for at, factor in enumerate(_FACTORS))
            assert isinstance(keys, np.ndarray)
            order = np.argsort(keys, kind="stable")
            again = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
            later, earlier = order[again + 1] + start, order[again] + start
            self._before.update(zip(later.tolist(), earlier.tolist(), strict=True))
            self._places.update(zip(keys.tolist(), range(start, end + 1), strict=True))
        else:
            for place in range(start, end + 1):
                key = _key(tokens[place - 3], tokens[place - 2], tokens[place - 1])
                if (before := self._places.get(key)) is not None:
                    self._before[place] = before
                self._places[key] = place
        self._indexed = end + 1
        if len(self._places) + len(self._before) > 2 * INDEXED:
            self._places.clear()
            self._before.clear()
            self._indexed = max(0, end - INDEXED)


def _key(first: int, second: int, third: int) -> int:
    return first * _FACTORS[0] + second * _FACTORS[1] + third


class NgramDrafter:
    """Guesses that a sequence goes on as it did where its last tokens came before."""

    name = "ngram"
    behind_changes = "ngram behind a change"
    """The source of guesses that step over a changed token: how often these are right is another matter."""

    def __init__(self) -> None:
        self._indices: WeakKeyDictionary[TokenSequence, NgramIndex] = WeakKeyDictionary()

    def draft(self, sequence: TokenSequence, count: int) -> Draft | None:
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = NgramIndex(sequence.tokens)
        found = index.find(count)
        if found is None or not found.tokens:
            return None
        if found.changed:
            return Draft(found.tokens, 0.75, self.behind_changes)
        # Each token more that is the same halves the doubt.
        return Draft(found.tokens, 1 - 0.5 ** (found.same - 1), self.name)

    def forget(self, sequence: TokenSequence) -> None:
        self._indices.pop(sequence, None)

    def close(self) -> None:
        self._indices.clear()
