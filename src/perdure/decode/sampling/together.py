"""The compiled path: chains of which it knows every stage, for all streams of a step in a few operations.

What is drawn for a stream is what `Sampler.select` and `draw` would draw, whoever else is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from perdure.decode.sampling.cuts import Greedy, MinP, Temperature, TopK, TopP
from perdure.decode.sampling.sampler import Sampler
from perdure.decode.sampling.stage import Stage
from perdure.decode.sampling.steering import Bias
from perdure.engine import row_kernels
from perdure.engine.contract import Floats
from perdure.engine.logits import Candidate, log_norm
from perdure.engine.parallel import spread

_Key: TypeAlias = tuple[int, int | None, bytes, bytes]

_COMPARED = 1 << 15
"""Tokens with a bias are looked for among the largest of a row; where that takes more comparisons, the row is
copied."""
_NO_BIAS = np.empty(0, np.intp), np.empty(0, np.float32)


_KNOWN: frozenset[type[Stage]] = frozenset({Bias, Greedy, TopK, TopP, MinP, Temperature})
"""The stages that `row_kernels.draw` runs."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledChain:
    """A chain of which `row_kernels.draw` knows every stage: it keeps the `k` largest of a row, and cuts
    those further by top-p and min-p."""

    k: int
    bias: row_kernels.Bias
    numbers: tuple[float, float, float]
    """The limit of top-p, the depth of min-p, and the temperature."""
    shown: int | None
    """How many of the likeliest are told beside the log probability of what is drawn; None: nothing is."""
    key: _Key
    """Samplers with the same key find their candidates in one pass."""

    @classmethod
    def of(cls, sampler: Sampler, shown: int | None = None) -> CompiledChain | None:
        """None where a chain has other stages."""
        stages = {type(stage): stage for stage in sampler.stages}
        if not stages.keys() <= _KNOWN:
            return None
        top_k, top_p, least = stages.get(TopK), stages.get(TopP), stages.get(MinP)
        if isinstance(top_k, TopK):
            k = top_k.k
        elif Greedy in stages:
            k = 1
        else:
            return None
        biased = stages.get(Bias)
        ids, values = (biased.ids, biased.values) if isinstance(biased, Bias) else _NO_BIAS
        if (k + len(ids)) * len(ids) > _COMPARED:
            return None
        numbers = (
            top_p.p if isinstance(top_p, TopP) else math.inf,
            least.depth if isinstance(least, MinP) else -math.inf,
            sampler.sampling.temperature or 1.0,
        )
        key = (k, shown, ids.tobytes(), values.tobytes())
        return cls(k, row_kernels.Bias(ids.astype(np.int64), values), numbers, shown, key)


class Shown(NamedTuple):
    """The log probability of a token that was drawn, and the likeliest in its place: of the model's own
    distribution, before any bias."""

    logprob: float
    best: tuple[Candidate, ...]


def draw_together(
    streams: Sequence[tuple[Sampler, CompiledChain, int]], rows: Floats
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
    streams: Sequence[tuple[Sampler, CompiledChain, int]], rows: Floats
) -> tuple[list[int], dict[int, Shown]]:
    """What `draw_together` gives, with a pass for each key that the rules have."""
    places: dict[_Key, list[int]] = {}
    for at, (_, rule, _) in enumerate(streams):
        places.setdefault(rule.key, []).append(at)
    tokens = [0] * len(streams)
    shown: dict[int, Shown] = {}
    for chosen in places.values():
        drawn, best = draw_together([streams[at] for at in chosen], rows[chosen])
        for at, token in zip(chosen, drawn, strict=True):
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
