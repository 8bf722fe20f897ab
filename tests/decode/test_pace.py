"""Chunks by time: what a running reply is held up by, learned from the steps themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure import Delta, Reply
from perdure.decode.engine_loop import EngineLoop
from perdure.decode.request import Request
from perdure.decode.scheduler import PrefillPacer
from perdure.decode.stream import Stream, one_request
from perdure.request_options import Sampling
from perdure.testing.toy import ToyModel


def settled(
    seconds_a_token: float, overhead: float = 0.0, *, stall: float = 0.05, largest: int = 2048
) -> int:
    pace = PrefillPacer(chunk=64, largest=largest, stall=stall)
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
    pace = PrefillPacer(chunk=64, largest=2048, stall=0.05)
    for _ in range(40):
        pace.observe(pace.chunk, pace.chunk / 10_000)
    pace.observe(pace.chunk, 5.0)
    assert pace.chunk >= 200
    for _ in range(10):
        pace.observe(pace.chunk, pace.chunk / 10_000)
    assert pace.chunk == pytest.approx(500, abs=5)


def test_short_steps_say_nothing_and_a_stall_of_0_keeps_the_chunk() -> None:
    pace = PrefillPacer(chunk=64, largest=2048, stall=0.05)
    pace.observe(15, 9.0)
    assert pace.chunk == 64
    fixed = PrefillPacer(chunk=64, largest=2048, stall=0)
    fixed.observe(64, 9.0)
    assert fixed.chunk == 64


def test_no_chunk_is_larger_than_a_step() -> None:
    assert settled(1e-6, largest=8) == 8


def stream(loop: EngineLoop, request: Request) -> Stream[Delta, Reply]:
    return Stream(one_request(request), loop.submit)


def test_steps_of_replies_say_nothing_of_how_fast_prompts_are_read() -> None:
    """One token each of many replies takes far longer than as many tokens of one prompt."""
    model = ToyModel()
    with model.context(n_ctx=64, n_seq=20, n_batch=128) as context:
        loop = EngineLoop(model, context, stall=10.0)
        try:
            jobs = [
                stream(loop, Request(prompt=[40 + at], max_tokens=12, ignore_eos=True)) for at in range(20)
            ]
            assert [len(job.reply(60).tokens) for job in jobs] == [12] * 20
            assert loop.pacer.chunk == 64
            stream(loop, Request(prompt=[40] * 50, max_tokens=1)).reply(60)
            assert loop.pacer.chunk == context.n_batch
        finally:
            loop.close()


def test_where_steps_return_before_they_are_computed_readers_get_the_same() -> None:
    model = ToyModel()
    found = []
    for asynchronous in (False, True):
        with model.context(n_ctx=128, n_seq=2, n_batch=32) as context:
            context.capabilities = replace(context.capabilities, asynchronous=asynchronous)
            loop = EngineLoop(model, context)
            try:
                jobs = [
                    stream(loop, Request(prompt=[40 + at] * 40, max_tokens=9, sampling=Sampling(seed=at)))
                    for at in range(2)
                ]
                deltas = [[delta.tokens for delta in job] for job in jobs]
                found.append((deltas, [job.reply(60).text for job in jobs]))
            finally:
                loop.close()
    assert found[0] == found[1]
