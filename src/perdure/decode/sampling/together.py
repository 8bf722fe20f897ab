"""Draws for all streams of a step that need nothing but the largest of their rows: a few operations for all.

What is drawn for a stream is what `Sampler.select` and `draw` would draw, whoever else is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from perdure.decode.sampling.sampler import Sampler
from perdure.engine import row_kernels
from perdure.engine.contract import Floats
from perdure.engine.logits import Candidate, log_norm
from perdure.engine.parallel import spread

_Key: TypeAlias = tuple[int, int | None, bytes, bytes]

_COMPARED = 1 << 15
"""Tokens with a bias are looked for among the largest of a row; where that takes more comparisons, the row is
copied."""


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """How a sampler draws that keeps the `k` largest of a row and cuts those further by top-p and min-p."""

    k: int
    bias: row_kernels.Bias
    numbers: tuple[float, float, float]
    """The limit of top-p, the depth of min-p, and the temperature."""
    shown: int | None
    """How many of the likeliest are told beside the log probability of what is drawn; None: nothing is."""
    key: _Key
    """Samplers with the same key find their candidates in one pass."""

    @classmethod
    def of(cls, sampler: Sampler, shown: int | None = None) -> TopK | None:
        """None where a sampler looks at more than that."""
        sampling = sampler.sampling
        further = (
            sampling.typical_p < 1,
            sampling.xtc_probability > 0,
            sampling.mirostat,
            sampling.top_n_sigma,
        )
        k = 1 if sampling.greedy else sampling.top_k
        biased, bias = sampler.biases
        if not k or any(further) or sampler.looks_back or (k + len(biased)) * len(biased) > _COMPARED:
            return None
        numbers = (
            sampling.top_p if sampling.top_p < 1 else math.inf,
            math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
            sampling.temperature or 1.0,
        )
        key = (k, shown, biased.tobytes(), bias.tobytes())
        return cls(k, row_kernels.Bias(biased.astype(np.int64), bias), numbers, shown, key)


class Shown(NamedTuple):
    """The log probability of a token that was drawn, and the likeliest in its place: of the model's own
    distribution, before any bias."""

    logprob: float
    best: tuple[Candidate, ...]


def draw_together(
    streams: Sequence[tuple[Sampler, TopK, int]], rows: Floats
) -> tuple[list[int], dict[int, Shown]]:
    """A token for each stream, from its row, at its position; and by its place what is to be shown of it."""
    rule = streams[0][1]
    for _, other, _ in streams:
        if other is not rule and other.key != rule.key:
            return _draw_by_key(streams, rows)
    if rule.k == 1:
        # The largest is drawn whatever the number, and the first number of a seed takes a while to make.
        cuts = [(0.0, 0.0, 0.0, 0.0)] * len(streams)
    else:
        cuts = [(*rule.numbers, sampler.number_at(position)) for sampler, rule, position in streams]
    tokens = row_kernels.draw(rows, rule.k, cuts, rule.bias)
    return tokens, {} if rule.shown is None else dict(enumerate(_shown(rows, tokens, rule.shown)))


def _draw_by_key(
    streams: Sequence[tuple[Sampler, TopK, int]], rows: Floats
) -> tuple[list[int], dict[int, Shown]]:
    """What `draw_together` gives, with a pass for each key that the rules have."""
    places: dict[_Key, list[int]] = {}
    for at, (_, rule, _) in enumerate(streams):
        places.setdefault(rule.key, []).append(at)
    tokens = [0] * len(streams)
    shown: dict[int, Shown] = {}
    for chosen in places.values():
        found, best = draw_together([streams[at] for at in chosen], rows[chosen])
        for at, token in zip(chosen, found, strict=True):
            tokens[at] = token
        shown |= {chosen[at]: each for at, each in best.items()}
    return tokens, shown


def _shown(rows: Floats, tokens: Sequence[int], count: int) -> Iterator[Shown]:
    ids, logits = row_kernels.top_k(rows, min(max(count, 1), rows.shape[1]))
    norms = spread(log_norm, list(rows), rows.nbytes)
    for row, token, norm, best in zip(rows, tokens, norms, zip(ids, logits, strict=True), strict=True):
        pairs = zip(*(each[:count].tolist() for each in best), strict=True)
        likeliest = tuple(Candidate(other, logit, logit - norm) for other, logit in pairs)
        yield Shown(float(row[token]) - norm, likeliest)
