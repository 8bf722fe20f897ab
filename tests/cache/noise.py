"""How far kept state may move logits by rounding alone: `cd tests && python -m cache.noise`.

For each model, over random texts: the largest KL between two fresh contexts that read the same tokens in
other shapes (all at once, 64 at a time, 16, 3, one by one), every pair; the largest KL of a row that was
drawn from after a random history of reuse, from a fresh context; and, for scale, the smallest KL that a
single wrong token makes. The bounds of the tests stand in `served.py`.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from subjects import Row, Subject, divergence, find

from .served import BOUND, Answer, Served
from .state_machine import LONGEST, N_CTX

SHAPES = (N_CTX, 64, 16, 3, 1)


def cold(subject: Subject, tokens: list[int], n_batch: int) -> Row:
    return subject.cold([tokens], n_ctx=N_CTX, n_batch=n_batch)


def floor(subject: Subject, dice: np.random.Generator) -> tuple[float, float]:
    """The most that shapes make of one text, and what one wrong token in it makes."""
    tokens = [int(token) for token in dice.integers(0, 256, int(dice.integers(8, LONGEST)))]
    rows = [cold(subject, tokens, shape) for shape in SHAPES]
    place = int(dice.integers(len(tokens) - 1))
    wrong = [*tokens[:place], (tokens[place] + 1 + int(dice.integers(254))) % 256, *tokens[place + 1 :]]
    pairs = itertools.permutations(rows, 2)
    return max(divergence(one, other) for one, other in pairs), divergence(
        rows[0], cold(subject, wrong, N_CTX)
    )


def reuse(subject: Subject, dice: np.random.Generator) -> float:
    """The most that a history of eight turns on two slots makes of its rows."""
    worst = 0.0
    settings: dict[str, Any] = {"n_batch": int(dice.choice([16, 64])), "shared": bool(dice.integers(2))}
    with Served(subject, slots=2, n_ctx=N_CTX, swa_full=bool(dice.integers(2)), **settings) as served:
        held: list[list[int]] = [[], [], []]
        for _ in range(8):
            which = int(dice.integers(3))
            kept = held[which][: max(0, len(held[which]) - int(dice.choice([0, 0, 4, 30])))]
            new = [int(token) for token in dice.integers(0, 256, int(dice.integers(1, 30)))]
            prompt = [*kept, *new][: LONGEST - 4]
            rows: list[Row] = []
            reply = served.submit(prompt, rows).reply()
            held[which] = [*prompt, *reply.tokens]
            answer = Answer(prompt, reply, rows)
            for warm, fresh in zip(rows, served.cold(answer), strict=False):
                worst = max(worst, divergence(fresh, warm))
    return worst


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--trials", type=int, default=300)
    options.add_argument("models", nargs="*", default=zoo.names())
    chosen = options.parse_args()
    print("| model | shapes | reuse | one wrong token | bound |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.models:
            subject = find(name, lambda name: zoo.write(name, Path(folder)))
            dice = np.random.default_rng(5)
            found = [(*floor(subject, dice), reuse(subject, dice)) for _ in range(chosen.trials)]
            shapes, wrong, warm = zip(*found, strict=True)
            cells = [max(shapes), max(warm), min(wrong), BOUND[name]]
            print(f"| `{name}` | {' | '.join(f'{cell:.1e}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()
