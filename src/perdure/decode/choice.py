"""Options for going on from a prompt, and how likely a model finds each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from perdure.decode.request import Reply
from perdure.errors import InvalidInputError

Normalisation = Literal["total", "token"]
"""Compare options by their whole log probability, or by that of a token of theirs on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One option: its place among those given, its tokens, and how likely it is."""

    index: int
    option: str | tuple[int, ...]
    tokens: tuple[int, ...]
    logprob: float
    """The natural log probability of all its tokens after the prompt."""
    probability: float
    """Its share among the options. They sum to 1."""

    @property
    def logprob_per_token(self) -> float:
        return self.logprob / len(self.tokens)


def ranked(
    options: Sequence[str | tuple[int, ...]],
    tokens: Sequence[Sequence[int]],
    scored: Sequence[Reply],
    by: Normalisation,
) -> list[Choice]:
    """The options, the likeliest first, out of the scores of the prompt with each of them."""
    if by not in ("total", "token"):
        raise InvalidInputError(f"options are compared by total or by token, got {by!r}")
    sums = []
    for own, reply in zip(tokens, scored, strict=True):
        entries = (reply.prompt_logprobs or ())[-len(own) :]
        sums.append(sum(entry.logprob for entry in entries if entry is not None))
    compared = np.array(
        [each / len(own) if by == "token" else each for each, own in zip(sums, tokens, strict=True)]
    )
    # Less the largest, so that nothing overflows; where nothing is possible, all are alike.
    peak = compared.max()
    weights = np.exp(compared - peak) if np.isfinite(peak) else np.ones(len(compared))
    shares = weights / weights.sum()
    found = [
        Choice(index=index, option=option, tokens=tuple(own), logprob=float(each), probability=float(share))
        for index, (option, own, each, share) in enumerate(zip(options, tokens, sums, shares, strict=True))
    ]
    return [found[at] for at in np.argsort(-shares, kind="stable")]
