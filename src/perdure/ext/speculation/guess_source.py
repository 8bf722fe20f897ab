"""The contract of a source of guesses at the tokens that follow.

`guess` is called in the engine thread, between two steps, for one sequence whose last token was drawn and not
computed yet. It returns a guess at what comes behind that token, or None where it has none; it may wait for
nothing but the computing of a draft model. A guess may be wrong and never does harm: every token of it is
drawn from its own row before it is kept.

`forget` is called once when a sequence has ended, so that nothing is kept about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from perdure.spi.decode import TokenSequence, draw_together
from perdure.spi.engine import Floats


class Guess(NamedTuple):
    """A guess at the next tokens of a sequence."""

    tokens: Sequence[int]
    confidence: float
    """How likely a token is right whose forerunners are: a first estimate, which counting corrects."""
    source: str
    """What it is counted as: guesses of one name are right about as often as each other."""


class GuessSource(Protocol):
    """Something that guesses."""

    @property
    def name(self) -> str: ...

    @property
    def computes(self) -> bool:
        """Whether a guess takes time that counts beside a step, as a model's does."""
        ...

    def guess(self, sequence: TokenSequence, count: int) -> Guess | None:
        """A guess of at most `count` tokens, which is at least 1."""
        ...

    def forget(self, sequence: TokenSequence) -> None:
        """The sequence has ended."""
        ...

    def close(self) -> None: ...


def draw_guess(sequence: TokenSequence, row: Floats, position: int) -> int:
    """The token that a row of other logits gives for a position, by the chain and the random numbers of the
    sequence; the likeliest where its chain is not compiled."""
    rule = sequence.compiled
    if rule is None or (rule.k == 1 and not rule.bias.count):
        return int(row.argmax())
    return draw_together([(sequence.sampler, rule, position)], np.ascontiguousarray(row[None]))[0][0]
