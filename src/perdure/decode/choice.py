"""Options for going on from a prompt, and how likely a model finds each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import numpy as np

from perdure.closing import Closing
from perdure.decode.request import Delta, Reply, Request
from perdure.decode.stream import Stream
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


class OptionScoring(Closing):
    """The options of one call, each with the stream of the request that scores it. What is wrong with them is
    raised before anything is computed."""

    def __init__(
        self,
        model: Tokenizer,
        prompt: str | Sequence[int],
        options: Sequence[str | Sequence[int]],
        submit: Callable[[Request], Stream[Delta, Reply]],
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
        requests = [
            Request(
                prompt=[*before, *own],
                prompt_logprobs=0,
                max_tokens=1,
                sampling=Sampling(temperature=0),
                namespace=namespace,
            )
            for own in self._tokens
        ]
        self.streams: list[Stream[Delta, Reply]] = []
        with ExitStack() as undo:
            undo.callback(self.cancel)
            for request in requests:
                self.streams.append(submit(request))
            undo.pop_all()

    def cancel(self) -> None:
        """End what is left of it."""
        for stream in self.streams:
            stream.cancel()

    close = cancel

    def ranked(self, scored: Sequence[Reply]) -> list[Choice]:
        """The likeliest first, out of the replies of `streams`."""
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
        choices = [
            Choice(
                index=index, option=option, tokens=tuple(own), logprob=float(each), probability=float(share)
            )
            for index, (option, own, each, share) in every
        ]
        return [choices[at] for at in np.argsort(-shares, kind="stable")]
