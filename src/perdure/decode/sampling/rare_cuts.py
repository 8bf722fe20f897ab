"""Cuts that few ask for: top-n-sigma, typical, XTC, and Mirostat in place of all others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from perdure.decode.sampling.stage import (
    Candidates,
    Cut,
    Scope,
    Table,
    Weights,
    at_least,
    column,
    top,
    total_mass,
)
from perdure.engine.contract import Floats
from perdure.request_options import Sampling


class TopNSigma(Cut):
    """Drops what is further than `n` standard deviations below the largest logit."""

    settings = ("top_n_sigma",)

    def __init__(self, n: float) -> None:
        self.n = n

    @classmethod
    def of(cls, sampling: Sampling, scope: Scope) -> Self | None:
        return cls(sampling.top_n_sigma) if sampling.top_n_sigma else None

    def narrow(self, row: Floats) -> Floats:
        finite = row[row > -np.inf].astype(np.float64)
        if finite.size == 0:
            return row
        bound = np.float32(finite.max() - self.n * finite.std())
        return np.where(row < bound, np.float32(-np.inf), row)


class Typical(Cut):
    """Keeps the tokens whose surprise is nearest to the mean surprise, as many as make up the share `p`."""

    settings = ("typical_p",)

    def __init__(self, p: float) -> None:
        self.p = p

    @classmethod
    def of(cls, sampling: Sampling, scope: Scope) -> Self | None:
        return cls(sampling.typical_p) if sampling.typical_p < 1 else None

    def select(self, row: Floats) -> Candidates:
        return Candidates(*top(row, len(row)))

    @classmethod
    def cut(cls, stages: Sequence[Self | None], table: Table) -> None:
        limits = column([math.inf if stage is None else stage.p for stage in stages])
        p = table.shares / table.shares.sum(axis=1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(p)
            mean = np.where(p > 0, p * surprise, 0.0).sum(axis=1, keepdims=True)
            distance = np.where(p > 0, np.abs(surprise - mean), np.inf)
        order = np.argsort(distance, axis=1, kind="stable")
        ordered = np.take_along_axis(p, order, axis=1)
        nearest = np.cumsum(ordered, axis=1) - ordered <= limits
        is_kept = np.empty_like(nearest)
        np.put_along_axis(is_kept, order, nearest, axis=1)
        table.keep(is_kept)
        # The likeliest may be among what was cut.
        table.peak = table.logits.max(axis=1, keepdims=True)


class Xtc(Cut):
    """XTC: with a probability, drops the tokens above a threshold but the least likely of them."""

    settings = ("xtc_probability", "xtc_threshold")

    def __init__(self, probability: float, threshold: float) -> None:
        self.numbers = probability, threshold

    @classmethod
    def of(cls, sampling: Sampling, scope: Scope) -> Self | None:
        # Two tokens cannot both have more than half.
        chosen = sampling.xtc_probability > 0 and sampling.xtc_threshold <= 0.5
        return cls(sampling.xtc_probability, sampling.xtc_threshold) if chosen else None

    def select(self, row: Floats) -> Candidates:
        return Candidates(*top(row, len(row)))

    @classmethod
    def cut(cls, stages: Sequence[Self | None], table: Table) -> None:
        numbers = np.array([(-1.0, 1.0) if stage is None else stage.numbers for stage in stages])
        probability, threshold = numbers[:, :1], numbers[:, 1:]
        p: Weights = table.shares / table.shares.sum(axis=1, keepdims=True)
        left = table.logits > -np.inf
        above = (left & (p >= threshold)).sum(axis=1, keepdims=True)
        rank = np.cumsum(left, axis=1)
        table.keep(~(left & (table.chances <= probability) & (rank < above)))


# Mirostat: draws that are about as surprising as was aimed at, in place of all other cuts.

_TOKENS = 100
"""The likeliest tokens that a curve is fitted through."""


class Mirostat(Cut):
    """Versions 1 and 2. Its state is the surprise that the next draw may have."""

    settings = ("mirostat", "mirostat_tau", "mirostat_eta")
    replaces = True
    observes = True

    def __init__(self, sampling: Sampling) -> None:
        self._version = sampling.mirostat
        self._temperature = np.float32(sampling.temperature)
        self._tau = np.float32(sampling.mirostat_tau)
        self._eta = np.float32(sampling.mirostat_eta)
        self._surprise = np.float32(2 * sampling.mirostat_tau)

    @classmethod
    def of(cls, sampling: Sampling, scope: Scope) -> Self | None:
        return cls(sampling) if sampling.mirostat else None

    def select(self, row: Floats) -> Candidates:
        if row.max() == -np.inf:
            return Candidates(*top(row, 1))
        row = row / self._temperature
        if self._version == 1:
            return Candidates(*top(row, self._count(row)))
        # No more surprising than the aim: -log2 p is at most that.
        bound = row.max() + math.log(total_mass(row)) - float(self._surprise) * math.log(2)
        ids, logits = at_least(row, bound)
        return Candidates(ids, logits) if len(ids) else Candidates(*top(row, 1))

    def observe(self, probability: float) -> None:
        """Aim the next draw by how surprising this one was."""
        error = -np.log2(np.float32(probability)) - self._tau
        self._surprise -= self._eta * error

    def _count(self, row: Floats) -> int:
        """How many tokens a Zipf curve through the likeliest needs for the surprise that is aimed at."""
        _, logits = top(row, min(_TOKENS, len(row)))
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
