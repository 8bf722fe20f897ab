"""The model's own next-token layers: they read along, and write a few tokens ahead.

    perdure.open("model.gguf", draft="mtp")

What they hold is a part of each sequence's state, so that they go on where a session wakes, forks or goes
back. They draw with the random numbers that the model will draw with, as a draft model does.
"""

from __future__ import annotations

from perdure.decode.sequence import TokenSequence
from perdure.decode.speculation.drafter import Draft, draw_guess
from perdure.engine.context import Context

GUESSES = 5
"""Tokens that they write ahead, at most: each takes a small step of its own."""


class NextTokenDrafter:
    """Guesses by the layers of the context that computes the replies."""

    name = "mtp"

    def __init__(self, context: Context) -> None:
        self._context = context

    def draft(self, sequence: TokenSequence, count: int) -> Draft | None:
        seq, end = sequence.seq, len(sequence.tokens)
        if seq is None or sequence.cached != end - 1:
            return None
        tokens = self._context.guess(
            sequence.tokens[-1],
            lambda row, position: draw_guess(sequence, row, position),
            seq,
            count=min(count, GUESSES),
        )
        return Draft(tokens, 0.7, self.name) if tokens else None

    def forget(self, sequence: TokenSequence) -> None:
        """Nothing is kept here."""

    def close(self) -> None:
        """The context is closed by its owner."""
