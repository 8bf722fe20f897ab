"""The common samplers in NumPy, for the toy engine."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from perdure.engine.contract import Floats, Stage
from perdure.errors import SamplingError

_Scores = NDArray[np.float64]


class ToySampler:
    """A chain of stages over one row. Its state is what it has accepted, and how often it drew."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._accepted: deque[int] = deque(maxlen=_memory(stages))
        self._stages = [self._make(stage) for stage in stages]
        self._choose: Callable[[_Scores], int] = _greedy
        for stage in stages:
            if stage.name == "dist":
                self._choose = _draw(np.random.default_rng(stage.args[0]))

    def accept(self, token: int) -> None:
        self._accepted.append(token)

    def sample(self, row: Floats) -> int:
        scores = row.astype(np.float64)
        for stage in self._stages:
            scores = stage(scores)
        token = self._choose(scores)
        self.accept(token)
        return token

    def _make(self, stage: Stage) -> Callable[[_Scores], _Scores]:
        args = stage.args
        match stage.name:
            case "bias":
                return lambda scores: _bias(scores, args)
            case "penalties":
                return lambda scores: _penalise(scores, self._accepted, *args)
            case "top_k":
                return lambda scores: _top_k(scores, int(args[0]))
            case "top_p":
                return lambda scores: _top_p(scores, float(args[0]))
            case "min_p":
                return lambda scores: _min_p(scores, float(args[0]))
            case "temp":
                return lambda scores: _temper(scores, float(args[0]))
            case "greedy" | "dist":
                return lambda scores: scores
            case _:
                raise SamplingError(f"the toy engine has no sampler stage {stage.name}{args}")


def _memory(stages: Sequence[Stage]) -> int:
    """How many accepted tokens the penalties look at."""
    return max((int(stage.args[0]) for stage in stages if stage.name == "penalties"), default=0)


def _greedy(scores: _Scores) -> int:
    return int(scores.argmax())


def _draw(generator: np.random.Generator) -> Callable[[_Scores], int]:
    def choose(scores: _Scores) -> int:
        heap = np.cumsum(_probabilities(scores))
        return int(np.searchsorted(heap, generator.random() * heap[-1], side="right"))

    return choose


def _probabilities(scores: _Scores) -> _Scores:
    weights: _Scores = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights


def _bias(scores: _Scores, pairs: Sequence[tuple[int, float]]) -> _Scores:
    for token, bias in pairs:
        scores[token] += bias
    return scores


def _penalise(
    scores: _Scores, accepted: deque[int], last: int, repeat: float, frequency: float, presence: float
) -> _Scores:
    for token, count in Counter(list(accepted)[-last:] if last else []).items():
        scores[token] = scores[token] * repeat if scores[token] <= 0 else scores[token] / repeat
        scores[token] -= count * frequency + presence
    return scores


def _top_k(scores: _Scores, k: int) -> _Scores:
    if 0 < k < len(scores):
        # A stable order, so that of equals the lower id stays.
        scores[np.argsort(-scores, kind="stable")[k:]] = -np.inf
    return scores


def _top_p(scores: _Scores, p: float) -> _Scores:
    if p < 1.0:
        order = np.argsort(-scores, kind="stable")
        before = np.cumsum(_probabilities(scores)[order]) - _probabilities(scores)[order]
        scores[order[1:][before[1:] >= p]] = -np.inf
    return scores


def _min_p(scores: _Scores, p: float) -> _Scores:
    weights = _probabilities(scores)
    scores[weights < p * weights.max()] = -np.inf
    return scores


def _temper(scores: _Scores, temperature: float) -> _Scores:
    if temperature > 0:
        return scores / temperature
    scores[np.arange(len(scores)) != scores.argmax()] = -np.inf
    return scores
