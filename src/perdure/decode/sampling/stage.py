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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats
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


# Steering: a bias on tokens. Penalties and DRY are in `repetition.py`.


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
