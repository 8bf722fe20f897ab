"""The models that engine tests run over, toys of both engines, and how exactly each repeats itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import zoo
from perdure import Context, MemoryKind, Model
from perdure.engine.toy import ToyModel

Row = NDArray[np.float32]

TOYS = {f"toy-{kind.value}": kind for kind in MemoryKind}
NAMES = [*TOYS, *zoo.names()]

# With these the engine rounds least: no half-precision sums over cells, whose order then hardly matters.
FINE = {"flash": False, "k_type": "f32", "v_type": "f32"}


@dataclass(frozen=True)
class Noise:
    """The KL that rounding makes of the same tokens in other batch shapes or other cells, at most.

    With the usual settings, and with those above. The figures are measured: docs/exactness.md.
    """

    usual: float
    fine: float


NOISE = {
    **dict.fromkeys(TOYS, Noise(0.0, 0.0)),
    "llama": Noise(2.2e-4, 1e-10),
    "qwen3": Noise(2.1e-4, 1e-10),
    "qwen3moe": Noise(1.5e-3, 1e-10),
    "deepseek2": Noise(1.4e-2, 1e-10),
    "gemma3": Noise(2.3e-4, 1e-6),
    "mamba": Noise(1e-8, 1e-8),
    "jamba": Noise(2.1e-4, 1e-10),
}


@dataclass(frozen=True)
class Subject:
    """One model, and how far apart the same tokens can be on it."""

    name: str
    model: ToyModel | Model
    rounding: Noise

    @property
    def routes(self) -> bool:
        """Whether tokens are sent to experts: rounding can send one to another expert, which is no bound
        on anything, so that only the fine settings tell noise from error."""
        return self.name in ("qwen3moe", "deepseek2")

    @property
    def kind(self) -> MemoryKind:
        return self.model.memory.kind

    @property
    def toy(self) -> bool:
        return isinstance(self.model, ToyModel)

    def context(self, *, fine: bool = False, **settings: Any) -> Context:
        """A small context: three sequences of 96 tokens, in batches of 8."""
        if fine and not self.toy:
            settings |= FINE
        return self.model.context(**{"n_ctx": 96, "n_seq": 3, "n_batch": 8, "threads": 1, **settings})

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        """Tokens that look like nothing in particular, and are always the same."""
        return [int(token) for token in np.random.default_rng([seed, 7]).integers(0, 256, count)]

    def cold(self, chunks: list[list[int]], **settings: Any) -> Row:
        """The last row of a fresh context that is given `chunks`, one native step or more each."""
        with self.context(**{"n_seq": 1, **settings}) as ctx:
            for chunk in chunks:
                ctx.decode(chunk)
            return ctx.logits().copy()


def find(name: str, zoo_path: Callable[[str], Path]) -> Subject:
    model = ToyModel(TOYS[name]) if name in TOYS else Model(zoo_path(name))
    return Subject(name, model, NOISE[name])


def divergence(one: Row, other: Row) -> float:
    """KL in nats of `other` from `one`; exactly 0 for the same bits."""
    if one.tobytes() == other.tobytes():
        return 0.0
    left, right = _logp(one), _logp(other)
    # Rounding can take a tiny sum of signed terms below 0.
    return abs(float(np.sum(np.exp(left) * (left - right))))


def _logp(row: Row) -> NDArray[np.float64]:
    scores = row.astype(np.float64)
    scores -= scores.max()
    logp: NDArray[np.float64] = scores - np.log(np.exp(scores).sum())
    return logp


def check(warm: Row, cold: Row, bound: float = 0.0) -> None:
    """Warm equals cold: the same bits, or within `bound` where that is above 0."""
    found = divergence(cold, warm)
    assert found <= bound, f"warm is not cold: KL {found:.3g}, at most {bound:.3g} is noise"
