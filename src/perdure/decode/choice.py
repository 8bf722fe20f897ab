"""Options for going on from a prompt, and how likely a model finds each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from perdure.decode.request import Reply, Request
from perdure.engine.contract import Tokenizer
from perdure.errors import InvalidInputError, TokenError
from perdure.request_options import Sampling

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


class Options:
    """The options of one call, each with the request that scores it. What is wrong with them is raised before
    anything is computed."""

    def __init__(
        self,
        model: Tokenizer,
        prompt: str | Sequence[int],
        options: Sequence[str | Sequence[int]],
        *,
        by: Normalisation,
        namespace: str,
    ) -> None:
        if isinstance(options, str) or not len(options):
            raise InvalidInputError("choose takes a list of options: texts, or lists of token ids")
        if by not in ("total", "token"):
            raise InvalidInputError(f"options are compared by total or by token, got {by!r}")
        before = list(model.tokenize(prompt) if isinstance(prompt, str) else prompt)
        self._options = [option if isinstance(option, str) else tuple(option) for option in options]
        self._tokens = [
            model.tokenize(option, bos=False) if isinstance(option, str) else list(option)
            for option in self._options
        ]
        self._by = by
        if not before or not all(self._tokens):
            raise TokenError("choose needs a prompt and options of at least one token each")
        self.requests = [
            Request(
                prompt=[*before, *own],
                prompt_logprobs=0,
                max_tokens=1,
                sampling=Sampling(temperature=0),
                namespace=namespace,
            )
            for own in self._tokens
        ]

    def ranked(self, scored: Sequence[Reply]) -> list[Choice]:
        """The likeliest first, out of the replies to `requests`."""
        sums = []
        for own, reply in zip(self._tokens, scored, strict=True):
            entries = (reply.prompt_logprobs or ())[-len(own) :]
            sums.append(sum(entry.logprob for entry in entries if entry is not None))
        compared = np.array(
            [
                each / len(own) if self._by == "token" else each
                for each, own in zip(sums, self._tokens, strict=True)
            ]
        )
        # Less the largest, so that nothing overflows; where nothing is possible, all are alike.
        peak = compared.max()
        weights = np.exp(compared - peak) if np.isfinite(peak) else np.ones(len(compared))
        shares = weights / weights.sum()
        every = enumerate(zip(self._options, self._tokens, sums, shares, strict=True))
        found = [
            Choice(
                index=index, option=option, tokens=tuple(own), logprob=float(each), probability=float(share)
            )
            for index, (option, own, each, share) in every
        ]
        return [found[at] for at in np.argsort(-shares, kind="stable")]
