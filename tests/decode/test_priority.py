"""Priorities: interactive requests go before background ones, in the queue, in steps, and out of slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import perdure
from decode.observed import Turnstile, open_toy
from perdure import Runtime
from perdure.testing.toy import ToyModel

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LATER: dict[str, Any] = {**GREEDY, "priority": "background"}


@pytest.fixture
def gate() -> Turnstile:
    return Turnstile()


@pytest.fixture
def rt(gate: Turnstile) -> Iterator[Runtime]:
    with open_toy(gate=gate, n_ctx=1024, slots=1) as found:
        yield found
        gate.open()


def alone(prompt: list[int], count: int) -> tuple[int, ...]:
    with perdure.open(ToyModel(), n_ctx=1024, slots=1) as rt:
        return rt.generate(prompt, max_tokens=count, **GREEDY).tokens


def test_who_is_interactive_takes_the_slot_of_who_is_not(rt: Runtime, gate: Turnstile) -> None:
    """The other one goes on later, from what it had, and has the tokens that it has alone."""
    later = rt.submit([5, 6, 7], max_tokens=40, **LATER)
    gate.pass_through(20)
    first = rt.submit([9, 8], max_tokens=3, **GREEDY)
    gate.pass_through(6)
    assert first.done
    assert not later.done
    gate.open()
    assert later.reply().tokens == alone([5, 6, 7], 40)
    assert first.reply().tokens == alone([9, 8], 3)
    assert later.reply().finish_reason == "length"


def test_of_those_who_wait_the_interactive_ones_go_first(rt: Runtime, gate: Turnstile) -> None:
    busy = rt.submit([1, 2], max_tokens=2, **GREEDY)
    gate.reached.wait()
    later = rt.submit([3, 4], max_tokens=2, **LATER)
    first = rt.submit([5, 6], max_tokens=2, **GREEDY)
    busy_tokens, first_tokens = 3, 3
    gate.admit(busy_tokens + first_tokens)
    first.reply()
    assert busy.done
    assert not later.done
    gate.open()
    assert later.reply().tokens == alone([3, 4], 2)


def test_nobody_gives_way_to_one_of_the_same_priority(rt: Runtime, gate: Turnstile) -> None:
    one = rt.submit([1, 2], max_tokens=20, **LATER)
    gate.pass_through(5)
    other = rt.submit([3, 4], max_tokens=1, **LATER)
    gate.pass_through(5)
    assert not other.done
    gate.open()
    assert one.reply().tokens == alone([1, 2], 20)


def test_prompts_in_the_background_are_read_while_no_other_is() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=2048, slots=2) as rt:
        later = rt.submit([40 + at % 90 for at in range(600)], max_tokens=1, **LATER)
        gate.reached.wait()
        first = rt.submit([30 + at % 90 for at in range(300)], max_tokens=1, **GREEDY)
        # The step in flight, and then the other prompt alone.
        gate.admit(512 + 300)
        first.reply()
        assert later.prompt_read <= 512
        gate.open()
        assert len(later.reply().tokens) == 1


def test_samples_of_one_prompt_keep_their_slots() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=512, slots=2) as rt:
        later = rt.submit([1, 2, 3], n=2, max_tokens=12, seed=1, ignore_eos=True, priority="background")
        gate.pass_through(8)
        first = rt.submit([9], max_tokens=1, **GREEDY)
        gate.open()
        assert len(later.replies()) == 2
        assert first.reply().tokens


def test_who_waits_for_the_prefix_of_another_lifts_it() -> None:
    """Else an interactive request would wait behind a background one that itself waits."""
    gate = Turnstile()
    shared = [40 + at % 90 for at in range(400)]
    with open_toy(gate=gate, n_ctx=2048, slots=3) as rt:
        later = rt.submit([*shared, 1], max_tokens=1, **LATER)
        gate.reached.wait()
        same = rt.submit([*shared, 2], max_tokens=1, **GREEDY)
        gate.open()
        assert same.reply().usage.cached_tokens >= 400
        assert later.reply().tokens


def test_a_priority_that_there_is_not_is_refused(rt: Runtime) -> None:
    with pytest.raises(perdure.InvalidInputError, match="priority is one of interactive, background"):
        rt.submit([1], priority="urgent")  # type: ignore[arg-type]
