"""V2: how far is guessed, in a world whose step times and texts are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from perdure.decode.request import Request
from perdure.decode.sampling.grammar import Grammars
from perdure.decode.sampling.stage import BreakerTable
from perdure.decode.scheduler import Budget, Chunk
from perdure.decode.sequence import SequenceGroup, TokenSequence, make_group
from perdure.decode.speculation.drafter import Draft
from perdure.decode.speculation.ngrams import NgramDrafter
from perdure.decode.speculation.speculator import FULL, Speculator, StepCosts
from perdure.engine.adapters import AdapterTable
from perdure.request_options import ADAPT
from perdure.testing.toy import ToyModel

BUDGET = Budget(tokens=512, rows=64, chunk=64)
RIGHT, WRONG = 1, 2
"""Every reply says the first; a guess of the second is wrong."""


class Sometimes:
    """Guesses that are right with a chance."""

    name = "sometimes"

    def __init__(self, chance: Callable[[TokenSequence], float]) -> None:
        self._chance = chance
        self._dice = random.Random(5)

    def draft(self, sequence: TokenSequence, count: int) -> Draft | None:
        chance = self._chance(sequence)
        return Draft([RIGHT if self._dice.random() < chance else WRONG for _ in range(count)], 0.8, self.name)

    def forget(self, sequence: TokenSequence) -> None:
        pass

    def close(self) -> None:
        pass


class World:
    """Replies on a machine where a token more makes a step longer by `slope` of a step."""

    def __init__(self, speculator: Speculator, slope: float) -> None:
        self._speculator = speculator
        self._slope = slope
        model = ToyModel()
        with model.context(n_ctx=4096, n_seq=1) as context:
            self.new: Callable[..., SequenceGroup] = lambda prompt=(1, 2, 3), **asked: make_group(
                Request(prompt=prompt, speculate=ADAPT, **asked),
                model=model,
                piece=model.piece,
                context=context,
                grammars=Grammars(model),
                breakers=BreakerTable(model),
                adapters=AdapterTable(None),
                deadline=None,
            )

    def write(self, tokens: int, streams: int = 1) -> list[tuple[TokenSequence, float]]:
        """Have replies written together: each with its gain over steps without guesses, at its end."""
        groups = [self.new() for _ in range(streams)]
        for group in groups:
            group.sequences[0].tokens.append(RIGHT)
        seconds = 0.0
        ended: dict[TokenSequence, float] = {}
        while len(ended) < streams:
            step = [
                Chunk(group, group.sequences[0], len(group.sequences[0].tokens) - 1, 1) for group in groups
            ]
            self._speculator.add_drafts(step, BUDGET)
            took = self._cost(sum(1 + len(chunk.draft) for chunk in step))
            seconds += took
            for chunk in step:
                right = 0
                while right < len(chunk.draft) and chunk.draft[right] == RIGHT:
                    right += 1
                chunk.sequence.tokens.extend([RIGHT] * (right + 1))
                chunk.settle()
                if chunk.sequence.written >= tokens and chunk.sequence not in ended:
                    ended[chunk.sequence] = (chunk.sequence.written - 1) * self._cost(streams) / seconds
            self._speculator.observe(step, took)
        return list(ended.items())

    def _cost(self, tokens: int) -> float:
        return 0.01 * (1 + self._slope * (tokens - 1))


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6])
def test_no_stream_is_slower_than_98_percent(slope: float, chance: float) -> None:
    world = World(Speculator([Sometimes(lambda _: chance)], n_ctx=4096, clock=lambda: 0.0), slope)
    for _ in range(6):
        for _, gain in world.write(200):
            assert gain >= 0.98


@pytest.mark.parametrize(("slope", "gain"), [(0.0, 8.0), (0.02, 5.0), (0.1, 2.5), (0.5, 1.2)])
def test_right_guesses_make_a_stream_faster(slope: float, gain: float) -> None:
    world = World(Speculator([Sometimes(lambda _: 0.97)], n_ctx=4096, clock=lambda: 0.0), slope)
    world.write(50)
    assert world.write(400)[0][1] > gain


@pytest.mark.parametrize("slope", [0.02, 0.1, 0.5])
def test_who_guesses_wrong_is_not_held_up_by_who_guesses_right(slope: float) -> None:
    lucky: set[TokenSequence] = set()

    def chance(sequence: TokenSequence) -> float:
        if not lucky:
            lucky.add(sequence)
        return 0.97 if sequence in lucky else 0.0

    world = World(Speculator([Sometimes(chance)], n_ctx=4096, clock=lambda: 0.0), slope)
    world.write(50)
    lucky.clear()
    for _, gain in world.write(300, streams=3):
        assert gain >= 0.98


@pytest.mark.parametrize(
    ("costs", "gain"),
    [
        # Steps of 1, 2, 4, 8, 16 and 32 tokens, as a GPU takes them and as a CPU does with Q8_0.
        ((1.0, 1.05, 1.15, 1.4, 2.0, 2.4), 5.0),
        ((1.0, 1.61, 2.44, 3.93, 5.34, 13.95), 1.8),
    ],
)
def test_an_edit_is_copied_over_its_changes(costs: Sequence[float], gain: float) -> None:
    """A reply of 192 tokens repeats a file in which one token of 20 was another."""
    file = [3 if at % 20 == 0 else 10 + at for at in range(1, 241)]
    reply = [10 + at for at in range(1, 193)]
    speculator = Speculator([NgramDrafter()], n_ctx=4096, clock=lambda: 0.0)
    seconds = 0.0
    for _ in range(2):
        # The second has what was measured with the first.
        group = World(speculator, 0.0).new(max_tokens=200, prompt=[*file, 10])
        sequence, seconds = group.sequences[0], 0.0
        sequence.tokens.append(reply[0])
        while sequence.written < len(reply):
            chunk = Chunk(group, sequence, len(sequence.tokens) - 1, 1)
            speculator.add_drafts([chunk], BUDGET)
            took = float(np.interp(1 + len(chunk.draft), (1, 2, 4, 8, 16, 32), costs))
            seconds += took
            rest = reply[sequence.written :]
            right = 0
            while right < min(len(chunk.draft), len(rest)) and chunk.draft[right] == rest[right]:
                right += 1
            sequence.tokens.extend(rest[: right + 1])
            chunk.settle()
            speculator.observe([chunk], took)
    assert (len(reply) - 1) / seconds > gain


def test_a_full_step_gets_no_guesses() -> None:
    speculator = Speculator([Sometimes(lambda _: 1.0)], n_ctx=4096, clock=lambda: 0.0)
    world = World(speculator, 0.0)
    assert world.write(100, streams=FULL - 1)[0][1] > 1
    for sequence, gain in world.write(40, streams=FULL):
        assert gain == pytest.approx(1.0)
        assert sequence.written == 40


def test_costs_are_estimated_between_what_was_measured() -> None:
    costs = StepCosts()
    assert costs.known(1) is None
    costs.observe(1, 1.0)
    assert costs.known(1) == 1.0
    assert costs.seconds(3) == pytest.approx(1.2)
    costs.observe(5, 3.0)
    assert costs.seconds(3) == pytest.approx(2.0)
    # A step that was held up counts for little.
    costs.observe(1, 100.0)
    assert costs.seconds(1) == pytest.approx(1.2)


def test_a_guess_that_takes_longer_than_it_saves_is_given_up() -> None:
    class Slow(Sometimes):
        asked = 0
        now = 0.0

        def draft(self, sequence: TokenSequence, count: int) -> Draft | None:
            Slow.asked += 1
            Slow.now += 0.05
            return super().draft(sequence, count)

    world = World(Speculator([Slow(lambda _: 0.9)], n_ctx=4096, clock=lambda: Slow.now), 0.0)
    world.write(400)
    # Each takes as long as five steps, and promises a few tokens at most.
    assert 0 < Slow.asked < 40
