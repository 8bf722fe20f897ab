"""How much rounding moves the logits of the toy models: `python tests/noise.py`.

For each model and each way in which the same tokens can be computed otherwise, the largest KL from a fresh
context that decodes them 3 at a time; and, for scale, the smallest KL that one wrong token makes. First with
the usual settings, then with those that round least.
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

N_CTX = 512


class Text:
    """Tokens of one trial, the model that reads them, and the dice for all that is left to chance."""

    def __init__(self, subject: Subject, dice: np.random.Generator, longest: int, *, fine: bool) -> None:
        self.subject = subject
        self.dice = dice
        self.fine = fine
        self.tokens = self.draw(int(dice.integers(2, longest)))

    def draw(self, count: int) -> list[int]:
        return [int(token) for token in self.dice.integers(0, 256, count)]

    def below(self, low: int, high: int | None = None) -> int:
        return int(self.dice.integers(low, high))

    def cold(self, n_batch: int = 3, tokens: list[int] | None = None) -> Row:
        chunks = [self.tokens if tokens is None else tokens]
        return self.subject.cold(chunks, n_ctx=N_CTX, n_batch=n_batch, fine=self.fine)


def narrow(text: Text) -> Row:
    """1 to 3 tokens a step, some steps with a neighbour, each sequence in its own stream."""
    with text.subject.context(n_ctx=N_CTX, n_batch=3, fine=text.fine) as ctx:
        ctx.decode(text.draw(20), seq=1)
        at = 0
        while at < len(text.tokens):
            part = text.tokens[at : at + text.below(1, 4)]
            neighbour = [Feed(1, [7])] if len(part) < 3 and text.below(2) else []
            ctx.step([Feed(0, part), *neighbour])
            at += len(part)
        return ctx.logits(seq=0).copy()


def chunks(text: Text) -> Row:
    """Batches of 4 to 63 tokens."""
    return text.cold(text.below(4, 64))


def tiles(text: Text) -> Row:
    """Batches of 64 tokens and more, for which the engine has another way to compute attention."""
    return text.cold(text.below(64, 129))


def company(text: Text, *, shared: bool = False) -> Row:
    """Steps with two other sequences, each in its own stream."""
    swa_full = bool(text.below(2))
    with text.subject.context(
        n_ctx=N_CTX, n_batch=16, shared=shared, swa_full=swa_full, fine=text.fine
    ) as ctx:
        at = 0
        while at < len(text.tokens):
            part = text.tokens[at : at + text.below(1, 7)]
            others = [Feed(1, text.draw(text.below(1, 5))), Feed(2, [3])]
            ctx.step([Feed(0, part), *(other for other in others if ctx.length(other.seq) < N_CTX - 8)])
            at += len(part)
        return ctx.logits(seq=0).copy()


def pool(text: Text) -> Row:
    """The same in one pool of cells."""
    return company(text, shared=True)


def holes(text: Text) -> Row:
    """One pool in which others come and go, so that cells lie in any order."""
    with text.subject.context(n_ctx=N_CTX, n_batch=3, shared=True, fine=text.fine) as ctx:
        at = 0
        while at < len(text.tokens):
            part = text.tokens[at : at + text.below(1, 3)]
            for other in (1, 2):
                if ctx.length(other) > text.below(20, 60):
                    ctx.clear(other)
            ctx.decode(text.draw(text.below(1, 9)), seq=text.below(1, 3))
            ctx.decode(part)
            at += len(part)
        return ctx.logits().copy()


def wrong(text: Text) -> Row:
    """One token before the last is another one."""
    place = text.below(len(text.tokens) - 1)
    other = (text.tokens[place] + 1 + text.below(254)) % 256
    return text.cold(tokens=[*text.tokens[:place], other, *text.tokens[place + 1 :]])


WAYS: tuple[Callable[[Text], Row], ...] = (narrow, chunks, company, pool, holes, tiles, wrong)


def measure(subject: Subject, trials: int, longest: int, *, fine: bool) -> list[str]:
    """For each way the largest divergence of `trials` texts, and the smallest of the wrong ones."""
    dice = np.random.default_rng(1)
    found: dict[str, list[float]] = {way.__name__: [] for way in WAYS}
    for _ in range(trials):
        text = Text(subject, dice, longest, fine=fine)
        cold = text.cold()
        for way in WAYS:
            found[way.__name__].append(divergence(cold, way(text)))
    return [f"{(min if way == 'wrong' else max)(values):.1e}" for way, values in found.items()]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", default=zoo.names(), help="models, all of them if none is named")
    options.add_argument("--trials", type=int, default=200)
    options.add_argument("--longest", type=int, default=160)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for fine in (False, True):
            print("| model | " + " | ".join(way.__name__ for way in WAYS) + " |")
            print("|---" * (1 + len(WAYS)) + "|")
            for name in chosen.names:
                subject = find(name, lambda name: zoo.write(name, Path(folder)))
                figures = measure(subject, chosen.trials, chosen.longest, fine=fine)
                print(f"| `{name}` | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
