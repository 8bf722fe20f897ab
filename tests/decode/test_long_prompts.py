"""A long prompt holds nobody up: steps bounded by time, newcomers, and what is told meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import perdure
from decode.observed import Turnstile, core, open_toy
from inside import inside
from perdure import Runtime
from perdure.decode.scheduler import LONGEST, TIMED, PrefillPacer

PROMPT = [40 + at % 150 for at in range(200)]


@pytest.fixture
def gate() -> Turnstile:
    return Turnstile()


@pytest.fixture
def rt(gate: Turnstile) -> Iterator[Runtime]:
    with open_toy(gate=gate, n_ctx=1024, slots=2) as found:
        yield found
        gate.open()


@pytest.mark.parametrize("speed", [19.0, 134.0, 1_000.0])
def test_a_step_of_a_prompt_alone_takes_a_second_at_most(speed: float) -> None:
    """H7: also the first one, of which nothing is known."""
    pace = PrefillPacer(chunk=64, largest=512, stall=0.05)
    assert pace.alone == 64
    for _ in range(20):
        pace.observe(pace.alone, pace.alone / speed)
        assert pace.alone / speed <= LONGEST
    assert pace.alone >= min(512, int(speed)) // 16 * 16


def test_steps_that_slow_down_with_the_context_shrink_with_it() -> None:
    pace = PrefillPacer(chunk=64, largest=512, stall=0.05)
    for depth in range(1, 40):
        pace.observe(pace.alone, pace.alone * depth / 1000)
    assert 16 <= pace.alone <= 1.3 * 1000 / 39


def tiled(tokens: int, depth: int) -> float:
    """Seconds of a step behind so many tokens on two slow cores, as measured."""
    each = 4e-3 + depth * (1.2e-6 if tokens >= 64 else 5.1e-6)
    return tokens * each


def test_a_long_context_does_not_drive_steps_below_what_is_computed_in_tiles() -> None:
    """A step of 48 tokens takes longer there than one of 64: each step would be shorter than the last."""
    pace, depth = PrefillPacer(chunk=64, largest=512, stall=0.05), 0
    sizes: list[int] = []
    while depth < 30_000:
        sizes.append(pace.alone)
        depth += pace.alone
        pace.observe(pace.alone, tiled(pace.alone, depth))
    assert sum(size < 64 for size in sizes) <= 2
    assert max(tiled(size, 30_000) for size in sizes[-20:]) < 3 * LONGEST


def test_a_slow_model_is_read_in_short_steps_where_these_are_no_slower() -> None:
    pace = PrefillPacer(chunk=64, largest=512, stall=0.05)
    for _ in range(20):
        pace.observe(pace.alone, pace.alone * (0.06 if pace.alone >= 64 else 0.07))
    assert pace.alone == 16


def test_who_looks_does_not_wait_for_a_short_step_that_takes_long(rt: Runtime, gate: Turnstile) -> None:
    loop = inside(rt).engine_loop
    loop.pacer.observe(64, 64.0)
    with rt.submit(PROMPT[:8], max_tokens=1) as stream, ThreadPoolExecutor(1) as other:
        gate.pass_through(2)
        assert other.submit(loop.peek, lambda: "seen").result(timeout=30) == "seen"
        assert gate.reached.is_set()
        assert not stream.done


@pytest.mark.extension("inspection")
def test_who_looks_does_not_wait_for_a_step(rt: Runtime, gate: Turnstile) -> None:
    """Slots, totals and the lists of what is kept are told while the engine is in the middle of a step."""
    with rt.submit(PROMPT, max_tokens=1) as stream, ThreadPoolExecutor(1) as other:
        gate.pass_through(100)
        slots = other.submit(rt.cache.slots).result(timeout=30)
        assert [slot.busy for slot in slots] == [True, False]
        assert other.submit(rt.cache.identity).result(timeout=30) == inside(rt).context.identity
        assert other.submit(rt.cache.stats).result(timeout=30).blocks == 0
        for look in (rt.cache.records, rt.cache.blocks, rt.cache.runs):
            assert other.submit(look).result(timeout=30) == []
        assert gate.reached.is_set()
        assert not stream.done


def test_the_end_of_a_step_waits_for_who_looks(rt: Runtime, gate: Turnstile) -> None:
    """What a look reads does not change under it."""
    loop = inside(rt).engine_loop
    looking, go_on = threading.Event(), threading.Event()

    def look() -> str:
        looking.set()
        go_on.wait(30)
        return threading.current_thread().name

    with rt.submit(PROMPT, max_tokens=1) as stream, ThreadPoolExecutor(1, "other") as other:
        gate.pass_through(100)
        seen = other.submit(loop.peek, look)
        assert looking.wait(30)
        gate.open()
        assert not stream.done
        go_on.set()
        assert seen.result(30).startswith("other")
        assert stream.reply(30).finish_reason


def slow(rt: Runtime) -> None:
    """Have a token take a second, as far as the loop knows."""
    inside(rt).engine_loop.pacer.observe(TIMED, float(TIMED))


def test_a_newcomer_interrupts_a_prompt_that_is_read_alone(gate: Turnstile) -> None:
    """The first token of a short request does not wait for a long step; the long one loses nothing else."""
    prompt = PROMPT * 2
    with (
        open_toy(gate=gate, n_ctx=1024, slots=2) as rt,
        rt.submit(prompt, max_tokens=3, seed=1, ignore_eos=True) as long,
    ):
        gate.pass_through(100)
        slow(rt)
        with rt.submit([7] * 4, max_tokens=1) as short:
            # The held step, of which 300 tokens are left, is given up, perhaps after one more. The newcomer
            # is served in chunks of 64: in the first of them, or where it is the other's turn in the second.
            gate.admit(2 * 64 + 1)
            assert short.reply(30).finish_reason
            assert not long.done
        gate.open()
        reply = long.reply(30)
    with open_toy(n_ctx=1024, slots=2) as alone:
        assert alone.generate(prompt=prompt, max_tokens=3, seed=1, ignore_eos=True).tokens == reply.tokens


def test_a_prompt_is_read_to_its_end_however_many_newcomers_come(gate: Turnstile) -> None:
    """A step is interrupted once: the same step is computed when it comes again."""
    gate.open()
    with open_toy(gate=gate, n_ctx=1024, slots=3) as rt:
        executor = inside(rt).engine_loop.executor
        gate.shut()
        with rt.submit(PROMPT, max_tokens=1) as long:
            gate.reached.wait(30)
            slow(rt)
            before = core(rt).faults.n_decodes
            gate.reached.clear()
            executor.interrupt()
            gate.reached.wait(30)
            executor.interrupt()
            gate.pass_through(100)
            assert core(rt).faults.n_decodes == before + 1
            gate.open()
            assert long.reply(30).finish_reason


def test_the_first_step_of_all_is_not_interrupted(rt: Runtime, gate: Turnstile) -> None:
    """It is short, and nobody knows yet how long a step takes."""
    with rt.submit(PROMPT, max_tokens=1) as long:
        gate.pass_through(100)
        decodes = core(rt).faults.n_decodes
        with rt.submit([7] * 4, max_tokens=1) as short:
            gate.pass_through(50)
            assert core(rt).faults.n_decodes == decodes
            gate.open()
            assert short.reply(30).finish_reason
        assert long.reply(30).finish_reason


def test_cancelling_acts_in_the_middle_of_a_step(rt: Runtime, gate: Turnstile) -> None:
    """H7: nothing more is computed."""
    with rt.submit(PROMPT, max_tokens=1) as stream:
        gate.pass_through(100)
        stream.cancel()
        assert stream.reply(30).finish_reason == "cancelled"


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mamba"])
def test_an_interrupted_prompt_gets_the_reply_that_it_gets_alone(
    architecture: str, zoo_path: Callable[[str], Path]
) -> None:
    """W≡C on llama.cpp: steps are given up in their middle, whatever the kind of memory."""
    prompt = [20 + at % 60 for at in range(220)]
    with perdure.open(zoo_path(architecture), n_ctx=512, slots=2, exact=True, threads=1) as rt:
        alone = rt.generate(prompt=prompt, max_tokens=4, temperature=0, namespace="a").tokens
        executor = inside(rt).engine_loop.executor
        with rt.submit(prompt, max_tokens=4, temperature=0, namespace="b") as stream:
            while not stream.done:
                slow(rt)
                executor.interrupt()
            assert stream.reply(60).tokens == alone
        assert executor.interrupted is not None
