"""The contract of a sampling stage.

A chain is a list of stages in order: first those that steer (they change logits of a row), then cuts (they
choose what of a row can still be drawn). `Stage.of` makes a stage out of the settings of a request, or None
where they leave it out. A stage belongs to one sequence and may have state. Only the engine's thread calls
it, and no call waits.

A new setting is a field of `Sampling` (and of `SamplingKeywords`) and a stage in `sampler.STAGES` that reads
it; every surface follows from the field.

Rows that need nothing but stages that the compiled path knows never come here: see `together`.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats
from perdure.engine.model import EngineModel
from perdure.engine.row_kernels import top_k
from perdure.request_options import Sampling

Weights = NDArray[np.float64]
Mask = NDArray[np.uint8]
"""One bit a token: whether a grammar allows it."""
Breakers: TypeAlias = Mapping[int, Sequence[tuple[int, ...]]]
"""For each token that may begin a breaker, the tokens that have to follow it for the breaker to be whole."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What a stage may ask about the model that it draws for."""

    n_ctx: int
    breakers: Callable[[tuple[str, ...]], Breakers]

    def span(self, last_n: int) -> int:
        """How many tokens `last_n` means; -1 is all that fit."""
        return self.n_ctx if last_n < 0 else min(last_n, self.n_ctx)


class Stage:
    """One step of a chain."""

    settings: ClassVar[tuple[str, ...]]
    """The fields of `Sampling` that it reads: their ranges, defaults and help are said there."""

    @classmethod
    def of(cls, sampling: Sampling, scope: Scope) -> Self | None:
        """The stage, or None where the settings leave it out."""
        raise NotImplementedError


class Steering(Stage):
    """A stage that changes logits of a row, whatever a grammar allows."""

    span: int = 0
    """How many of the latest tokens it looks at."""

    def accept(self, token: int) -> None:
        """Count a token of the prompt or the reply. Called only where `span` is not 0."""

    def apply(self, row: Floats) -> None:
        """Change a row, which is a copy."""
        raise NotImplementedError


class Cut(Stage):
    """A stage that chooses what can be drawn.

    A row as the engine made it is long, so the first cut of a chain that can do so finds its few candidates
    with `select`. All further cuts work on a table of the candidates of all streams.
    """

    replaces: ClassVar[bool] = False
    """Whether it stands for all cuts that would follow."""
    observes: ClassVar[bool] = False
    """Whether it gets the probability of each drawn token."""

    def narrow(self, row: Floats) -> Floats:
        """The row without what the cut rules out, where that depends on all of it."""
        return row

    def select(self, row: Floats) -> Candidates | None:
        """The candidates of a row; None leaves that to the next stage."""
        return None

    def select_allowed(self, row: Floats, mask: Mask) -> Candidates | None:
        """The candidates among what `mask` allows, where they are found without looking at all of the row."""
        return None

    @classmethod
    def cut(cls, stages: Sequence[Self | None], table: Table) -> None:
        """Cut the lines of a table, each with its own stage; None leaves a line unchanged."""

    def observe(self, probability: float) -> None:
        """How probable the token was that was drawn."""


class Table:
    """The candidates of several streams, a line each, likeliest first.

    `shares` are proportional to the probabilities of what is left; what was cut has none, and a logit of
    minus infinity.
    """

    def __init__(self, lines: Sequence[Candidates], chances: Weights) -> None:
        self.logits: Weights = np.full((len(lines), max(map(len, lines))), -np.inf)
        for line, candidates in zip(self.logits, lines, strict=True):
            line[: len(candidates)] = candidates.logits
        self.peak: Weights = self.logits.max(axis=1, keepdims=True)
        self.shares: Weights = np.exp(self.logits - self.peak)
        self.masses = [candidates.mass for candidates in lines]
        self.chances: Weights = chances[:, None]
        """A random number for each line, from 0 to 1."""
        self.temperature: Weights | None = None

    def keep(self, is_kept: NDArray[np.bool_]) -> None:
        """Cut all but these."""
        self.logits = np.where(is_kept, self.logits, -np.inf)
        self.shares = self.shares * is_kept

    def weights(self) -> Weights:
        """What is drawn by."""
        depths = self.logits - self.peak
        return np.exp(depths if self.temperature is None else depths / self.temperature)


def column(values: Sequence[float]) -> Weights:
    """A number for each line of a table."""
    return np.array(values, np.float64)[:, None]


# Candidates: the few tokens of a row of logits that can still be drawn.

Ids = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Tokens and their logits, likeliest first unless they are the whole row.

    `mass` is the sum of exp(logit - largest) over all tokens that the first cut weighs; None: over these.
    """

    ids: Ids
    logits: Floats
    mass: float | None = None

    def __len__(self) -> int:
        return len(self.ids)


def top(row: Floats, k: int) -> tuple[Ids, Floats]:
    """The `k` largest of a row, largest first; of equals, the lower id first."""
    ids, values = top_k(row[None], min(k, len(row)))
    return ids[0], values[0]


def at_least(row: Floats, bound: float) -> tuple[Ids, Floats]:
    """What of a row reaches `bound`, largest first."""
    ids = np.flatnonzero(row >= np.float32(bound))
    values = row[ids]
    order = np.argsort(-values, kind="stable")
    return ids[order], values[order]


def prefix(row: Floats, p: float) -> tuple[Ids, Floats, float]:
    """The largest of a row that make up the share `p` of it, largest first, and the mass of the whole row."""
    mass = total_mass(row)
    k = 256
    while True:
        ids, values = top(row, k)
        if k >= len(row) or float(np.exp(values - values[0]).sum(dtype=np.float64)) >= p * mass:
            return ids, values, mass
        k *= 8


def total_mass(row: Floats) -> float:
    """The sum of exp(logit - largest) over a row."""
    return float(np.exp(row - row.max()).sum(dtype=np.float64))


def allowed_by(mask: NDArray[np.uint8], ids: Ids) -> NDArray[np.bool_]:
    """Whether the bits of `mask` allow `ids`."""
    bits: NDArray[Any] = mask[ids >> 3] >> (ids & 7) & 1
    return bits.astype(np.bool_)


def masked(row: Floats, mask: NDArray[np.uint8]) -> Floats:
    """A copy of a row without what the bits of `mask` forbid."""
    allowed = np.unpackbits(mask, count=len(row), bitorder="little")
    return np.where(allowed, row, np.float32(-np.inf))


# Steering: a bias on tokens, penalties on tokens that were there before, and DRY on phrases that were.

_LONGEST_BREAKER = 40
_LONGEST_TAIL = 20
_LOG_FLOAT_MAX = 88.7228391
_KNOWN_TOKENS = 1 << 18
"""Tokens in all sets of breakers that a model keeps: about 50 MiB."""


class Bias(Steering):
    """Adds to the logits of some tokens; minus infinity rules one out."""

    settings = ("logit_bias",)

    def __init__(self, sampling: Sampling) -> None:
        biases = sorted(sampling.logit_bias.items())
        self.ids = np.array([token for token, _ in biases], np.intp)
        self.values = np.array([value for _, value in biases], np.float32)

    @classmethod
    def of(cls, sampling: Sampling, scope: Scope) -> Self | None:
        return cls(sampling) if sampling.logit_bias else None

    def apply(self, row: Floats) -> None:
        row[self.ids] += self.values


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
