"""V1 on both engines: at equal shapes a reply that guesses has the tokens of a plain loop, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import subjects
from perdure import Context
from perdure.backend import LocalBackend
from perdure.decode.request import Request
from perdure.decode.sampling.sampler import Sampler, draw
from perdure.decode.scheduler import Budget, Step
from perdure.decode.sequence import TokenSequence
from perdure.decode.stream import Stream, one_request
from perdure.engine.registry import open_model
from perdure.engine_config import EngineConfig
from perdure.request_options import Sampling

SETTINGS: dict[str, Any] = {"n_ctx": 256, "threads": 1}
every_memory = pytest.mark.parametrize(
    "name", subjects.every(["llama", "gemma3", "mamba", "jamba", *subjects.MLX])
)


class Recorded:
    """Guesses by chance, from a reply that is known and with mistakes; keeps what it guessed."""

    def __init__(self, dice: random.Random) -> None:
        self.known: Sequence[int] = ()
        self.drafts: dict[int, list[int]] = {}
        """By how long the sequence was."""
        self._dice = dice

    def propose(self, step: Step, budget: Budget) -> None:
        for chunk in step:
            if chunk.takes_guesses:
                chunk.draft = self.guesses(chunk.sequence, chunk.sequence.request.speculate)

    def guesses(self, sequence: TokenSequence, count: int) -> Sequence[int]:
        count = min(count, sequence.room - 1)
        tokens = list(self.known[sequence.written :][: self._dice.randrange(max(0, count) + 1)])
        if tokens and self._dice.random() < 0.5:
            tokens[self._dice.randrange(len(tokens))] = self._dice.randrange(256)
        if tokens:
            self.drafts[len(sequence.tokens)] = tokens
        return tokens

    def observe(self, step: Step, seconds: float) -> None:
        pass

    def forget(self, sequence: TokenSequence) -> None:
        pass

    def close(self) -> None:
        pass


def replay(context: Context, request: Request, drafts: dict[int, list[int]]) -> list[int]:
    """A reply by a plain loop over a context that feeds the same tokens in the same steps, and draws each
    token from the row behind the one before."""
    tokens, prompt = list(request.prompt), len(request.prompt)
    sampler = Sampler(request.sampling, n_ctx=context.n_ctx)
    sampler.prime(tokens)
    assert request.max_tokens is not None
    end = prompt + request.max_tokens
    context.clear()
    while True:
        start = context.length()
        guess = drafts.get(len(tokens), [])
        checkpoint = context.checkpoint() if guess and not context.memory.cuts else None
        known = tokens[start:]
        context.decode([*known, *guess], rows=range(len(known) - 1, len(known) + len(guess)))
        right = 0
        while True:
            found = context.read_row(sampler.select, len(known) - 1 + right)
            tokens.append(draw([(sampler, found, len(tokens))])[0])
            if len(tokens) >= end:
                return tokens[prompt:]
            if right == len(guess) or tokens[-1] != guess[right]:
                break
            right += 1
        if right < len(guess):
            if checkpoint is None:
                context.truncate(start + len(known) + right)
            else:
                context.restore(checkpoint)


def check(path: Path, seed: int, requests: int) -> tuple[int, int]:
    dice = random.Random(seed)
    recorded = Recorded(dice)
    drafted = accepted = 0
    with closing(open_model(path, {}, cells=0)) as model:
        config = EngineConfig(slots=1, stall=0, cache=0, **SETTINGS)
        backend = LocalBackend(model, config, drafter=recorded)
        with closing(backend), model.context(n_seq=1, **SETTINGS) as context:
            for _ in range(requests):
                request = Request(
                    prompt=[dice.randrange(256) for _ in range(dice.randrange(2, 30))],
                    max_tokens=dice.randrange(2, 40),
                    # What `ignore_eos` makes of it.
                    sampling=Sampling(
                        temperature=dice.choice([0, 0.8, 1.5]),
                        repeat_penalty=dice.choice([1.0, 1.3]),
                        top_k=dice.choice([0, 40]),
                        seed=dice.randrange(1000),
                    ).without(sorted(model.ends)),
                    ignore_eos=True,
                    loop_guard=0,
                    speculate=dice.randrange(1, 9),
                )
                without = replay(context, request, {})
                recorded.known, recorded.drafts = without, {}
                with Stream(one_request(request), backend.submit) as stream:
                    reply = stream.reply()
                assert list(reply.tokens) == replay(context, request, recorded.drafts), request
                drafted += reply.timings.drafted_tokens
                accepted += reply.timings.accepted_tokens
    return drafted, accepted


@every_memory
def test_guesses_equal_a_plain_loop_of_the_same_steps(zoo_path: Callable[[str], Path], name: str) -> None:
    drafted, accepted = check(zoo_path(name), seed=1, requests=2 if name in subjects.MLX else 6)
    assert drafted > accepted > 0


@pytest.mark.soak
@every_memory
def test_guesses_equal_a_plain_loop_in_a_thousand(zoo_path: Callable[[str], Path], name: str) -> None:
    drafted, accepted = check(zoo_path(name), seed=2, requests=250)
    assert drafted > accepted > drafted / 8
