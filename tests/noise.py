"""How much rounding moves the logits of the toy models: `python tests/noise.py`.

For each model and each way in which the same tokens can be computed otherwise, the largest KL from a fresh
context that decodes them 3 at a time; and, for scale, the smallest KL that one wrong token makes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import zoo
from perdure import Feed
from subjects import Row, Subject, divergence, find


def narrow(subject: Subject, tokens: list[int], dice: np.random.Generator) -> Row:
    """1 to 3 tokens a step, some steps with a neighbour, each sequence in its own stream."""
    with subject.context(n_ctx=512, n_batch=3) as ctx:
        ctx.decode(subject.tokens(20), seq=1)
        at = 0
        while at < len(tokens):
            part = tokens[at : at + int(dice.integers(1, 4))]
            neighbour = [Feed(1, [7])] if len(part) < 3 and dice.random() < 0.5 else []
            ctx.step([Feed(0, part), *neighbour])
            at += len(part)
        return ctx.logits(seq=0).copy()


def chunks(subject: Subject, tokens: list[int], dice: np.random.Generator) -> Row:
    """Batches of 4 to 63 tokens."""
    return subject.cold([tokens], n_ctx=512, n_batch=int(dice.integers(4, 64)))


def tiles(subject: Subject, tokens: list[int], dice: np.random.Generator) -> Row:
    """Batches of 64 tokens and more, for which the engine has another way to compute attention."""
    return subject.cold([tokens], n_ctx=512, n_batch=int(dice.integers(64, 129)))


def company(subject: Subject, tokens: list[int], dice: np.random.Generator) -> Row:
    """Steps with two other sequences, each in its own stream."""
    return _together(subject, tokens, dice, shared=False)


def pool(subject: Subject, tokens: list[int], dice: np.random.Generator) -> Row:
    """Steps with two other sequences in one pool of cells, with and without a kept window."""
    return _together(subject, tokens, dice, shared=True)


def _together(subject: Subject, tokens: list[int], dice: np.random.Generator, *, shared: bool) -> Row:
    with subject.context(n_ctx=512, n_batch=16, shared=shared, swa_full=bool(dice.integers(2))) as ctx:
        at = 0
        while at < len(tokens):
            part = tokens[at : at + int(dice.integers(1, 7))]
            others = [Feed(1, dice.integers(0, 256, int(dice.integers(1, 5)))), Feed(2, [3])]
            ctx.step([Feed(0, part), *(other for other in others if ctx.length(other.seq) < 480)])
            at += len(part)
        return ctx.logits(seq=0).copy()


def wrong(subject: Subject, tokens: list[int], dice: np.random.Generator) -> Row:
    """One token before the last is another one."""
    place = int(dice.integers(len(tokens) - 1))
    other = (tokens[place] + 1 + int(dice.integers(254))) % 256
    return subject.cold([[*tokens[:place], other, *tokens[place + 1 :]]], n_ctx=512, n_batch=3)


WAYS: tuple[Callable[[Subject, list[int], np.random.Generator], Row], ...] = (
    narrow,
    chunks,
    company,
    pool,
    tiles,
    wrong,
)


def measure(subject: Subject, trials: int, longest: int) -> dict[str, list[float]]:
    """The divergences of `trials` random texts for each way."""
    dice = np.random.default_rng(1)
    found: dict[str, list[float]] = {way.__name__: [] for way in WAYS}
    for _ in range(trials):
        tokens = [int(token) for token in dice.integers(0, 256, int(dice.integers(2, longest)))]
        cold = subject.cold([tokens], n_ctx=512, n_batch=3)
        for way in WAYS:
            found[way.__name__].append(divergence(cold, way(subject, tokens, dice)))
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--trials", type=int, default=500)
    options.add_argument("--longest", type=int, default=160)
    chosen = options.parse_args()
    print("| model | " + " | ".join(way.__name__ for way in WAYS) + " |")
    print("|---" * (1 + len(WAYS)) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for name in zoo.names():
            subject = find(name, lambda name: zoo.write(name, Path(folder)))
            found = measure(subject, chosen.trials, chosen.longest)
            *noise, signal = found.values()
            cells = [*(f"{max(values):.1e}" for values in noise), f"{min(signal):.1e}"]
            print(f"| `{name}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
