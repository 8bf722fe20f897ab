"""Mirostat: draws that are about as surprising as was aimed at, in place of all other cuts."""

from __future__ import annotations

import math
from typing import Self

import numpy as np

from perdure.decode.sampling.candidates import Candidates, at_least, top, total_mass
from perdure.decode.sampling.stage import Cut, Scope
from perdure.engine.contract import Floats
from perdure.request_options import Sampling

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
