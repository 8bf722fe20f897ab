"""Sampling for all streams of a step: candidates row by row, then every cut for all rows at once.

First the usual cuts, a class each: which tokens of a row can be drawn, and how sharply the likelier ones are
preferred; others are in `rare_cuts.py`. Then the chain of a sequence (`STAGES`, `Sampler`), and the draw.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perdure.decode.sampling.stage import (
    Bias,
    Breakers,
    Candidates,
    Cut,
    Mask,
    Scope,
    Stage,
    Steering,
    Table,
    Weights,
    allowed_by,
    at_least,
    column,
    masked,
    prefix,
    top,
)
from perdure.engine import row_kernels
from perdure.engine.contract import Candidate, Floats, log_norm
from perdure.engine.row_kernels import NothingToDraw
from perdure.errors import EngineError
from perdure.request_options import Sampling


class Greedy(Cut):
    """Temperature 0: the likeliest token."""

    settings = ("temperature",)
    replaces = True

    @classmethod
    def of(cls, sampling: Sampling, scope: Scope) -> Self | None:
        return cls() if sampling.greedy else None

    def select(self, row: Floats) -> Candidates:
        ids = np.array([row.argmax()])
        return Candidates(ids, row[ids])

    def select_allowed(self, row: Floats, mask: Mask) -> Candidates | None:
        # If the mask allows the likeliest of all, it is the likeliest that the mask allows.
        likeliest = self.select(row)
        return likeliest if allowed_by(mask, likeliest.ids)[0] else None


class TopK(Cut):
    """Keeps the `k` likeliest."""

    settings = ("top_k",)

    def __init__(self, k: int) -> None:
        self.k = k

    @classmethod
    def of(cls, sampling: Sampling, scope: Scope) -> Self | None:
        return cls(sampling.top_k) if sampling.top_k else None

    def select(self, row: Floats) -> Candidates | None:
        return Candidates(*top(row, self.k)) if self.k < len(row) else None

    def select_allowed(self, row: Floats, mask: Mask) -> Candidates | None:
        """Of what the mask allows, if it is found among the first few."""
        k = self.k
        if 4 * k >= len(row):
            return None
        ids, logits = top(row, 4 * k)
        places = np.flatnonzero(allowed_by(mask, ids))[:k]
        # More may be allowed further down.
        return (
            Candidates(ids[places], logits[places])
            if len(places) == k and logits[places[-1]] > -np.inf
            else None
        )


class TopP(Cut):
    """Keeps the likeliest that together make up the share `p`."""

    settings = ("top_p",)

    def __init__(self, p: float) -> None:
        self.p = p

    @classmethod
    def of(cls, sampling: Sampling, scope: Scope) -> Self | None:
        return cls(sampling.top_p) if sampling.top_p < 1 else None

    def select(self, row: Floats) -> Candidates:
        if row.max() == -np.inf:
            return Candidates(*top(row, 1))
        return Candidates(*prefix(row, self.p))

    @classmethod
    def cut(cls, stages: Sequence[Self | None], table: Table) -> None:
        limits = column([math.inf if stage is None else stage.p for stage in stages])
        sums = np.cumsum(table.shares, axis=1)
        total = sums[:, -1:].copy()
        for line, mass in enumerate(table.masses):
            if mass is not None:
                total[line] = mass
        # The likeliest is never cut: nothing comes before it, and its own share is not 0.
        table.keep((sums - table.shares < limits * total) | (table.logits == table.peak))


class MinP(Cut):
    """Drops what has less than the share `p` of the likeliest one's probability."""

    settings = ("min_p",)

    def __init__(self, p: float) -> None:
        self.depth = math.log(p)
        """How far a logit may be below the largest."""

    @classmethod
    def of(cls, sampling: Sampling, scope: Scope) -> Self | None:
        return cls(sampling.min_p) if sampling.min_p > 0 else None

    def select(self, row: Floats) -> Candidates:
        return Candidates(*at_least(row, row.max() + np.float32(self.depth)))

    @classmethod
    def cut(cls, stages: Sequence[Self | None], table: Table) -> None:
        depths = column([-math.inf if stage is None else stage.depth for stage in stages])
        table.keep(table.logits >= table.peak + depths)


class Temperature(Cut):
    """Cuts nothing: it sharpens or flattens the differences of what is left."""

    settings = ("temperature",)

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    @classmethod
    def of(cls, sampling: Sampling, scope: Scope) -> Self | None:
        return cls(sampling.temperature)

    @classmethod
    def cut(cls, stages: Sequence[Self | None], table: Table) -> None:
        table.temperature = column([1.0 if stage is None else stage.temperature for stage in stages])


_NEUTRAL = Sampling()


@dataclass(eq=False)
class LateStage:
    """A stage whose module is imported for the first request that has one of its `settings` not at its
    default: there the stage is neutral."""

    module: str
    name: str
    settings: tuple[str, ...]
    kind: type[Stage] | None = None
    """Itself, once it was asked for."""

    def of(self, sampling: Sampling, scope: Scope) -> Stage | None:
        if all(getattr(sampling, name) == getattr(_NEUTRAL, name) for name in self.settings):
            return None
        if self.kind is None:
            kind: type[Stage] = getattr(import_module(f"perdure.decode.sampling.{self.module}"), self.name)
            self.kind = kind
        return self.kind.of(sampling, scope)


_PENALTIES = ("repeat_penalty", "frequency_penalty", "presence_penalty", "penalty_last_n")
_DRY = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_last_n", "dry_breakers")
STAGES: tuple[type[Stage] | LateStage, ...] = (
    Bias,
    LateStage("repetition", "Penalties", _PENALTIES),
    LateStage("repetition", "Dry", _DRY),
    Greedy,
    LateStage("rare_cuts", "Mirostat", ("mirostat", "mirostat_tau", "mirostat_eta")),
    LateStage("rare_cuts", "TopNSigma", ("top_n_sigma",)),
    TopK,
    LateStage("rare_cuts", "Typical", ("typical_p",)),
    TopP,
    MinP,
    LateStage("rare_cuts", "Xtc", ("xtc_probability", "xtc_threshold")),
    Temperature,
)
"""All stages, in the order of llama.cpp's own programs."""


_WIDE = 2048
"""More candidates than this are drawn from by themselves, not beside those of others."""
_POSITIONS = 64
"""Random numbers are made for so many positions at once."""


@functools.lru_cache(maxsize=512)
def _numbers(seed: int, block: int) -> tuple[NDArray[np.float64], list[float]]:
    """Two numbers from 0 to 1 for each of some positions, and the first ones as a list: of the seed and the
    positions, and nothing else. Kept for as many streams as there may be, since each asks at every token."""
    # A counter step gives four numbers.
    raw = np.random.Philox(key=seed, counter=block * _POSITIONS // 2).random_raw(2 * _POSITIONS)
    numbers: NDArray[np.float64] = ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(-1, 2)
    return numbers, numbers[:, 0].tolist()


def _no_breakers(texts: tuple[str, ...]) -> Breakers:
    return {}


def chain(sampling: Sampling, scope: Scope) -> list[Stage]:
    """The stages that settings ask for. A stage at its neutral value is left out."""
    stages: list[Stage] = []
    for kind in STAGES:
        stage = kind.of(sampling, scope)
        if stage is None:
            continue
        stages.append(stage)
        if isinstance(stage, Cut) and stage.replaces:
            break
    return stages


class Sampler:
    """How one sequence draws: its chain, and its random numbers."""

    def __init__(
        self,
        sampling: Sampling,
        *,
        n_ctx: int,
        breakers: Callable[[tuple[str, ...]], Breakers] = _no_breakers,
    ) -> None:
        self.sampling = sampling
        self._seed = sampling.seed or 0
        self.stages = chain(sampling, Scope(n_ctx, breakers))
        self._steering = [stage for stage in self.stages if isinstance(stage, Steering)]
        self._cuts = [stage for stage in self.stages if isinstance(stage, Cut)]
        self._with_span = [stage for stage in self._steering if stage.span]
        self.cuts: dict[type[Cut], Cut] = {type(stage): stage for stage in self._cuts}
        self._observing = [stage for stage in self._cuts if stage.observes]

    def numbers_at(self, position: int) -> NDArray[np.float64]:
        """Two numbers from 0 to 1 for a position; the first decides what is drawn."""
        numbers: NDArray[np.float64] = _numbers(self._seed, position // _POSITIONS)[0][position % _POSITIONS]
        return numbers

    def number_at(self, position: int) -> float:
        """The first of the two."""
        return _numbers(self._seed, position // _POSITIONS)[1][position % _POSITIONS]

    @property
    def span(self) -> int:
        """How many of the tokens before a draw matter to it."""
        return max((stage.span for stage in self._with_span), default=0)

    def accept(self, token: int) -> None:
        """Count a token of the prompt or the reply."""
        for stage in self._with_span:
            stage.accept(token)

    def prime(self, tokens: Sequence[int]) -> None:
        """Count the tokens of a prompt: a draw must not depend on what of it was cached."""
        if span := self.span:
            for token in tokens[max(0, len(tokens) - span) :]:
                # Ids of images are below zero, and are never drawn.
                if token >= 0:
                    self.accept(token)

    def select(self, row: Floats, mask: Mask | None = None) -> Candidates:
        """What can be drawn from a row, of which only what the bits of `mask` allow counts."""
        if self._steering:
            row = row.copy()
            for steering in self._steering:
                steering.apply(row)
        if mask is not None:
            candidates = self._cuts[0].select_allowed(row, mask)
            if candidates is not None:
                return _checked(candidates)
            row = masked(row, mask)
        for cut in self._cuts:
            row = cut.narrow(row)
            candidates = cut.select(row)
            if candidates is not None:
                return _checked(candidates)
        # A copy: the row is the engine's own memory.
        return _checked(Candidates(np.arange(len(row)), row.copy()))

    def observe(self, probability: float) -> None:
        """Tell the stages that ask for it how probable the token was that was drawn."""
        for stage in self._observing:
            stage.observe(probability)


def _checked(candidates: Candidates) -> Candidates:
    largest = candidates.logits.max()
    if largest == -np.inf:
        raise NothingToDraw("every token is ruled out")
    if not largest < np.inf:
        raise EngineError("the engine's logits are no numbers")
    return candidates


def draw(streams: Sequence[tuple[Sampler, Candidates, int]]) -> list[int]:
    """A token for each stream, from its candidates at its position. Each sampler accepts its own."""
    tokens = [0] * len(streams)
    beside: list[int] = []
    for at, (sampler, candidates, _) in enumerate(streams):
        if len(candidates) == 1:
            tokens[at] = int(candidates.ids[0])
            sampler.observe(1.0)
        elif len(candidates) <= _WIDE:
            beside.append(at)
        else:
            _draw_into(tokens, streams, [at])
    if beside:
        _draw_into(tokens, streams, beside)
    for (sampler, _, _), token in zip(streams, tokens, strict=True):
        sampler.accept(token)
    return tokens


def _draw_into(
    tokens: list[int], streams: Sequence[tuple[Sampler, Candidates, int]], places: Sequence[int]
) -> None:
    chosen = [streams[at] for at in places]
    numbers = np.array([sampler.numbers_at(position) for sampler, _, position in chosen])
    shares = weights([(sampler, candidates) for sampler, candidates, _ in chosen], numbers[:, 1])
    sums = np.cumsum(shares, axis=1)
    targets = numbers[:, 0] * sums[:, -1]
    # The first whose sum is above its target has a share above 0; rounding may leave none.
    indices = (sums <= targets[:, None]).sum(axis=1)
    for at, index, line, total, (sampler, candidates, _) in zip(
        places, indices.tolist(), shares, sums[:, -1], chosen, strict=True
    ):
        index = index if index < line.size else int(np.flatnonzero(line)[-1])
        tokens[at] = int(candidates.ids[index])
        sampler.observe(float(line[index] / total))


def weights(streams: Sequence[tuple[Sampler, Candidates]], chances: NDArray[np.float64]) -> Weights:
    """The weights of all candidates after every cut, a line a stream; what was cut has none.

    `chances` decide about XTC.
    """
    table = Table([candidates for _, candidates in streams], chances)
    used = {kind for sampler, _ in streams for kind in sampler.cuts}
    for each in STAGES:
        kind = each.kind if isinstance(each, LateStage) else each
        if kind in used and issubclass(kind, Cut):
            kind.cut([sampler.cuts.get(kind) for sampler, _ in streams], table)
    return table.weights()


# The compiled path: chains of which it knows every stage, for all streams of a step in a few operations.
#
# A stream draws what `Sampler.select` and `draw` would draw, with any other streams in the step.

_Key: TypeAlias = tuple[int, int | None, bytes, bytes]

_COMPARED = 1 << 15
"""Tokens with a bias are looked for among the largest of a row; where that takes more comparisons, the row is
copied."""
_NO_BIAS = row_kernels.RowBias(np.empty(0, np.int64), np.empty(0, np.float32))


_KNOWN: frozenset[type[Stage]] = frozenset({Bias, Greedy, TopK, TopP, MinP, Temperature})
"""The stages that `row_kernels.draw` runs."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledChain:
    """A chain of which `row_kernels.draw` knows every stage: it keeps the `k` largest of a row, and cuts
    those further by top-p and min-p."""

    k: int
    bias: row_kernels.RowBias
    numbers: tuple[float, float, float]
    """The limit of top-p, the depth of min-p, and the temperature."""
    shown: int | None
    """How many of the likeliest are reported beside the drawn token's log probability; None: neither is."""
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
        bias, biased, names = _NO_BIAS, stages.get(Bias), (b"", b"")
        if isinstance(biased, Bias):
            ids, values = biased.ids, biased.values
            if (k + len(ids)) * len(ids) > _COMPARED:
                return None
            bias, names = row_kernels.RowBias(ids.astype(np.int64), values), (ids.tobytes(), values.tobytes())
        numbers = (
            top_p.p if isinstance(top_p, TopP) else math.inf,
            least.depth if isinstance(least, MinP) else -math.inf,
            sampler.sampling.temperature or 1.0,
        )
        return cls(k, bias, numbers, shown, (k, shown, *names))


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
    from perdure.engine.parallel import spread

    norms = spread(log_norm, list(rows), rows.nbytes)
    for row, token, norm, best in zip(rows, tokens, norms, zip(ids, logits, strict=True), strict=True):
        pairs = zip(*(each[:count].tolist() for each in best), strict=True)
        likeliest = tuple(Candidate(other, logit, logit - norm) for other, logit in pairs)
        yield Shown(float(row[token]) - norm, likeliest)
