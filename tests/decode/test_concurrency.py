"""A request alone against the same request in a crowd (C10, K5), and what a crowd leaves behind."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import perdure
from decode.observed import check_delivery, check_idle, read
from inside import inside
from perdure import LogitsView, Model, Reply, Runtime, Stream, models
from perdure.decode.output_queue import OutputQueue
from perdure.decode.request import Processor
from perdure.decode.sampling.sampler import Sampler
from perdure.decode.sequence import SequenceGroup, TokenSequence
from perdure.testing.toy import ToyModel

Row = NDArray[np.float32]

CROWD_KL = 4e-2
"""KL in nats of a token's distribution in a crowd from that alone, at most: "Crowds" in
docs/measurements/exactness.md."""
CROWD_MEAN = 3e-3
"""The mean of many."""

TEXT = (
    "The little town lay in a valley between two rivers, and on market days people came from far away to "
    "sell wool, copper pots, honey and news. Nobody could say who had built the old bridge. Some said that "
    "it was older than the rivers themselves, which made the miller laugh every time he heard it told."
)


@dataclass(frozen=True)
class Ask:
    """A request as the crowds of this module make it."""

    start: int
    length: int
    count: int
    seed: int | None

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        return [tokens[(self.start + at) % len(tokens)] for at in range(self.length)]

    @property
    def settings(self) -> dict[str, Any]:
        if self.seed is None:
            return {"temperature": 0, "max_tokens": self.count}
        return {"temperature": 0.8, "repeat_penalty": 1.3, "seed": self.seed, "max_tokens": self.count}


def asks(longest: int, most: int) -> st.SearchStrategy[Ask]:
    return st.builds(
        Ask,
        start=st.integers(0, 60),
        length=st.integers(1, longest),
        count=st.integers(1, most),
        seed=st.none() | st.integers(0, 9),
    )


def random_asks(dice: random.Random, count: int, longest: int, most: int) -> list[Ask]:
    return [
        Ask(
            dice.randrange(60),
            dice.randint(1, longest),
            dice.randint(2, most),
            dice.choice([None, None, 7, 8]),
        )
        for _ in range(count)
    ]


def serve(rt: Runtime, crowd: Sequence[Ask], tokens: Sequence[int], stagger: Sequence[int]) -> list[Reply]:
    """All of them, each asked for when the one before has given so many deltas; some others are dropped."""
    jobs: list[Stream[Any, Any]] = []
    for ask, wait in zip(crowd, stagger, strict=True):
        jobs.append(rt.submit(ask.prompt(tokens), **ask.settings))
        passer_by = rt.submit(ask.prompt(tokens)[::-1], **ask.settings)
        reader = iter(jobs[-1])
        for _ in range(wait):
            next(reader, None)
        passer_by.cancel()
    return [job.reply() for job in jobs]


# Toy models.


@pytest.fixture(scope="module")
def zoo_model(zoo_path: Callable[[str], Path]) -> Callable[[str], Model]:
    known: dict[str, Model] = {}

    def find(name: str) -> Model:
        return known.setdefault(name, known.get(name) or Model(zoo_path(name)))

    return find


def compare_in_exact_mode(model: Model, crowd: Sequence[Ask], stagger: Sequence[int]) -> None:
    tokens = model.tokenize(TEXT)
    size: dict[str, Any] = {"n_ctx": 256, "threads": 1, "exact": True}
    apart = []
    for ask in crowd:
        with perdure.open(model, slots=1, **size) as rt:
            apart.append(rt.generate(ask.prompt(tokens), **ask.settings).tokens)
    with perdure.open(model, slots=3, **size) as rt:
        together = [reply.tokens for reply in serve(rt, crowd, tokens, stagger)]
    assert together == apart


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
@given(crowd=st.lists(asks(150, 12), min_size=1, max_size=5), data=st.data())
@settings(max_examples=8)
def test_in_exact_mode_a_crowd_changes_no_bit_of_a_reply(
    name: str, crowd: list[Ask], data: st.DataObject, zoo_model: Callable[[str], Model]
) -> None:
    stagger = data.draw(st.lists(st.integers(0, 3), min_size=len(crowd), max_size=len(crowd)))
    compare_in_exact_mode(zoo_model(name), crowd, stagger)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3moe", "deepseek2", "gemma3", "mamba", "jamba"])
@given(crowd=st.lists(asks(200, 20), min_size=2, max_size=8), data=st.data())
@settings(max_examples=150)
def test_in_exact_mode_no_crowd_of_many_changes_a_bit_of_a_reply(
    name: str, crowd: list[Ask], data: st.DataObject, zoo_model: Callable[[str], Model]
) -> None:
    stagger = data.draw(st.lists(st.integers(0, 3), min_size=len(crowd), max_size=len(crowd)))
    compare_in_exact_mode(zoo_model(name), crowd, stagger)


# The real model.


@pytest.fixture(scope="module")
def real() -> Iterator[Model]:
    with Model(models.path()) as model:
        yield model


class Apart:
    """What each request gets alone in exact mode, computed once."""

    def __init__(self, model: Model) -> None:
        self._tokens = model.tokenize(TEXT)
        self._known: dict[Ask, tuple[int, ...]] = {}
        self._model = model

    def reply(self, ask: Ask) -> tuple[int, ...]:
        if ask not in self._known:
            with perdure.open(self._model, n_ctx=256, slots=1, threads=1, exact=True) as rt:
                self._known[ask] = rt.generate(ask.prompt(self._tokens), **ask.settings).tokens
        return self._known[ask]


def crowds_of_the_real_model(model: Model, *, crowds: int, pool: int, longest: int) -> None:
    dice = random.Random(1)
    known = Apart(model)
    everybody = random_asks(dice, pool, longest, 8)
    tokens = model.tokenize(TEXT)
    served = 0
    with perdure.open(model, n_ctx=256, slots=4, threads=1, exact=True) as rt:
        for _ in range(crowds):
            crowd = dice.choices(everybody, k=dice.randint(2, 5))
            stagger = [dice.randint(0, 2) for _ in crowd]
            for ask, reply in zip(crowd, serve(rt, crowd, tokens, stagger), strict=True):
                assert reply.tokens == known.reply(ask)
                served += 1
        check_idle(rt)
    print(f"{served} replies in {crowds} crowds, all of them bit for bit those of {pool} requests alone")


@pytest.mark.model
def test_the_real_model_answers_in_a_crowd_as_alone_in_exact_mode(real: Model) -> None:
    """C10: a share of the two hundred crowds below."""
    crowds_of_the_real_model(real, crowds=2, pool=3, longest=40)


@pytest.mark.model
@pytest.mark.soak
def test_the_real_model_answers_in_two_hundred_crowds_as_alone_in_exact_mode(real: Model) -> None:
    """C10"""
    crowds_of_the_real_model(real, crowds=200, pool=40, longest=80)


def recorder(rows: list[Row], script: Sequence[int] | None = None) -> Processor:
    """Keeps each row; with a script, has the reply follow it, so that rows can be compared one by one."""

    def look(tokens: Sequence[int], logits: LogitsView) -> Row:
        rows.append(logits.copy())
        if script is None:
            return rows[-1]
        forced = np.full(logits.size, -np.inf, np.float32)
        forced[script[len(rows) - 1]] = 0
        return forced

    return look


def divergence(one: Row, other: Row) -> float:
    left, right = (row.astype(np.float64) - row.max() for row in (one, other))
    left, right = (row - np.log(np.exp(row).sum()) for row in (left, right))
    return abs(float(np.sum(np.exp(left) * (left - right))))


def alone(model: Model, asks: Sequence[Ask]) -> tuple[list[tuple[int, ...]], list[list[Row]]]:
    """What each request writes with nobody beside it, and the rows that it is drawn from."""
    tokens = model.tokenize(TEXT)
    scripts: list[tuple[int, ...]] = []
    apart: list[list[Row]] = []
    for ask in asks:
        with perdure.open(model, n_ctx=256, slots=1, threads=1, cache=0) as rt:
            apart.append([])
            wanted = {**ask.settings, "processors": [recorder(apart[-1])], "ignore_eos": True}
            scripts.append(rt.generate(ask.prompt(tokens), **wanted).tokens)
    return scripts, apart


def follow(rt: Runtime, prompt: list[int], script: Sequence[int], into: list[Row]) -> Stream[Any, Any]:
    """Have a reply follow `script`, and keep its rows."""
    return rt.submit(prompt, max_tokens=len(script), processors=[recorder(into, script)], ignore_eos=True)


def divergences(model: Model, *, crowds: int, pool: int, longest: int, most: int) -> list[float]:
    """KL in the default mode of each token's distribution in crowds from that of the request alone."""
    dice = random.Random(2)
    tokens = model.tokenize(TEXT)
    everybody = random_asks(dice, pool, longest, most)
    scripts, apart = alone(model, everybody)
    found = []
    with perdure.open(model, n_ctx=256, slots=4, threads=1) as rt:
        for _ in range(crowds):
            chosen = dice.choices(range(pool), k=dice.randint(2, 6))
            rows: list[list[Row]] = [[] for _ in chosen]
            jobs = [
                follow(rt, everybody[at].prompt(tokens), scripts[at], into)
                for at, into in zip(chosen, rows, strict=True)
            ]
            for job, at, into in zip(jobs, chosen, rows, strict=True):
                assert job.reply().tokens == scripts[at]
                found += [divergence(one, other) for one, other in zip(apart[at], into, strict=True)]
    return found


def floor(model: Model, *, pool: int, longest: int, most: int) -> list[float]:
    """The same for requests that are alone both times, when their prompts are read in other steps."""
    tokens = model.tokenize(TEXT)
    everybody = random_asks(random.Random(2), pool, longest, most)
    scripts, apart = alone(model, everybody)
    found = []
    for n_batch in (4, 16, 33, 64, 96):
        for ask, script, before in zip(everybody, scripts, apart, strict=True):
            into: list[Row] = []
            with perdure.open(model, n_ctx=256, slots=1, threads=1, cache=0, n_batch=n_batch) as rt:
                assert follow(rt, ask.prompt(tokens), script, into).reply().tokens == script
            found += [divergence(one, other) for one, other in zip(before, into, strict=True)]
    return found


def report(found: Sequence[float], what: str) -> None:
    ordered = np.sort(found)
    mean, middle, high = ordered.mean(), ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    print(
        f"{what}: {len(ordered)} distributions, KL mean {mean:.1e}, median {middle:.1e}, 99% {high:.1e}, "
        f"largest {ordered[-1]:.1e}; identical {np.mean(ordered == 0):.0%}; bound {CROWD_KL:.0e}"
    )


@pytest.mark.model
def test_in_the_default_mode_a_crowd_moves_the_distributions_by_rounding_only(real: Model) -> None:
    """C10: a share of what is measured below."""
    found = divergences(real, crowds=2, pool=3, longest=40, most=6)
    report(found, "default mode")
    # Short prompts leave no room for steps of many shapes.
    assert max(found) <= CROWD_KL / 4


@pytest.mark.model
@pytest.mark.soak
def test_in_the_default_mode_fifty_crowds_move_the_distributions_by_rounding_only(real: Model) -> None:
    """C10: no more than the noise floor, which is measured beside it."""
    report(noise := floor(real, pool=16, longest=130, most=12), "alone, other steps")
    report(found := divergences(real, crowds=50, pool=16, longest=130, most=12), "default mode")
    for each in (noise, found):
        assert max(each) <= CROWD_KL
        assert np.mean(each) <= CROWD_MEAN


@pytest.mark.model
def test_the_bound_is_below_what_one_wrong_token_makes(real: Model) -> None:
    """The bound has teeth: one token of the prompt changed moves the distribution beyond it."""
    tokens = real.tokenize(TEXT)[:30]
    rows: list[Row] = []
    smallest = np.inf
    with perdure.open(real, n_ctx=256, slots=1, threads=1, cache=0) as rt:
        for place in (None, 5, 15, 25):
            prompt = [token if at != place else tokens[0] for at, token in enumerate(tokens)]
            rt.generate(prompt, max_tokens=1, processors=[recorder(rows)])
            smallest = smallest if place is None else min(smallest, divergence(rows[0], rows[-1]))
    print(f"the least KL of one wrong token: {smallest:.2g}")
    assert smallest > CROWD_KL


# What a crowd leaves.

KEPT = (TokenSequence, SequenceGroup, Stream, OutputQueue, Sampler)


def living() -> int:
    gc.collect()
    return sum(isinstance(each, KEPT) for each in gc.get_objects())


def many_requests(model: Model, count: int, batch: int = 50) -> list[int]:
    """`count` requests through 8 sequences, a third of them cut short; the memory in use on the way."""
    dice = random.Random(3)
    tokens = model.tokenize(TEXT)
    memory: list[int] = []
    reasons: dict[str, int] = {}
    extras: list[dict[str, Any]] = [{}, {}, {"n": 3}, {"logprobs": 2}, {"regex": "[a-z ]{1,40}"}]
    before = living()
    with perdure.open(model, n_ctx=256, slots=8, threads=1, queue=64, cache=4 << 20) as rt:
        for _ in range(count // batch):
            crowd = random_asks(dice, batch, 120, 12)
            jobs = []
            for ask in crowd:
                jobs.append(rt.submit(ask.prompt(tokens), **ask.settings, **dice.choice(extras)))
                if dice.random() < 0.3:
                    dice.choice(jobs).cancel()
            for job in jobs:
                if dice.random() < 0.1:
                    continue
                seen = read(job)
                check_delivery(seen.deltas, job.replies(), model)
                for reason in seen.reasons:
                    reasons[reason] = reasons.get(reason, 0) + 1
            del jobs, job, seen
            rt.generate("all before it are done or dropped", max_tokens=1)
            while rt.load != (0, 0):
                inside(rt).engine_loop.call(lambda: None)
            check_idle(rt)
            assert living() == before
            memory.append(psutil.Process().memory_info().rss)
    print(f"{count} requests through 8 sequences: {reasons}")
    print(f"memory in use, MB, every {batch}: {[round(each / 1e6, 1) for each in memory]}")
    assert reasons.get("cancelled", 0) >= count // 20
    return memory


def test_a_hundred_requests_with_random_cancels_leave_nothing_behind(
    zoo_model: Callable[[str], Model],
) -> None:
    many_requests(zoo_model("llama"), 100)


def test_a_job_that_is_kept_holds_its_replies_and_no_sequence() -> None:
    def sequences() -> int:
        gc.collect()
        return sum(isinstance(each, (TokenSequence, Sampler)) for each in gc.get_objects())

    before = sequences()
    with perdure.open(ToyModel(), n_ctx=64, slots=1) as rt:
        jobs = [rt.submit("Hello", n=2, max_tokens=4), rt.submit("Hello", max_tokens=4)]
        jobs[1].cancel()
        rt.generate("Hello", max_tokens=1)
    assert [len(job.replies()) for job in jobs] == [2, 1]
    assert sequences() == before


@pytest.mark.soak
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_a_thousand_requests_with_random_cancels_leave_nothing_behind(
    name: str, zoo_model: Callable[[str], Model]
) -> None:
    """Memory is flat within 8 MB from the two hundredth request on."""
    memory = many_requests(zoo_model(name), 1000)
    settled = memory[4:]
    assert max(settled) - settled[0] < 8e6
