"""The order of namespaces: weights, one that is alone, priorities in a share, slots that change hands."""

from __future__ import annotations

from typing import Any

import pytest

from decode.observed import Turnstile, open_toy
from inside import inside
from perdure import Runtime
from perdure.decode.scheduler import QueueOrder
from perdure.ext.fairness.order import CREDIT, QUANTUM, FairOrder

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def words(length: int, first: int) -> list[int]:
    return [1 + (first * 31 + at * 7) % 200 for at in range(length)]


def served(rt: Runtime) -> dict[str, float]:
    return {name: share["served"] for name, share in rt.backend.shares().items()}


def test_a_namespace_brings_the_order_and_nothing_else_does() -> None:
    with open_toy() as rt:
        rt.generate([1, 2], max_tokens=1)
        assert type(inside(rt).engine_loop.scheduler.order) is QueueOrder
        assert rt.backend.shares() == {}
        rt.generate([1, 2], max_tokens=1, namespace="a")
        assert type(inside(rt).engine_loop.scheduler.order) is FairOrder
        assert served(rt) == {"a": 2}


def test_one_that_comes_beside_a_flood_has_a_slot_at_once_and_nothing_is_lost() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=1024, slots=2, n_batch=64) as rt:
        prompts = [words(500, at) for at in range(4)]
        flood = [rt.submit(each, max_tokens=200, namespace="a", **GREEDY) for each in prompts]
        gate.pass_through(1100)
        chat = rt.submit(words(20, 9), max_tokens=2, namespace="b", **GREEDY)
        # The step in flight, the prompt, two tokens, and what others write beside them.
        gate.pass_through(64 + 20 + 2 + 10)
        assert chat.done
        assert not any(each.done for each in flood)
        gate.open()
        for job, prompt in zip(flood, prompts, strict=True):
            assert job.reply().tokens == alone(prompt, 200)


def alone(prompt: list[int], count: int) -> tuple[int, ...]:
    with open_toy(n_ctx=1024, slots=1, cache=0) as rt:
        return rt.submit(prompt, max_tokens=count, **GREEDY).reply().tokens


def test_tokens_are_shared_by_weight() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=2048, slots=4, n_batch=64, queue=100) as rt:
        inside(rt).weights = {"heavy": 3, "light": 1}
        gate.reached.clear()
        jobs = [
            rt.submit(words(1000, at), max_tokens=50, namespace=name, **GREEDY)
            for at in range(16)
            for name in ("heavy", "light")
        ]
        gate.pass_through(14_000)
        had = served(rt)
        assert not all(job.done for job in jobs)
        # The second to come had credit.
        assert had["heavy"] / 3 == pytest.approx(had["light"] - CREDIT, abs=QUANTUM)
        gate.open()
        assert all(len(job.reply().tokens) == 50 for job in jobs)


def test_a_namespace_alone_has_all_and_keeps_its_slots() -> None:
    """It computes no token more than without the order."""
    counts = []
    for name in ("", "a"):
        with open_toy(n_ctx=512, slots=2, n_batch=64, cache=0) as rt:
            jobs = [rt.submit(words(200, at), max_tokens=20, namespace=name, **GREEDY) for at in range(5)]
            counts.append([(job.reply().usage, job.reply().timings.prefilled_tokens) for job in jobs])
            if name:
                assert served(rt) == {"a": 5 * (200 + 20 - 1)}
    assert counts[0] == counts[1]


def test_priorities_order_the_requests_of_one_namespace_only() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=1024, slots=1, n_batch=64) as rt:
        flood = [rt.submit(words(300, at), max_tokens=100, namespace="a", **GREEDY) for at in range(8)]
        gate.reached.wait()
        later = rt.submit(words(30, 8), max_tokens=5, namespace="b", priority="background", **GREEDY)
        first = rt.submit(words(20, 9), max_tokens=5, namespace="b", **GREEDY)
        gate.pass_through(64 + 20 + 5)
        assert [first.done, later.done] == [True, False]
        gate.pass_through(64 + 30 + 5)
        assert later.done, "those of another namespace go before it only while that one is behind"
        assert not any(each.done for each in flood)
        gate.open()
        assert all(len(each.reply().tokens) == 100 for each in flood)


def test_an_interactive_request_takes_the_slot_of_one_in_the_background_of_its_namespace() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=1024, slots=1) as rt:
        later = rt.submit([5, 6, 7], max_tokens=40, namespace="a", priority="background", **GREEDY)
        gate.pass_through(20)
        first = rt.submit([9, 8], max_tokens=3, namespace="a", **GREEDY)
        gate.pass_through(6)
        assert first.done
        assert not later.done
        gate.open()
        assert later.reply().tokens == alone([5, 6, 7], 40)


def test_what_was_not_used_is_credit_up_to_a_bound() -> None:
    """One that comes late is not served alone until it has had as much as the others had before."""
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=8192, slots=2, n_batch=64, queue=100) as rt:
        early = [rt.submit(words(6000, at), max_tokens=1, namespace="a", **GREEDY) for at in range(3)]
        gate.pass_through(8000)
        late = rt.submit(words(6000, 7), max_tokens=1, namespace="b", **GREEDY)
        before = served(rt)["a"]
        gate.pass_through(CREDIT + 2000)
        had = served(rt)
        assert had["b"] == pytest.approx(CREDIT + 1000, abs=QUANTUM + 2 * 64)
        assert had["a"] - before == pytest.approx(1000, abs=QUANTUM + 2 * 64)
        gate.open()
        assert all(job.reply().tokens for job in [*early, late])


def test_a_namespace_that_waits_tells_its_lag() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=1024, slots=1, n_batch=64, exact=True) as rt:
        busy = rt.submit(words(50, 1), max_tokens=600, namespace="a", **GREEDY)
        gate.pass_through(200)
        late = rt.submit(words(5, 2), max_tokens=1, namespace="b", **GREEDY)
        gate.pass_through(300)
        share = rt.backend.shares()
        assert CREDIT + 250 <= share["b"]["lag"] <= CREDIT + 350
        assert share["a"]["lag"] == 0
        gate.open()
        assert busy.reply().tokens
        assert late.reply().tokens
        assert rt.backend.shares()["b"]["longest_lag"] > CREDIT + 400
