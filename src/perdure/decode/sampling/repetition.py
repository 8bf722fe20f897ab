"""Stages against repetition: penalties on tokens that were there before, and DRY on phrases that were."""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from typing import Self

import numpy as np

from perdure.decode.sampling.stage import Breakers, Scope, Steering
from perdure.engine.contract import Floats
from perdure.engine.model import EngineModel
from perdure.request_options import Sampling

_LOG_FLOAT_MAX = 88.7228391
_LONGEST_BREAKER = 40
_LONGEST_TAIL = 20
_KNOWN_TOKENS = 1 << 18
"""Tokens in all sets of breakers that a model keeps: about 50 MiB."""


class Penalties(Steering):
    """Repeat, frequency and presence penalties over the last tokens. Its state is those tokens' counts."""

    settings = ("repeat_penalty", "frequency_penalty", "presence_penalty", "penalty_last_n")

    def __init__(self, sampling: Sampling, span: int) -> None:
        self._repeat = np.float32(sampling.repeat_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        self._last: deque[int] = deque()
        self.span = span
        self._counts: Counter[int] = Counter()

    @classmethod
    def of(cls, sampling: Sampling, scope: Scope) -> Self | None:
        penalties = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        chosen = penalties != (1, 0, 0) and sampling.penalty_last_n
        return cls(sampling, scope.span(sampling.penalty_last_n)) if chosen else None

    def accept(self, token: int) -> None:
        self._last.append(token)
        self._counts[token] += 1
        if len(self._last) > self.span:
            oldest = self._last.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def apply(self, row: Floats) -> None:
        size = len(self._counts)
        ids = np.fromiter(self._counts.keys(), np.intp, size)
        counts = np.fromiter(self._counts.values(), np.float32, size)
        logits = row[ids]
        # Dividing would make a token with a negative logit likelier.
        logits = np.where(logits <= 0, logits * self._repeat, logits / self._repeat)
        row[ids] = logits - (counts * self._frequency + self._presence)


class Dry(Steering):
    """DRY: a token that would go on with a phrase that was there before is the less likely the longer it is.

    Its state is the last tokens and, for each of them, how many tokens up to it equal the latest ones.
    """

    settings = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_last_n", "dry_breakers")

    def __init__(self, sampling: Sampling, span: int, breakers: Breakers) -> None:
        self._multiplier = sampling.dry_multiplier
        self._base = sampling.dry_base
        self._allowed = sampling.dry_allowed_length
        self.span = span
        self._breakers = breakers
        self._tokens = np.zeros(1024, np.int32)
        self._repeats = np.zeros(1024, np.int32)
        self._heads: list[int] = []
        self._size = 0

    @classmethod
    def of(cls, sampling: Sampling, scope: Scope) -> Self | None:
        if not sampling.dry_multiplier or not sampling.dry_last_n:
            return None
        return cls(sampling, scope.span(sampling.dry_last_n), scope.breakers(sampling.dry_breakers))

    def accept(self, token: int) -> None:
        size = self._size
        if size == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
            self._repeats = np.concatenate((self._repeats, np.zeros_like(self._repeats)))
        self._tokens[size] = token
        self._size = size + 1
        if token in self._breakers:
            self._heads.append(size)
        # Where the same token stood before, what equalled the latest tokens there is one longer now.
        same = self._tokens[:size] == token
        longer = self._repeats[: size - 1] + 1 if size else self._repeats[:0]
        self._repeats[1:size] = np.where(same[1:], longer, 0) if size > 1 else 0
        if size:
            self._repeats[0] = same[0]

    def apply(self, row: Floats) -> None:
        """Make less likely what would go on with a phrase."""
        count = min(self._size, self.span)
        if count <= self._allowed:
            return
        limit = self._limit(count)
        if limit < self._allowed:
            return
        # Of the tokens but the latest: nothing before the span counts.
        start = self._size - count
        lengths = np.minimum(self._repeats[start : self._size - 1], np.arange(1, count))
        lengths = np.minimum(lengths, limit)
        places = np.flatnonzero(lengths >= self._allowed)
        longest: dict[int, int] = {}
        following = self._tokens[start + 1 : self._size]
        for token, length in zip(following[places].tolist(), lengths[places].tolist(), strict=True):
            if length > longest.get(token, 0):
                longest[token] = length
        most = int(_LOG_FLOAT_MAX / math.log(self._base)) if self._base > 1.000001 else 0
        for token, length in longest.items():
            if () not in self._breakers.get(token, ()):
                exponent = length - self._allowed
                exponent = min(exponent, most) if most > 0 else exponent
                row[token] -= np.float32(self._multiplier * self._base**exponent)

    def _limit(self, count: int) -> int:
        """How long a phrase can be: back to the latest breaker."""
        tokens, end = self._tokens, self._size
        for head in reversed(self._heads):
            back = end - 1 - head
            if back >= count:
                break
            longest = -1
            for tail in self._breakers[int(tokens[head])]:
                if longest < len(tail) <= back and tail == tuple(tokens[head + 1 : head + 1 + len(tail)]):
                    longest = len(tail)
            if longest >= 0:
                return back - longest
        return count


class BreakerTable:
    """The breakers of one model, each set worked out once: every token is looked at for it."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, ...], Breakers] = OrderedDict()

    def find(self, texts: tuple[str, ...]) -> Breakers:
        with self._lock:
            if (known := self._known.get(texts)) is not None:
                self._known.move_to_end(texts)
                return known
            breakers: dict[int, list[tuple[int, ...]]] = {}
            for text in texts:
                self._add(text.encode()[:_LONGEST_BREAKER], breakers)
            self._known[texts] = breakers
            # A breaker such as a space is in a third of a vocabulary.
            while len(self._known) > 1 and sum(map(len, self._known.values())) > _KNOWN_TOKENS:
                self._known.popitem(last=False)
            return breakers

    @functools.cached_property
    def _words(self) -> list[bytes]:
        model = self._model
        words = [model.piece(token, special=True) for token in range(model.n_vocab)]
        spaced = next((token for token, word in enumerate(words) if word.startswith(b" ")), None)
        # Some vocabularies drop the space before the first word of a text.
        if spaced is not None and not model.detokenize([spaced], special=True).startswith(" "):
            words = [word.removeprefix(b" ") for word in words]
        return words

    def _add(self, breaker: bytes, breakers: dict[int, list[tuple[int, ...]]]) -> None:
        for token, word in enumerate(self._words):
            if breaker in word:
                breakers.setdefault(token, []).append(())
                continue
            for tail in _tails(word, breaker):
                ids = self._model.tokenize(tail.decode("utf-8", "replace"), special=False, bos=False)
                if (known := tuple(ids[:_LONGEST_TAIL])) not in (tails := breakers.setdefault(token, [])):
                    tails.append(known)


def _tails(word: bytes, breaker: bytes) -> Iterable[bytes]:
    """What is left of `breaker` after each beginning of it that `word` ends with."""
    for start in range(len(word)):
        length = len(word) - start
        if length < len(breaker) and word[start:] == breaker[:length]:
            yield breaker[length:]
