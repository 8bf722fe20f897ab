"""The contract of a drafter: a source of guesses at the tokens that follow.

`draft` is called in the engine thread, between two steps, for one sequence whose last token was drawn and not
computed yet. It returns a guess at what comes behind that token, or None where it has none; it may wait for
nothing but the computing of a draft model. A guess may be wrong and never does harm: every token of it is
drawn from its own row before it is kept. What is raised counts as no guess, and is logged once.

`forget` is called once when a sequence has ended, so that nothing is kept about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from perdure.decode.sequence import TokenSequence


class Draft(NamedTuple):
    """A guess at the next tokens of a sequence."""

    tokens: Sequence[int]
    confidence: float
    """How likely a token is right whose forerunners are: a first estimate, which measuring corrects."""
    source: str
    """Which drafter it is of."""


class Drafter(Protocol):
    """A source of guesses."""

    @property
    def name(self) -> str: ...

    def draft(self, sequence: TokenSequence, count: int) -> Draft | None:
        """A guess of at most `count` tokens, which is at least 1."""
        ...

    def forget(self, sequence: TokenSequence) -> None:
        """The sequence has ended."""
        ...

    def close(self) -> None: ...
