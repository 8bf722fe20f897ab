"""The models that engine tests run over, toys of both engines, and how exactly each repeats itself."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from numpy.typing import NDArray

import zoo
from perdure import Context, Model
from perdure.engine.model import EngineModel as AnyModel
from perdure.engine.registry import open_model
from perdure.memory import MEMORY_KINDS, MemorySpec
from perdure.testing.toy import ToyModel
from zoo import folders

Row = NDArray[np.float32]

TOYS = {f"toy-{kind.name}": kind for kind in MEMORY_KINDS}
MLX = {f"mlx-{name}": name for name in folders.FOLDERS} if folders.HERE else {}
NEXT_TOKEN = ["deepseek2-mtp", "step35-mtp", "qwen35-mtp"]
"""Models whose contexts have their next-token layers too."""
DRAFTED = {"gemma4-drafted": ("gemma4", "gemma4-assistant")}
"""Models whose contexts have a drafter that reads their hidden states, and that drafter."""
NAMES = [*TOYS, *zoo.names(), *NEXT_TOKEN, *DRAFTED, *MLX]
SOAKED = [*NEXT_TOKEN, *DRAFTED, *(name for name in MLX if name != "mlx-llama")]
"""Those that run over all suites only in `make soak`: they take long, or tests of their own say most."""


ALIKE = ("qwen3", "qwen3moe", "deepseek2", "mlx-llama")
"""Those whose kind of memory another one has: they run in `make test-all`."""


def every(names: Iterable[str]) -> list[Any]:
    """The parameters of a test over these models."""
    marks = {**dict.fromkeys(ALIKE, pytest.mark.full), **dict.fromkeys(SOAKED, pytest.mark.soak)}
    guess, folder = [pytest.mark.extension("speculation")], [pytest.mark.extension("mlx")]
    return [
        pytest.param(
            name,
            marks=[
                *([marks[name]] if name in marks else []),
                *(guess if name in (*NEXT_TOKEN, *DRAFTED) else []),
                *(folder if name in MLX else []),
            ],
        )
        for name in names
    ]


# With these the engine rounds least: no half-precision sums over cells, whose order then hardly matters.
FINE = {"flash": False, "k_type": "f32", "v_type": "f32"}
# Nearly as fine, and state can still be cut by token.
PRECISE = {"k_type": "f32", "v_type": "f32"}

NARROW = 3
"""Tokens a step in tests that compare any history with a cold run: steps of 1, 2 and 3 tokens are computed
alike on many CPUs. Where they are not, such tests use `PRECISE` and a bound that is measured: `compared`."""


@dataclass(frozen=True)
class Noise:
    """The KL that rounding makes of the same tokens in other batch shapes or other cells, at most.

    With the usual settings, and with those above. Measured: docs/measurements/exactness.md.
    """

    usual: float
    fine: float


NOISE = {
    **dict.fromkeys(TOYS, Noise(0.0, 0.0)),
    # Its sums are in 32 bits, of other orders in other shapes on some processors.
    **dict.fromkeys(MLX, Noise(1e-9, 1e-9)),
    "llama": Noise(2.2e-4, 1e-10),
    "qwen3": Noise(2.1e-4, 1e-10),
    "qwen3moe": Noise(1.5e-3, 1e-10),
    "deepseek2": Noise(1.4e-2, 1e-10),
    "deepseek2-mtp": Noise(1.4e-2, 1e-10),
    "gemma3": Noise(2.3e-4, 1e-6),
    "step35-mtp": Noise(2.3e-4, 1e-6),
    "gemma4-drafted": Noise(2.3e-4, 1e-6),
    "qwen35-mtp": Noise(2.1e-4, 1e-10),
    "mamba": Noise(1e-8, 1e-8),
    "jamba": Noise(2.1e-4, 1e-10),
}


ON_A_GPU = {**dict.fromkeys(NOISE, Noise(8e-4, 8e-4)), "mamba": Noise(4.5e-4, 4.5e-4)}
"""A GPU sums in another order for every shape, and in fewer bits (TF32), with any settings."""


@dataclass(frozen=True)
class Compared:
    """How histories of narrow steps are compared on this machine: with which settings, and how closely."""

    bound: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)


measurements: Path | None = None
"""Where the processes of a run that has several keep what one of them measured."""


_LEAST_ON_A_GPU = 8e-4 / 64
"""The noise that narrow steps are taken to have there: the few that are measured may be alike by chance."""


@functools.cache
def _compared(model: Model, items: tuple[tuple[str, Any], ...]) -> Compared:
    wanted = dict(items)
    if measurements is None:
        return _measured(model, wanted)
    named = repr((str(model.path), model.gpu_layers, items))
    kept = measurements / f"compared-{hashlib.sha256(named.encode()).hexdigest()[:16]}.json"
    with FileLock(kept.with_suffix(".lock")):
        if not kept.exists():
            found = _measured(model, wanted)
            kept.write_text(json.dumps({"bound": found.bound, "settings": dict(found.settings)}))
        return Compared(**json.loads(kept.read_text()))


def _measured(model: Model, wanted: Mapping[str, Any]) -> Compared:
    # On a GPU other sequences in a step change its kernels too: that some steps are alike says nothing.
    if not model.gpu_layers and _floor(model, wanted) == 0:
        return Compared()
    settings = {**PRECISE, **wanted}
    floor = max(_floor(model, settings), _LEAST_ON_A_GPU if model.gpu_layers else 0.0)
    # A wide margin, since histories are many and the texts measured few; one wrong token makes far more.
    wrong = _least_error(model, settings)
    bound = min(max(1e-9, 64 * floor), wrong / 4)
    assert bound >= 2 * floor, f"noise of KL {floor:.2g} here cannot be told from an error of {wrong:.2g}"
    return Compared(bound, settings)


def compared(model: AnyModel, **settings: Any) -> Compared:
    """How to compare histories of narrow steps of `model`: bit for bit where this machine rounds all narrow
    steps alike, else with the finest settings that `settings` leave, within noise that is measured here."""
    if isinstance(model, ToyModel):
        return Compared()
    if not isinstance(model, Model):
        return Compared(1e-9)
    return _compared(model, tuple(sorted(settings.items())))


def _floor(model: Model, settings: Mapping[str, Any]) -> float:
    """The most that narrow steps of other widths make of the same tokens."""
    found = 0.0
    for length in (9, 25, 40, 70, 110, 150):
        rows = [
            _row(model, _tokens(length, 90 + length), n_batch, settings) for n_batch in range(1, NARROW + 1)
        ]
        found = max(found, *(divergence(one, other) for one, other in itertools.permutations(rows, 2)))
    return found


def _least_error(model: Model, settings: Mapping[str, Any]) -> float:
    """The least that one wrong token makes."""
    tokens = _tokens(70, 5)
    true = _row(model, tokens, NARROW, settings)
    places = range(0, 69, 6)
    return min(
        divergence(
            true, _row(model, [*tokens[:at], (tokens[at] + 1) % 256, *tokens[at + 1 :]], NARROW, settings)
        )
        for at in places
    )


def _row(model: Model, tokens: list[int], n_batch: int, settings: Mapping[str, Any]) -> Row:
    with model.context(n_ctx=256, n_seq=1, n_batch=n_batch, threads=1, **settings) as ctx:
        ctx.decode(tokens)
        return ctx.logits().copy()


def _tokens(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng([seed, 7]).integers(0, 256, count)]


@dataclass(frozen=True)
class Subject:
    """One model, and how far apart the same tokens can be on it."""

    name: str
    model: AnyModel
    rounding: Noise
    assistant: Model | None = None
    """What guesses for it."""

    @property
    def on_gpu(self) -> bool:
        return isinstance(self.model, Model) and self.model.gpu_layers > 0

    @property
    def apart(self) -> float:
        """How many times the noise of the fine settings one wrong token makes at least."""
        return 1.0 if self.on_gpu else 100.0

    @property
    def narrow(self) -> Compared:
        """How histories of narrow steps are compared with a cold run."""
        return compared(self.model)

    def narrow_bound(self, *, fine: bool) -> float:
        """The same, in streams, where the fine settings are asked for."""
        if not fine:
            return self.narrow.bound
        return self.rounding.fine if self.narrow.bound else 0.0

    @property
    def routes(self) -> bool:
        """Whether tokens are sent to experts: rounding can send one to another expert, which is no bound
        on anything, so that only the fine settings tell noise from error."""
        return self.name in ("qwen3moe", "deepseek2", "deepseek2-mtp", "mlx-qwen3moe", "mlx-llama4")

    @property
    def kind(self) -> type[MemorySpec]:
        return self.model.memory.kind

    @property
    def toy(self) -> bool:
        """Whether it repeats itself to the bit in any batch."""
        return isinstance(self.model, ToyModel)

    def context(self, *, fine: bool = False, **settings: Any) -> Context:
        """A small context: three sequences of 96 tokens, in batches of 8."""
        if fine and isinstance(self.model, Model):
            settings |= FINE
        if self.name in NEXT_TOKEN:
            settings |= {"mtp": True}
        if self.assistant is not None:
            settings |= {"assistant": self.assistant}
        return self.model.context(**{"n_ctx": 96, "n_seq": 3, "n_batch": 8, "threads": 1, **settings})

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        """Tokens that look like nothing in particular, and are always the same."""
        return _tokens(count, seed)

    def cold(self, chunks: list[list[int]], **settings: Any) -> Row:
        """The last row of a fresh context that is given `chunks`, one native step or more each."""
        with self.context(**{"n_seq": 1, **settings}) as ctx:
            for chunk in chunks:
                ctx.decode(chunk)
            return ctx.logits().copy()


def find(name: str, zoo_path: Callable[[str], Path]) -> Subject:
    model: AnyModel
    assistant = None
    if name in MLX:
        model = open_model(zoo_path(name), {}, cells=0)
    elif name in NEXT_TOKEN:
        model = Model(zoo_path(name), mtp=True)
    elif name in DRAFTED:
        model, assistant = (Model(zoo_path(each)) for each in DRAFTED[name])
    else:
        model = ToyModel(TOYS[name]) if name in TOYS else Model(zoo_path(name))
    on_gpu = isinstance(model, Model) and model.gpu_layers > 0
    return Subject(name, model, (ON_A_GPU if on_gpu else NOISE)[name], assistant)


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
