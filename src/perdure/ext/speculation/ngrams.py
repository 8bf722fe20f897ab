"""N-grams: what followed the last tokens when they came before.

    the prompt and the reply so far:  … return total + 1 ; } … return total
    the last three tokens came before, and `+ 1 ; }` came next: that is the guess.

A prompt holds the earlier turns of its session, so those are searched too. A model that repeats a text with
changes leaves it for a token or a few and comes back. So where the last tokens did not come before, the text
that was followed until then is taken up again, as if what was written had replaced as many tokens of it.
Where there is none, what other replies of the namespace went on with is the guess.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from weakref import WeakKeyDictionary

import numpy as np

from perdure.ext.speculation.guess_source import Guess
from perdure.spi.decode import TokenSequence

SIZE = 3
"""Tokens that must have come before for a guess at what follows."""
INDEXED = 1 << 14
"""Tokens of a sequence that are searched at least, the last ones. An index takes at most 4 MB."""
_LONGEST = 8
"""Tokens before a place that are compared to say how sure a guess is."""
_APART = 32
"""Tokens after which a text that was left is not taken up again."""
_NEAR = 16
"""Places around the expected one that are searched for the last token, where a text is taken up again."""
EARLIER = 1 << 13
"""Tokens of earlier replies of a namespace that are searched at least. They take at most 2 MB."""
NAMESPACES = 8
"""Namespaces whose earlier replies are searched, those that had one last."""
_SURE = 6
"""Tokens that must be the same for a guess by another reply: it may be about something else."""
_EARLIER = "ngram, earlier reply"
"""What such guesses are called."""
_TAKEN_UP = "ngram, taken up"
"""What guesses are called that have no n-gram behind them: how often they are right is measured apart."""
_FACTORS = (1_000_003 * 1_000_003, 1_000_003, 1)
"""Ids of tokens to one number that differs for most n-grams; a guess is never wrong by a mix-up for long."""


class NgramIndex:
    """Where each n-gram of a sequence was last.

    Always holds: it has at most twice `INDEXED` places; each is behind its n-gram and before the end of the
    sequence.
    """

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens
        self._places: dict[int, int] = {}
        self._indexed = 0
        """Ends of n-grams up to here are indexed."""
        self._followed: tuple[int, int] | None = None
        """Where the tokens were that were found last, and the length of the sequence then."""

    def __len__(self) -> int:
        return len(self._places)

    def find(self, count: int) -> tuple[list[int], int]:
        """At most `count` tokens that came behind the last ones before, and how many of those are the same: 0
        where a text that was left is taken up again. Nothing where there is no such place."""
        tokens = self._tokens
        end = len(tokens)
        if end <= SIZE:
            return [], 0
        self._index_until(end - 1)
        place, same = self._place(end)
        if place is None:
            return [], 0
        self._followed = place, end
        guess = tokens[place : min(place + count, end)].tolist()
        while len(guess) < count and place + len(guess) >= end:
            # The text repeats itself up to its end: it goes on with what was guessed.
            guess.append(guess[place + len(guess) - end])
        return guess, same

    def _place(self, end: int) -> tuple[int | None, int]:
        """Where the last tokens came before, if they did, and how many of them; else where to go on."""
        expected = None
        if self._followed is not None and end - self._followed[1] <= _APART:
            expected = min(self._followed[0] + end - self._followed[1], end - 1)
            # A text that goes on being followed is a better guess than another that has three of its tokens.
            if (same := self._same(expected, end)) >= SIZE:
                return expected, same
        tokens = self._tokens
        place = self._places.get(_key(tokens[end - 3], tokens[end - 2], tokens[end - 1]))
        if place is not None and (same := self._same(place, end)) >= SIZE:
            return place, same
        if expected is None:
            return None, 0
        first = max(1, expected - _NEAR)
        near = tokens[first - 1 : min(expected + _NEAR, end) - 1]
        if (last := tokens[end - 1]) not in near:
            return expected, 0
        behind = [first + at for at, token in enumerate(near) if token == last]
        return min(behind, key=lambda each: abs(each - expected)), 0

    def _same(self, place: int, end: int) -> int:
        """How many of the last tokens are those before a place."""
        tokens, same = self._tokens, 0
        if place < 1 or tokens[place - 1] != tokens[end - 1]:
            return 0
        most = min(_LONGEST, place)
        while same < most and tokens[place - 1 - same] == tokens[end - 1 - same]:
            same += 1
        return same

    def _index_until(self, end: int) -> None:
        """Index every n-gram that ends before `end` with the token behind it."""
        tokens, start = self._tokens, max(self._indexed, SIZE)
        if end - start > 64:
            start = max(start, end - INDEXED)
            ids = np.array(tokens[start - SIZE : end], np.int64)
            keys = sum(ids[at : len(ids) - SIZE + 1 + at] * factor for at, factor in enumerate(_FACTORS))
            assert isinstance(keys, np.ndarray)
            self._places.update(zip(keys.tolist(), range(start, end + 1), strict=True))
        else:
            for place in range(start, end + 1):
                self._places[_key(tokens[place - 3], tokens[place - 2], tokens[place - 1])] = place
        self._indexed = end + 1
        if len(self) > 2 * INDEXED:
            self._places.clear()
            self._indexed = max(0, end - INDEXED)


def _key(first: int, second: int, third: int) -> int:
    return first * _FACTORS[0] + second * _FACTORS[1] + third


class EarlierReplies:
    """Replies that have ended, one behind the other, and where each of their n-grams was last.

    Always holds: it has at most twice `EARLIER` tokens.
    """

    def __init__(self) -> None:
        self._tokens = array("i")
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, reply: array[int]) -> None:
        """Search a reply from now on, the first tokens of it."""
        if len(reply) <= _SURE:
            return
        # The last is no token: nothing is followed from one reply into the next.
        reply = reply[: EARLIER - 1] + array("i", [-1])
        if len(self) + len(reply) > 2 * EARLIER:
            newest = self._tokens[len(self) - EARLIER :]
            self._tokens, self._places = array("i"), {}
            self._append(newest)
        self._append(reply)

    def _append(self, tokens: array[int]) -> None:
        start = len(self) + SIZE
        self._tokens += tokens
        for place in range(start, len(self)):
            self._places[_key(*self._tokens[place - SIZE : place])] = place

    def find(self, tokens: array[int], count: int) -> list[int]:
        """At most `count` tokens that came behind the last of `tokens` in a reply."""
        end = len(tokens)
        if end < _SURE:
            return []
        place = self._places.get(_key(*tokens[end - SIZE : end]))
        if place is None or self._tokens[max(0, place - _SURE) : place] != tokens[end - _SURE : end]:
            return []
        guess = self._tokens[place : place + count].tolist()
        return guess[: guess.index(-1)] if -1 in guess else guess


class Ngrams:
    """Guesses that a sequence goes on as it did where its last tokens came before, or as another of its
    namespace did."""

    name = "ngram"
    computes = False

    def __init__(self) -> None:
        self._indices: WeakKeyDictionary[TokenSequence, NgramIndex] = WeakKeyDictionary()
        self._earlier: OrderedDict[str, EarlierReplies] = OrderedDict()
        """By namespace, the one that had a reply last at the end."""

    def guess(self, sequence: TokenSequence, count: int) -> Guess | None:
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = NgramIndex(sequence.tokens)
        tokens, same = index.find(count)
        if not tokens:
            earlier = self._earlier.get(sequence.request.namespace)
            tokens = [] if earlier is None else earlier.find(sequence.tokens, count)
            return Guess(tokens, 0.68, _EARLIER) if tokens else None
        if not same:
            return Guess(tokens, 0.68, _TAKEN_UP)
        # Each token more that is the same halves the doubt.
        return Guess(tokens, 1 - 0.5 ** (same - 1), self.name)

    def forget(self, sequence: TokenSequence) -> None:
        self._indices.pop(sequence, None)
        namespace = sequence.request.namespace
        self._earlier.setdefault(namespace, EarlierReplies()).add(sequence.tokens[sequence.prompt_length :])
        self._earlier.move_to_end(namespace)
        if len(self._earlier) > NAMESPACES:
            self._earlier.popitem(last=False)

    def close(self) -> None:
        self._indices.clear()
        self._earlier.clear()
