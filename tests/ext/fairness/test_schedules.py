"""Random schedules: nobody who waits is behind by more than the bound, replies are as alone."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from ext.fairness.schedules import Asked, CheckedOrder, Schedule, play, schedules
from perdure.ext.fairness.order import FairOrder

FLOOD = tuple(Asked("a", 60 + at, 40) for at in range(8))
BESIDE = tuple(Asked("b", 20 + at, 20) for at in range(6))


def check(schedule: Schedule) -> None:
    assert play(schedule).broken == []


@settings(
    max_examples=20,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(schedule=schedules())
def test_the_bound_holds_and_each_reply_is_as_alone(schedule: Schedule) -> None:
    check(schedule)


@pytest.mark.soak
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedule=schedules(30))
def test_the_bound_holds_for_long(schedule: Schedule) -> None:
    check(schedule)


@pytest.mark.parametrize("exact", [False, True])
def test_a_flood_beside_another_namespace(exact: bool) -> None:
    order = play(Schedule({"a": 1, "b": 2}, FLOOD + BESIDE, slots=2, exact=exact))
    assert order.broken == []
    assert exact or order.checked > 20


# Planted: without a mechanism, the check sees it.


def test_an_order_that_takes_no_slot_from_those_ahead_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairOrder, "_ahead", lambda self, wanting, having, slots: None)
    first = (Asked("a", 100, 150), Asked("a", 101, 150), Asked("a", 102, 1, after=40))
    order = play(Schedule({"a": 1, "b": 5}, first + BESIDE, slots=2))
    assert any("tokens behind" in each for each in order.broken)


def test_an_order_that_reads_prompts_as_they_come_is_seen() -> None:
    class Plain(CheckedOrder):
        def prompts(self, prefills, turn):  # type: ignore[no-untyped-def]
            super().prompts(prefills, turn)
            return super(FairOrder, self).prompts(prefills, turn)

    long = tuple(Asked("b", 150 + at, 2) for at in range(6))
    order = play(Schedule({"a": 1, "b": 5}, FLOOD + long, slots=3), Plain(3))
    assert any("was read before" in each for each in order.broken)
