"""Adapters of requests: each reply is that of its own set, whoever else is served and whatever is kept."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inside import core_of
from perdure.decode.scheduler import BatchScheduler
from perdure.errors import InvalidInputError, ModelNotFoundError
from perdure.testing.toy import ToyModel
from subjects import Subject
from zoo.attention import INVOCATION

from .served import Answer, Served

Find = Callable[[str], Subject]
Names = Callable[[str], Path]
SUBJECTS = ["toy-full", "toy-sliding", "toy-recurrent", "toy-hybrid", "llama"]
ON = " on " + " ".join(map(str, INVOCATION))


@pytest.fixture(params=SUBJECTS)
def adapted(request: pytest.FixtureRequest, find_subject: Find) -> Subject:
    return find_subject(request.param)


def served(subject: Subject, zoo_path: Names, **settings: Any) -> Served:
    """With three adapters: two that are always on, and one that is switched on."""
    if isinstance(subject.model, ToyModel):
        names = {"one": "a", "two": "b", "judge": "c" + ON}
    else:
        files = {"one": "llama-lora", "two": "llama-lora2", "judge": "llama-alora"}
        names = {name: str(zoo_path(file)) for name, file in files.items()}
    return Served(subject, names=names, **settings)


SETS: list[dict[str, float] | None] = [
    None,
    {},
    {"one": 1.0},
    {"one": 0.5},
    {"two": 1.0},
    {"one": 1.0, "two": -0.5},
]


def test_t1_a_set_finds_its_own_state_and_no_other(adapted: Subject, zoo_path: Names) -> None:
    """T1, C11: switching reuses nothing, going back finds what was computed with the same set."""
    prompt = adapted.tokens(40)
    with served(adapted, zoo_path, slots=2) as host:
        for adapters in SETS[1:]:
            answer = host.say(prompt, adapters=adapters)
            assert answer.reused == 0
            assert answer.why in ("no cached prefix matches", "the identity changed in its adapters")
        for adapters in (*SETS[1:], None):
            answer = host.say(prompt, adapters=adapters)
            assert answer.reused == 39, (adapters, answer.why)


def test_no_adapters_named_and_none_at_all_are_one_set(adapted: Subject, zoo_path: Names) -> None:
    prompt = adapted.tokens(40)
    with served(adapted, zoo_path) as host:
        host.say(prompt)
        assert host.say(prompt, adapters={}).reused == 39
        assert host.say(prompt, adapters={"one": 0.0}).reused == 39


def test_what_is_warmed_planned_and_woken_is_that_of_its_set(adapted: Subject, zoo_path: Names) -> None:
    prompt = adapted.tokens(40)
    one = {"one": 1.0}
    with served(adapted, zoo_path, slots=1) as host:
        record = host.cache.warm(prompt, labels=["x"], adapters=one)
        assert record.kept == 40
        assert host.cache.plan(prompt).computed == 40
        assert host.cache.plan(prompt, adapters=one).computed == 0
        assert host.cache.held(prompt) == {}
        assert host.cache.held(prompt, adapters=one)
        host.cache.sleep(prompt, adapters=one)
        assert host.cache.wake(prompt).computed == 40
        assert host.cache.wake(prompt, adapters=one).computed == 0
        identity, blocks = host.cache.pack(prompt, adapters=one)
        assert identity.adapters != host.cache.identity().adapters
        assert host.say([*prompt, 1], adapters=one).reused == 40
    with served(adapted, zoo_path, slots=1) as other:
        assert other.cache.unpack(identity, blocks, adapters=one) == 40
        assert other.say([*prompt, 1], adapters=one).reused == 40
        assert other.say([*prompt, 1]).reused == 0


def test_an_activated_lora_shares_what_comes_before_it(adapted: Subject, zoo_path: Names) -> None:
    """Its state before the invocation is the model's own: it is found there, and left there for others."""
    before, judge = adapted.tokens(40), {"judge": 1.0}
    with served(adapted, zoo_path, slots=1) as host:
        host.say(before)
        answer = host.say([*before, *INVOCATION, 3], adapters=judge)
        assert answer.reused >= 39, answer.why
        again = host.say([*before, *INVOCATION, 3], adapters=judge)
        assert again.reused >= 40, again.why
        assert 39 <= host.say([*before, *INVOCATION, 4]).reused <= 40
        # The next question to it begins behind the first one, whose answer was computed with it.
        assert 39 <= host.say([*answer.tokens, *INVOCATION, 3], adapters=judge).reused <= 42
        assert 39 <= host.say([*before, 5], adapters=judge).reused <= 40


def test_an_adapter_that_is_not_switched_on_changes_nothing(adapted: Subject, zoo_path: Names) -> None:
    prompt = adapted.tokens(30)
    with served(adapted, zoo_path) as host:
        plain = host.say(prompt)
        answer = host.say(prompt, adapters={"judge": 1.0})
        assert answer.reply.tokens == plain.reply.tokens
        assert answer.reused == 29


def test_samples_of_one_prompt_have_its_adapters(adapted: Subject, zoo_path: Names) -> None:
    with served(adapted, zoo_path, slots=2) as host:
        prompt, one = adapted.tokens(20), {"one": 1.0}
        replies = host.submit(prompt, n=3, adapters=one).replies()
        alone = host.say(prompt, adapters=one)
        assert {reply.tokens for reply in replies} == {alone.reply.tokens}


def test_c10_replies_of_different_sets_side_by_side(adapted: Subject, zoo_path: Names) -> None:
    """More requests than slots, of every set at once: each row of each reply is that of its set alone."""
    with served(adapted, zoo_path, slots=3) as host:
        asked = []
        for number, adapters in enumerate([*SETS[1:], {"judge": 1.0}, {"judge": 1.0, "one": 1.0}]):
            prompt = [*adapted.tokens(12, number % 3), *INVOCATION]
            rows: list[Any] = []
            asked.append((prompt, adapters, rows, host.submit(prompt, rows, adapters=adapters, max_tokens=6)))
        for prompt, adapters, rows, stream in asked:
            host.check(Answer(prompt, stream.reply(), rows, adapters))


def test_exact_replies_do_not_depend_on_other_sets(find_subject: Find, zoo_path: Names) -> None:
    for name in ("toy-full", "llama"):
        with served(find_subject(name), zoo_path, slots=3, exact=True, block=16) as host:
            streams = []
            for adapters in ({}, {"one": 1.0}, {"judge": 1.0}):
                prompt = [*find_subject(name).tokens(40), *INVOCATION, 3, 4]
                rows: list[Any] = []
                streams.append((prompt, adapters, rows, host.submit(prompt, rows, adapters=adapters)))
            for prompt, adapters, rows, stream in streams:
                # A cold context reads an activated prompt in two parts, as it is served.
                host.check(Answer(prompt, stream.reply(), rows, adapters))


def test_a_set_keeps_the_engine_for_its_turn(find_subject: Find, zoo_path: Names) -> None:
    """How long that is, `tests/decode/test_scheduler.py` shows."""
    toy = find_subject("toy-full")
    with served(toy, zoo_path, slots=4) as host:
        order: list[str] = []
        core: Any = core_of(host.context)
        adapt, host.engine_loop.scheduler = core.adapt, BatchScheduler(hold=1e9)

        def noted(adapters: Any) -> Any:
            order.append(",".join(sorted(each.digest[:4] for each in adapters)))
            return adapt(adapters)

        core.adapt = noted
        streams = [
            host.submit([number], adapters={"one": 1.0} if number % 2 else {"two": 1.0}, max_tokens=40)
            for number in range(4)
        ]
        for stream in streams:
            stream.reply()
        switches = sum(one != other for one, other in itertools.pairwise(order))
        assert 1 <= switches < 12


@pytest.mark.parametrize(
    "wrong", [{"one": float("nan")}, {"one": "1"}, {"": 1.0}, ["one"], {str(n): 1.0 for n in range(65)}]
)
def test_wrong_adapters_are_refused_before_any_work(find_subject: Find, zoo_path: Names, wrong: Any) -> None:
    with served(find_subject("toy-full"), zoo_path) as host, pytest.raises(InvalidInputError):
        host.say([1, 2, 3], adapters=wrong)


def test_unknown_adapters_are_not_found(find_subject: Find, zoo_path: Names) -> None:
    with served(find_subject("llama"), zoo_path) as host:
        for unknown in ("other", "./missing.gguf", "missing.gguf"):
            with pytest.raises(ModelNotFoundError):
                host.say([1, 2, 3], adapters={unknown: 1.0})
        assert host.engine_loop.load == (0, 0)


def switch_at_random(subject: Subject, zoo_path: Names, switches: int) -> None:
    """Eight conversations under load, each turn with another set: every row of every reply is cold's."""
    dice = random.Random(switches)
    sets = [*SETS[1:], {"judge": 1.0}, {"judge": -0.5, "two": 1.0}]
    with served(subject, zoo_path, slots=3, swap_slots=2, budget=300_000) as host:
        talks: list[list[int]] = [[] for _ in range(8)]
        done = 0
        while done < switches:
            running = []
            for talk in dice.sample(range(8), dice.randrange(1, 7)):
                new = subject.tokens(dice.randrange(1, 9), dice.randrange(50))
                if dice.random() < 0.3:
                    new = [*new, *INVOCATION]
                prompt = [*talks[talk], *new]
                if len(prompt) > 150:
                    prompt = new
                adapters, rows = dice.choice(sets), []  # type: ignore[var-annotated]
                running.append((talk, prompt, adapters, rows, host.submit(prompt, rows, adapters=adapters)))
            for talk, prompt, adapters, rows, stream in running:
                reply = stream.reply()
                host.check(Answer(prompt, reply, rows, adapters))
                talks[talk] = [*prompt, *reply.tokens]
                done += 1
        assert sum(host.slot_cache.reused.values()) > 0


@pytest.mark.parametrize("name", ["toy-full", "toy-hybrid", "llama"])
def test_t1_adapters_switched_under_load(name: str, find_subject: Find, zoo_path: Names) -> None:
    """T1, W≡C: 60 switches over 8 sessions."""
    switch_at_random(find_subject(name), zoo_path, 60)


@pytest.mark.soak
@pytest.mark.parametrize("name", SUBJECTS)
def test_t1_adapters_switched_a_thousand_times(name: str, find_subject: Find, zoo_path: Names) -> None:
    switch_at_random(find_subject(name), zoo_path, 1000)
