"""Draws for all streams of a step that need nothing but the largest of their rows: a few operations for all.

What is drawn for a stream is what `Sampler.select` and `draw` would draw, whoever else is there.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perdure.decode.sampling.sampler import NothingToDraw, Sampler
from perdure.engine.contract import Floats
from perdure.engine.logits import Candidate, log_norm
from perdure.engine.parallel import spread
from perdure.engine.top_k import top_k
from perdure.errors import EngineError

_Key: TypeAlias = tuple[int, int | None, bytes, bytes]

_FEW = 128
"""Candidates of one stream that are drawn from one by one."""
_FEW_BIASED = 64
"""Tokens with a bias of their own that are put beside the largest of a row; with more, the row is copied."""


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """How a sampler draws that keeps the `k` largest of a row and cuts those further by top-p and min-p."""

    k: int
    biased: NDArray[np.intp]
    bias: Floats
    numbers: tuple[float, float, float]
    """The limit of top-p, the depth of min-p, and the temperature."""
    shown: int | None
    """How many of the likeliest are told beside the log probability of what is drawn; None: nothing is."""
    ruled_out: frozenset[int] | None
    """The tokens that have a bias, where none of them can be drawn at all."""
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
        if not k or any(further) or sampler.looks_back or len(biased) > _FEW_BIASED:
            return None
        numbers = (
            sampling.top_p if sampling.top_p < 1 else math.inf,
            math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
            sampling.temperature or 1.0,
        )
        ruled_out = frozenset(biased.tolist()) if (bias == -np.inf).all() else None
        key = (k, shown, biased.tobytes(), bias.tobytes())
        return cls(k, biased, bias, numbers, shown, ruled_out, key)


class Shown(NamedTuple):
    """The log probability of a token that was drawn, and the likeliest in its place: of the model's own
    distribution, before any bias."""

    logprob: float
    best: tuple[Candidate, ...]


def draw_together(
    streams: Sequence[tuple[Sampler, TopK, int]], rows: Floats
) -> tuple[list[int], dict[int, Shown]]:
    """A token for each stream, from its row, at its position; and by its place what is to be shown of it."""
    if len(streams) == 1:
        rule = streams[0][1]
        if rule.shown is None and rule.ruled_out is not None and rule.k <= _FEW:
            return [_drawn_from(streams[0], rule.ruled_out, rows[0])], {}
    places: dict[_Key, list[int]] = {}
    for at, (_, rule, _) in enumerate(streams):
        places.setdefault(rule.key, []).append(at)
    tokens = [0] * len(streams)
    shown: dict[int, Shown] = {}
    for chosen in places.values():
        alone = len(places) == 1
        some, table = ([streams[at] for at in chosen], rows[chosen]) if not alone else (streams, rows)
        rule = some[0][1]
        wide = min(max(rule.k + len(rule.biased), rule.shown or 0), rows.shape[1])
        ids, logits = top_k(table, wide)
        found = _drawn(some, *_biased(rule, table, ids, logits))
        if alone:
            tokens = found
        else:
            for at, token in zip(chosen, found, strict=True):
                tokens[at] = token
        if rule.shown is not None:
            best = ids[:, : rule.shown].tolist(), logits[:, : rule.shown].tolist()
            shown |= dict(zip(chosen, _shown(table, found, *best), strict=True))
    return tokens, shown


def _shown(
    rows: Floats, tokens: Sequence[int], ids: Sequence[Sequence[int]], logits: Sequence[Sequence[float]]
) -> Iterator[Shown]:
    norms = spread(log_norm, list(rows), rows.nbytes)
    for row, token, norm, best in zip(rows, tokens, norms, zip(ids, logits, strict=True), strict=True):
        pairs = zip(*best, strict=True)
        likeliest = tuple(Candidate(other, logit, logit - norm) for other, logit in pairs)
        yield Shown(float(row[token]) - norm, likeliest)


def _drawn(streams: Sequence[tuple[Sampler, TopK, int]], ids: NDArray[np.intp], logits: Floats) -> list[int]:
    """A token for each stream out of its candidates, largest first."""
    largest = logits[:, 0]
    if (largest == -np.inf).any():
        raise NothingToDraw("every token is ruled out")
    if not (largest < np.inf).all():
        raise EngineError("the engine's logits are no numbers")
    if ids.shape[1] == 1:
        return ids[:, 0].tolist()  # type: ignore[no-any-return]
    top_p, min_p, temperature = np.array([each.numbers for _, each, _ in streams]).T[..., None]
    numbers = np.array([sampler.random.first_at(position) for sampler, _, position in streams])
    values = logits.astype(np.float64)
    peak = values[:, :1]
    depth = values - peak
    shares = np.exp(depth)
    sums = np.cumsum(shares, axis=1)
    kept = (sums - shares < top_p * sums[:, -1:]) | (depth == 0)
    kept &= values >= peak + min_p
    weights = np.exp(np.where(kept, depth / temperature, -np.inf))
    sums = np.cumsum(weights, axis=1)
    # The first whose sum is above its target has a share of its own; rounding may leave none.
    indices = (sums <= (numbers * sums[:, -1])[:, None]).sum(axis=1)
    last = ids.shape[1] - 1
    if (indices > last).any():
        ends = last - (weights[:, ::-1] > 0).argmax(axis=1)
        indices = np.minimum(indices, ends)
    return ids[np.arange(len(ids)), indices].tolist()  # type: ignore[no-any-return]


def _drawn_from(stream: tuple[Sampler, TopK, int], ruled_out: frozenset[int], row: Floats) -> int:
    """A token for one stream: for so few numbers as are left of its row arrays take longer than lists."""
    sampler, rule, position = stream
    found, values = top_k(row[None], min(rule.k + len(ruled_out), len(row)))
    ids, logits = found[0].tolist(), values[0].tolist()
    if ruled_out and not ruled_out.isdisjoint(ids):
        kept = [at for at, token in enumerate(ids) if token not in ruled_out]
        ids, logits = [ids[at] for at in kept], [logits[at] for at in kept]
    if not ids or logits[0] == -math.inf:
        raise NothingToDraw("every token is ruled out")
    if not logits[0] < math.inf:
        raise EngineError("the engine's logits are no numbers")
    weights = _weights(rule, logits[: rule.k])
    if len(weights) == 1:
        return ids[0]  # type: ignore[no-any-return]
    sums = list(itertools.accumulate(weights))
    place = bisect.bisect_right(sums, sampler.random.first_at(position) * sums[-1])
    return ids[min(place, len(sums) - 1)]  # type: ignore[no-any-return]


def _weights(rule: TopK, logits: Sequence[float]) -> list[float]:
    """The weights of those of the `k` largest that no cut takes."""
    top_p, min_p, temperature = rule.numbers
    peak = logits[0]
    shares = [math.exp(value - peak) for value in logits]
    most, bound, before = top_p * sum(shares), peak + min_p, 0.0
    weights: list[float] = []
    for value, share in zip(logits, shares, strict=True):
        if value < bound or (before >= most and value != peak):
            break
        before += share
        weights.append(math.exp((value - peak) / temperature))
    return weights


def _biased(
    rule: TopK, rows: Floats, ids: NDArray[np.intp], logits: Floats
) -> tuple[NDArray[np.intp], Floats]:
    """The `k` largest of each row after the bias, out of enough of those before it; both largest first."""
    count = min(rule.k, rows.shape[1])
    if not len(rule.biased):
        return ids[:, :count], logits[:, :count]
    taken = (ids[..., None] == rule.biased).any(axis=2)
    if rule.ruled_out is not None and not taken.any():
        return ids[:, :count], logits[:, :count]
    own = rows[:, rule.biased] + rule.bias
    logits = np.concatenate((np.where(taken, -np.inf, logits), own), axis=1)
    ids = np.concatenate((ids, np.broadcast_to(rule.biased, own.shape)), axis=1)
    order = np.lexsort((ids, -logits))[:, :count]
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(logits, order, axis=1)
