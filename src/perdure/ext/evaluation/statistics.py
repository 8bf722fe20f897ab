"""Intervals that hold with 95% certainty: of a share, a perplexity, and the difference of two models.

Two models that answered the same tasks are compared task by task, token by token: what both find hard drops
out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Z = 1.959963984540054
"""How many standard errors either way hold 95% of a normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure, and between what it lies with 95% certainty."""

    value: float
    low: float
    high: float
    count: int
    """Tasks, or tokens, that it was measured on."""

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def share(right: int, count: int) -> Interval:
    """A share of right answers, by Wilson's interval: it stays within 0 and 1, however few there are."""
    if not count:
        return Interval(value=math.nan, low=0.0, high=1.0, count=0)
    p = right / count
    scale = 1 + Z * Z / count
    centre = (p + Z * Z / (2 * count)) / scale
    half = Z / scale * math.sqrt(p * (1 - p) / count + Z * Z / (4 * count * count))
    return Interval(value=p, low=max(0.0, centre - half), high=min(1.0, centre + half), count=count)


def perplexity(logprobs: Sequence[float]) -> tuple[Interval, float]:
    """The perplexity of tokens, and its standard error as llama.cpp gives it."""
    losses = -np.asarray(logprobs, np.float64)
    mean = losses.mean()
    value = float(np.exp(mean))
    spread = float(np.sqrt(max(np.square(losses).mean() - mean * mean, 0.0) / max(len(losses) - 1, 1)))
    interval = Interval(
        value=value,
        low=float(np.exp(mean - Z * spread)),
        high=float(np.exp(mean + Z * spread)),
        count=len(losses),
    )
    return interval, value * spread


def share_difference(first: Sequence[bool], second: Sequence[bool]) -> Interval:
    """How much larger the second share is, on the same tasks."""
    apart = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    return _mean(apart)


def perplexity_ratio(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The second perplexity divided by the first, over the same tokens."""
    apart = _mean(np.asarray(first, np.float64) - np.asarray(second, np.float64))
    return Interval(
        value=math.exp(apart.value), low=math.exp(apart.low), high=math.exp(apart.high), count=apart.count
    )


def sign_test(first: Sequence[bool], second: Sequence[bool]) -> float:
    """How likely it is that two models that are equally good differ on so many tasks so unevenly (McNemar's
    exact test)."""
    gained = sum(b and not a for a, b in zip(first, second, strict=True))
    lost = sum(a and not b for a, b in zip(first, second, strict=True))
    count, fewer = gained + lost, min(gained, lost)
    if count > 1000:
        return math.erfc(max(0.0, abs(gained - lost) - 1) / math.sqrt(2 * count))
    return float(min(1.0, 2 * sum(math.comb(count, k) for k in range(fewer + 1)) / 2**count))


def _mean(values: NDArray[np.float64]) -> Interval:
    mean = float(values.mean())
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.inf
    return Interval(value=mean, low=mean - Z * error, high=mean + Z * error, count=len(values))
