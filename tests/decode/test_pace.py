"""Chunks by time: what a running reply is held up by, learned from the steps themselves."""

from __future__ import annotations

import pytest

from perdure.decode.scheduling.pace import Pace


def settled(
    seconds_a_token: float, overhead: float = 0.0, *, stall: float = 0.05, largest: int = 2048
) -> int:
    pace = Pace(chunk=64, largest=largest, stall=stall)
    for _ in range(60):
        pace.observe(pace.chunk, overhead + pace.chunk * seconds_a_token)
    return pace.chunk


@pytest.mark.parametrize(("speed", "expected"), [(1_000, 50), (10_000, 500), (1_000_000, 2048), (10, 16)])
def test_a_chunk_takes_as_long_as_a_reply_may_be_held_up(speed: float, expected: int) -> None:
    assert settled(1 / speed) == pytest.approx(expected, abs=1)


def test_what_a_step_costs_besides_its_tokens_is_part_of_the_time() -> None:
    chunk = settled(1e-4, 0.01)
    assert 0.045 <= 0.01 + chunk * 1e-4 <= 0.055


def test_a_single_slow_step_is_soon_forgotten() -> None:
    pace = Pace(chunk=64, largest=2048, stall=0.05)
    for _ in range(40):
        pace.observe(pace.chunk, pace.chunk / 10_000)
    pace.observe(pace.chunk, 5.0)
    assert pace.chunk >= 200
    for _ in range(10):
        pace.observe(pace.chunk, pace.chunk / 10_000)
    assert pace.chunk == pytest.approx(500, abs=5)


def test_short_steps_say_nothing_and_a_stall_of_0_keeps_the_chunk() -> None:
    pace = Pace(chunk=64, largest=2048, stall=0.05)
    pace.observe(15, 9.0)
    assert pace.chunk == 64
    fixed = Pace(chunk=64, largest=2048, stall=0)
    fixed.observe(64, 9.0)
    assert fixed.chunk == 64


def test_no_chunk_is_larger_than_a_step() -> None:
    assert settled(1e-6, largest=8) == 8
