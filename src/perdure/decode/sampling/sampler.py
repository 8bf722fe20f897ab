"""Sampling for all streams of a step: candidates row by row, then every cut for all rows at once.

The stages are llama.cpp's, in the order of its own programs: bias, penalties, DRY, top-n-sigma, top-k,
typical, top-p, min-p, XTC, temperature, draw; or mirostat in place of the cuts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure.decode.sampling.candidates import (
    Candidates,
    allowed_by,
    at_least,
    masked,
    prefix,
    top,
    total_mass,
)
from perdure.decode.sampling.repetition import Breakers, Dry, Penalties
from perdure.decode.sampling.settings import Sampling
from perdure.engine.contract import Floats
from perdure.engine.row_kernels import NothingToDraw
from perdure.errors import EngineError

_Weights = NDArray[np.float64]

_WIDE = 2048
"""More candidates than this are drawn from by themselves, not beside those of others."""
_POSITIONS = 64
"""Random numbers are made for so many positions at once."""
_MIROSTAT_TOKENS = 100


@functools.lru_cache(maxsize=512)
def _numbers(seed: int, block: int) -> tuple[NDArray[np.float64], list[float]]:
    """Two numbers from 0 to 1 for each of some positions, and the first ones as a list: of the seed and the
    positions, and nothing else. Kept for as many streams as there may be, since each asks at every token."""
    # A counter step gives four numbers.
    raw = np.random.Philox(key=seed, counter=block * _POSITIONS // 2).random_raw(2 * _POSITIONS)
    found: NDArray[np.float64] = ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(-1, 2)
    return found, found[:, 0].tolist()


class Sampler:
    """How one sequence draws. Its state is what it accepted and, with mirostat, how surprising that was."""

    def __init__(self, sampling: Sampling, *, n_ctx: int, breakers: Breakers | None = None) -> None:
        self.sampling = sampling
        self._seed = sampling.seed or 0
        bias = sorted(sampling.logit_bias.items())
        self._biased = np.array([token for token, _ in bias], np.intp)
        self._bias = np.array([value for _, value in bias], np.float32)
        self._penalties: Penalties | None = None
        penalties = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        if penalties != (1, 0, 0) and sampling.penalty_last_n:
            self._penalties = Penalties(sampling, _span(sampling.penalty_last_n, n_ctx))
        self._dry: Dry | None = None
        if sampling.dry_multiplier and sampling.dry_last_n:
            self._dry = Dry(sampling, _span(sampling.dry_last_n, n_ctx), breakers or {})
        self._surprise = np.float32(2 * sampling.mirostat_tau)
        self.cuts = None if sampling.greedy or sampling.mirostat else Cuts.of(sampling)

    def numbers_at(self, position: int) -> NDArray[np.float64]:
        """Two numbers from 0 to 1 for a position; the first decides what is drawn."""
        found: NDArray[np.float64] = _numbers(self._seed, position // _POSITIONS)[0][position % _POSITIONS]
        return found

    def number_at(self, position: int) -> float:
        """The first of the two."""
        return _numbers(self._seed, position // _POSITIONS)[1][position % _POSITIONS]

    def accept(self, token: int) -> None:
        """Count a token of the prompt or the reply."""
        if self._penalties is not None:
            self._penalties.accept(token)
        if self._dry is not None:
            self._dry.accept(token)

    def prime(self, tokens: Iterable[int]) -> None:
        """Count the tokens of a prompt: a draw must not depend on what of it was cached."""
        if self._penalties is not None or self._dry is not None:
            for token in tokens:
                self.accept(token)

    def select(self, row: Floats, mask: NDArray[np.uint8] | None = None) -> Candidates:
        """What can be drawn from a row, of which only what the bits of `mask` allow counts."""
        row = self._steered(row)
        sampling = self.sampling
        if sampling.greedy:
            found = self._greedy(row, mask)
        elif mask is not None and (few := self._few_allowed(row, mask)) is not None:
            found = few
        else:
            found = self._cut(row if mask is None else masked(row, mask))
        return _checked(found)

    @property
    def looks_back(self) -> bool:
        """Whether what was written before has a say in what is drawn."""
        return self._penalties is not None or self._dry is not None

    @property
    def biases(self) -> tuple[NDArray[np.intp], Floats]:
        """The tokens that have a bias, and theirs."""
        return self._biased, self._bias

    def observe(self, probability: float) -> None:
        """Mirostat: aim the next draw by how surprising this one was."""
        sampling = self.sampling
        error = -np.log2(np.float32(probability)) - np.float32(sampling.mirostat_tau)
        self._surprise -= np.float32(sampling.mirostat_eta) * error

    # Stages that look at the whole row.

    def _steered(self, row: Floats) -> Floats:
        if not len(self._biased) and self._penalties is None and self._dry is None:
            return row
        row = row.copy()
        row[self._biased] += self._bias
        if self._penalties is not None:
            self._penalties.apply(row)
        if self._dry is not None:
            self._dry.apply(row)
        return row

    def _greedy(self, row: Floats, mask: NDArray[np.uint8] | None) -> Candidates:
        ids = np.array([row.argmax()])
        # If the mask allows the likeliest of all, it is the likeliest that the mask allows.
        if mask is not None and not allowed_by(mask, ids)[0]:
            row = masked(row, mask)
            ids = np.array([row.argmax()])
        return Candidates(ids, row[ids])

    def _few_allowed(self, row: Floats, mask: NDArray[np.uint8]) -> Candidates | None:
        """The top-k of what the mask allows, if it is found among the first few; else None."""
        sampling = self.sampling
        k = sampling.top_k
        if not k or sampling.mirostat or sampling.top_n_sigma or 4 * k >= len(row):
            return None
        ids, logits = top(row, 4 * k)
        kept = np.flatnonzero(allowed_by(mask, ids))[:k]
        # More may be allowed further down.
        return Candidates(ids[kept], logits[kept]) if len(kept) == k and logits[kept[-1]] > -np.inf else None

    def _cut(self, row: Floats) -> Candidates:
        """The first cut, which leaves few of a whole row."""
        sampling = self.sampling
        if sampling.top_n_sigma and not sampling.mirostat:
            row = _within_sigma(row, sampling.top_n_sigma)
        if 0 < sampling.top_k < len(row) and not sampling.mirostat:
            return Candidates(*top(row, sampling.top_k))
        if row.max() == -np.inf:
            return Candidates(*top(row, 1))
        if sampling.mirostat:
            return self._mirostat(row / np.float32(sampling.temperature))
        dropping = sampling.xtc_probability > 0 and sampling.xtc_threshold <= 0.5
        if sampling.typical_p < 1:
            return Candidates(*top(row, len(row)))
        if sampling.top_p < 1:
            ids, logits, mass = prefix(row, sampling.top_p)
            return Candidates(ids, logits, mass)
        if sampling.min_p > 0:
            bound = row.max() + np.float32(math.log(sampling.min_p))
            return Candidates(*at_least(row, bound))
        if dropping:
            return Candidates(*top(row, len(row)))
        # A copy: the row is the engine's own memory.
        return Candidates(np.arange(len(row)), row.copy())

    def _mirostat(self, row: Floats) -> Candidates:
        if self.sampling.mirostat == 2:
            # No more surprising than the aim: -log2 p is at most that.
            bound = row.max() + math.log(total_mass(row)) - float(self._surprise) * math.log(2)
            ids, logits = at_least(row, bound)
            return Candidates(ids, logits) if len(ids) else Candidates(*top(row, 1))
        return Candidates(*top(row, self._mirostat_k(row)))

    def _mirostat_k(self, row: Floats) -> int:
        """How many tokens a Zipf curve through the likeliest needs for the surprise that is aimed at."""
        _, logits = top(row, min(_MIROSTAT_TOKENS, len(row)))
        ranks = np.arange(1, len(logits), dtype=np.float32)
        steps = np.log((ranks + 1) / ranks)
        with np.errstate(all="ignore"):
            slope = float((steps * (logits[:-1] - logits[1:])).sum() / (steps * steps).sum())
            flat = np.float64(slope - 1)
            shared = 1 - np.float64(len(row)) ** -flat
            k = (flat * np.float64(2) ** float(self._surprise) / shared) ** (1 / np.float64(slope))
        if math.isnan(k):
            return 1
        return max(1, int(min(float(k), len(row))))


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts after the first one, as numbers of one row of a table over all streams."""

    numbers: tuple[float, float, float, float, float, float]
    typical: bool
    dropping: bool

    @classmethod
    def of(cls, sampling: Sampling) -> Cuts:
        dropping = sampling.xtc_probability > 0 and sampling.xtc_threshold <= 0.5
        numbers = (
            sampling.typical_p if sampling.typical_p < 1 else math.inf,
            sampling.top_p if sampling.top_p < 1 else math.inf,
            math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
            sampling.xtc_probability if dropping else -1.0,
            sampling.xtc_threshold,
            sampling.temperature,
        )
        return cls(numbers, sampling.typical_p < 1, dropping)


PLAIN = Cuts((math.inf, math.inf, -math.inf, -1.0, 1.0, 1.0), False, False)
"""No more cuts: mirostat has made its own, after the temperature."""


def _checked(found: Candidates) -> Candidates:
    largest = found.logits.max()
    if largest == -np.inf:
        raise NothingToDraw("every token is ruled out")
    if not largest < np.inf:
        raise EngineError("the engine's logits are no numbers")
    return found


def draw(wanted: Sequence[tuple[Sampler, Candidates, int]]) -> list[int]:
    """A token for each stream, from its candidates at its position. Each sampler accepts its own."""
    tokens = [0] * len(wanted)
    beside: list[int] = []
    for at, (sampler, candidates, _) in enumerate(wanted):
        if len(candidates) == 1:
            tokens[at] = int(candidates.ids[0])
            if sampler.sampling.mirostat:
                sampler.observe(1.0)
        elif len(candidates) <= _WIDE:
            beside.append(at)
        else:
            _draw_into(tokens, wanted, [at])
    if beside:
        _draw_into(tokens, wanted, beside)
    for (sampler, _, _), token in zip(wanted, tokens, strict=True):
        sampler.accept(token)
    return tokens


def _draw_into(
    tokens: list[int], wanted: Sequence[tuple[Sampler, Candidates, int]], places: Sequence[int]
) -> None:
    chosen = [wanted[at] for at in places]
    numbers = np.array([sampler.numbers_at(position) for sampler, _, position in chosen])
    shares = weights([(sampler, candidates) for sampler, candidates, _ in chosen], numbers[:, 1])
    sums = np.cumsum(shares, axis=1)
    targets = numbers[:, 0] * sums[:, -1]
    # The first whose sum is above its target has a share of its own; rounding may leave none.
    indices = (sums <= targets[:, None]).sum(axis=1)
    for at, index, line, total, (sampler, candidates, _) in zip(
        places, indices.tolist(), shares, sums[:, -1], chosen, strict=True
    ):
        index = index if index < line.size else int(np.flatnonzero(line)[-1])
        tokens[at] = int(candidates.ids[index])
        if sampler.sampling.mirostat:
            sampler.observe(float(line[index] / total))


def weights(wanted: Sequence[tuple[Sampler, Candidates]], chances: NDArray[np.float64]) -> _Weights:
    """The weights of all candidates after every cut, a line a stream; what was cut has none.

    `chances` decide about XTC.
    """
    rules = [sampler.cuts or PLAIN for sampler, _ in wanted]
    logits = _table([candidates.logits for _, candidates in wanted])
    typical, top_p, min_p, xtc, threshold, temperature = np.array([rule.numbers for rule in rules]).T[
        ..., None
    ]
    peak = logits.max(axis=1, keepdims=True)
    shares = np.exp(logits - peak)
    if any(rule.typical for rule in rules):
        kept = _typical(shares / shares.sum(axis=1, keepdims=True), typical)
        logits = np.where(kept, logits, -np.inf)
        shares *= kept
        peak = logits.max(axis=1, keepdims=True)
    sums = np.cumsum(shares, axis=1)
    total = sums[:, -1:].copy()
    for line, (_, candidates) in enumerate(wanted):
        if candidates.mass is not None:
            total[line] = candidates.mass
    # The likeliest is never cut: nothing comes before it, and its own share is not 0.
    kept = (sums - shares < top_p * total) | (logits == peak)
    kept &= logits >= peak + min_p
    if any(rule.dropping for rule in rules):
        kept &= ~_dropped(shares * kept, kept & (logits > -np.inf), chances[:, None] <= xtc, threshold)
    return np.exp(np.where(kept, (logits - peak) / temperature, -np.inf))


def _table(lines: Sequence[Floats]) -> _Weights:
    """Lines of any length as one table, filled up with what cannot be drawn."""
    size = max(map(len, lines))
    table = np.full((len(lines), size), -np.inf)
    for line, values in zip(table, lines, strict=True):
        line[: len(values)] = values
    return table


def _typical(p: _Weights, limits: _Weights) -> NDArray[np.bool_]:
    """The tokens whose surprise is nearest to the mean surprise, as many as make up the limit."""
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(p)
        mean = np.where(p > 0, p * surprise, 0.0).sum(axis=1, keepdims=True)
        distance = np.where(p > 0, np.abs(surprise - mean), np.inf)
    order = np.argsort(distance, axis=1, kind="stable")
    ordered = np.take_along_axis(p, order, axis=1)
    kept = np.cumsum(ordered, axis=1) - ordered <= limits
    found = np.empty_like(kept)
    np.put_along_axis(found, order, kept, axis=1)
    return found


def _dropped(
    shares: _Weights, alive: NDArray[np.bool_], struck: NDArray[np.bool_], threshold: _Weights
) -> NDArray[np.bool_]:
    """XTC: the tokens above the threshold but the last of them, where chance strikes."""
    p = shares / shares.sum(axis=1, keepdims=True)
    above = (alive & (p >= threshold)).sum(axis=1, keepdims=True)
    rank = np.cumsum(alive, axis=1)
    dropped: NDArray[np.bool_] = alive & struck & (rank < above)
    return dropped


def _within_sigma(row: Floats, n: float) -> Floats:
    """A row without what is further than `n` standard deviations below its largest."""
    finite = row[row > -np.inf].astype(np.float64)
    if finite.size == 0:
        return row
    bound = np.float32(finite.max() - n * finite.std())
    return np.where(row < bound, np.float32(-np.inf), row)


def _span(last_n: int, n_ctx: int) -> int:
    return n_ctx if last_n < 0 else min(last_n, n_ctx)
