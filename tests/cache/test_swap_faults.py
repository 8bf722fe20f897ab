"""Faults while conversations wait in swap slots: what is kept, what is said, and that all goes on.

The same cases run on the toy engine, on llama.cpp's CPU, and on a GPU where there is one: there, a copy
between a slot and a swap slot stays on the device.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import perdure
from engine.failures import failing_decode
from ext.workers import engines
from ext.workers.engines import QUICK
from inside import core_of
from perdure import EngineError, OutOfMemoryError, PerdureError, Runtime
from perdure.cache.block import BLOCK
from perdure.testing.toy import Faults, ToyModel
from subjects import MLX, NAMES, Subject

from .served import Answer, Served

MOVING = ("copy", "remove", "read", "write", "capture", "assemble")
"""The calls of an engine by which state gets from one place to another."""
ERRORS: dict[str, Exception] = {
    "engine": EngineError("planted: CUDA error: an illegal memory access was encountered"),
    "memory": MemoryError("planted"),
    "unforeseen": RuntimeError("planted: cudaMemcpyAsync"),
}


SELDOM = [pytest.mark.soak]
"""What takes long, or starts processes over and over."""
OFTEN = ("toy-full", "toy-hybrid", "llama")
SUBJECTS = [name for name in NAMES if name not in MLX or name == "mlx-llama"]
"""MLX keeps sequences in the machine's own memory: one model of it is enough here."""


@pytest.fixture(params=[pytest.param(name, marks=[] if name in OFTEN else SELDOM) for name in SUBJECTS])
def subject(request: pytest.FixtureRequest, find_subject: Callable[[str], Subject]) -> Subject:
    """Every model in turn, most of them only in `make soak`."""
    return find_subject(request.param)


@contextmanager
def failing(
    served: Served, calls: tuple[str, ...], *, at: int, error: Exception | None
) -> Iterator[list[str]]:
    """Let the `at`-th of such calls fail within the block, and those alone: with `error`, or, where that is
    None, by doing nothing. What was called is listed."""
    core = core_of(served.context)
    made: list[str] = []

    def rigged(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **keywords: Any) -> Any:
            made.append(name)
            if len(made) != at:
                return real(*given, **keywords)
            if error is None:
                return None
            raise error

        return call

    for name in calls:
        setattr(core, name, rigged(name, getattr(core, name)))
    try:
        yield made
    finally:
        for name in calls:
            delattr(core, name)


def three(served: Served) -> list[Answer]:
    """Three conversations on one slot: the first two wait."""
    return [served.say(served.subject.tokens(length, length)) for length in (30, 11, 23)]


def all_go_on(served: Served, answers: list[Answer], *, warm: bool = True) -> None:
    """Each of them is answered as if it were alone; a second time with nothing computed twice."""
    for _ in range(2 if warm else 1):
        for number, answer in enumerate(answers):
            answers[number] = served.say([*answer.tokens, 1, 2])
    if warm:
        for answer in answers:
            assert served.say([*answer.tokens, 3]).reused == len(answer.tokens) - 1


# A copy out.


@pytest.mark.parametrize("kind", [*ERRORS, "nothing happens"])
def test_a_copy_out_that_fails_goes_through_memory_and_is_said_once(
    subject: Subject, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Served(subject, slots=1, swap_slots=3) as served:
        first = served.say(subject.tokens(30))
        with caplog.at_level(logging.WARNING, "perdure.cache"):
            for seed, length in ((2, 9), (3, 12)):
                with failing(served, ("copy",), at=1, error=ERRORS.get(kind)) as made:
                    other = served.say(subject.tokens(length, seed))
                assert made == ["copy"]
        assert [entry.levelname for entry in caplog.records] == ["WARNING"]
        assert "goes through memory" in caplog.text
        # Nothing was lost, and nothing but the way of the conversation has changed.
        back = served.say([*first.tokens, 1])
        assert back.tiers == {"memory": len(first.tokens) - 1}
        assert served.say([*other.tokens, 1]).tiers == {"slot": len(other.tokens) - 1}
        all_go_on(served, [back, other])


def test_a_swap_slot_that_cannot_be_emptied_costs_nobody_anything_else(subject: Subject) -> None:
    """The copy back has been made, and the place where the conversation waited is to be given up."""
    with Served(subject, slots=1, swap_slots=3) as served:
        answers = three(served)
        with not_emptied(served, answers[0]) as failed:
            back = served.say([*answers[0].tokens, 1])
        assert failed
        assert back.tiers == {"slot": len(answers[0].tokens) - 1}
        all_go_on(served, [back, *answers[1:]])


@contextmanager
def not_emptied(served: Served, answer: Answer) -> Iterator[list[int]]:
    """Let the engine fail to empty the sequence where the conversation of `answer` waits, once."""
    core = core_of(served.context)
    failed: list[int] = []
    remove = core.remove
    held = [list(served.context.tokens(seq)) for seq in range(served.context.n_seq)]
    waiting = held.index(answer.tokens[:-1])
    assert waiting >= served.slot_cache.count

    def call(seq: int, start: int) -> None:
        if seq == waiting and not failed:
            failed.append(seq)
            return
        remove(seq, start)

    core.remove = call  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        del core.remove


# A copy in.


@pytest.mark.parametrize("kind", [*ERRORS, "nothing happens"])
def test_a_copy_in_that_fails_is_computed_said_and_found_again_where_it_waits(
    subject: Subject, kind: str
) -> None:
    with Served(subject, slots=1, swap_slots=3) as served:
        answers = three(served)
        # The second copy of the turn: the first takes the third conversation out.
        with failing(served, ("copy",), at=2, error=ERRORS.get(kind)) as made:
            back = served.say([*answers[0].tokens, 1])
        assert made == ["copy", "copy"]
        assert back.reused == 0
        assert "what was held could not be brought in place" in back.why
        # It has not left the place where it waits: who goes on from it there finds it.
        again = served.say([*answers[0].tokens, 7])
        assert again.reused >= len(answers[0].tokens) - 1
        all_go_on(served, [back, *answers[1:]])


# Every call, one after the other.


def test_any_call_of_a_change_of_places_may_fail(subject: Subject) -> None:
    """A turn that swaps one conversation out and another in: whichever native call fails in it, the answer
    and all later ones are those of a fresh context, and then nothing is computed twice again."""
    ways: list[Exception | None] = [ERRORS["engine"]]
    if subject.toy:
        ways += [ERRORS["memory"], None]
    for error in ways:
        for at in range(1, 100):
            with Served(subject, slots=1, swap_slots=2) as served:
                answers = three(served)
                calls = MOVING if error is not None else ("copy", "remove")
                with failing(served, calls, at=at, error=error) as made:
                    ask_through(served, [*answers[0].tokens, 1])
                all_go_on(served, answers, warm=subject.toy)
            if len(made) < at:
                break
        assert at > 2


def ask_through(served: Served, prompt: list[int]) -> None:
    """An answer that is right, or an error that says what failed."""
    failure = ""
    try:
        served.say(prompt)
    except (PerdureError, MemoryError) as error:
        failure = str(error)
    assert not failure or "planted" in failure or "emptied" in failure


# A step that is cancelled.


@pytest.mark.parametrize("after", [0, 3])
def test_a_step_cancelled_behind_a_copy_in_harms_nobody_who_waits(subject: Subject, after: int) -> None:
    with Served(subject, slots=1, swap_slots=3) as served:
        answers = three(served)
        with failing_decode(served.context, step=1, after=after):
            ask_cancelled(served, [*answers[0].tokens, 1, 2])
        for answer in answers[1:]:
            assert served.say([*answer.tokens, 1]).reused == len(answer.tokens) - 1
        all_go_on(served, answers)


def ask_cancelled(served: Served, prompt: list[int]) -> None:
    replied: tuple[int, ...] = ()
    failure = ""
    try:
        replied = served.submit(prompt).reply().tokens
    except EngineError as error:
        failure = str(error)
    # A GPU's step is whole before anybody is asked whether to stop.
    assert replied or "cancelled" in failure or "failed" in failure


def test_a_cancel_in_the_midst_of_a_copy_stops_nothing_else(subject: Subject) -> None:
    with Served(subject, slots=1, swap_slots=3) as served:
        answers = three(served)
        core = core_of(served.context)
        copy, cancelled = core.copy, []

        def cancelling(src: int, dst: int) -> None:
            served.context.cancel()
            copy(src, dst)
            cancelled.append(dst)

        core.copy = cancelling  # type: ignore[method-assign]
        try:
            back = served.say([*answers[0].tokens, 1])
        finally:
            del core.copy
        assert len(cancelled) == 2
        assert back.tiers == {"slot": len(answers[0].tokens) - 1}
        all_go_on(served, [back, *answers[1:]])


# No memory.


def test_whoever_waited_longest_is_computed_again_where_no_memory_is_left(subject: Subject) -> None:
    """More conversations than places, and a budget of nothing: the oldest is lost, said, and comes right."""
    with Served(subject, slots=1, swap_slots=2, budget=1) as served:
        answers = [*three(served), served.say(subject.tokens(14, 9))]
        lost = served.say([*answers[0].tokens, 1])
        assert lost.reused == 0
        assert lost.why
        assert served.slot_cache.nbytes <= 1
        all_go_on(served, [lost, *answers[1:]], warm=False)


def test_state_that_finds_no_room_in_its_slot_is_computed(subject: Subject) -> None:
    """The engine refuses what comes back from memory, once for each way in which it can."""
    with Served(subject, slots=1, swap_slots=2) as served:
        answers = [*three(served), served.say(subject.tokens(14, 9))]
        with failing(served, ("write", "assemble"), at=1, error=ERRORS["memory"]) as made:
            back = served.say([*answers[0].tokens, 1])
        assert made
        assert "could not be brought in place" in back.why
        all_go_on(served, [back, *answers[1:]])


def test_more_swap_slots_than_memory_are_refused_with_the_numbers(zoo_path: Callable[[str], Path]) -> None:
    """A machine of this size does not exist; on a GPU it is the card's memory that is too small."""
    with pytest.raises(OutOfMemoryError, match=r"\d+ cells need [\d.]+ GiB"):
        perdure.open(zoo_path("llama"), n_ctx=20_000_000, slots=1, swap_slots=100, threads=1)
    with pytest.raises(OutOfMemoryError):
        perdure.open(ToyModel(faults=Faults(no_memory=True)), n_ctx=64, slots=1, swap_slots=2)
    with perdure.open(zoo_path("llama"), n_ctx=64, slots=1, swap_slots=2, threads=1) as rt:
        assert rt.generate([1, 2, 3], max_tokens=1, ignore_eos=True).tokens


# The engine's process.

KEPT: dict[str, Any] = {"n_ctx": 256, "slots": 1, "swap_slots": 3, "threads": 1, "exact": True}
"""In exact mode a reply has the bits of a fresh engine's, on a GPU too."""
ASKED: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
MODELS = ["toy", "llama", "gemma3"]


@pytest.fixture(params=[pytest.param(name, marks=SELDOM if name != "llama" else []) for name in MODELS])
def source(
    request: pytest.FixtureRequest,
    zoo_path: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str | Path:
    """What a child opens."""
    monkeypatch.setenv(engines.FOLDER, str(tmp_path))
    return "ext.workers.engines:full" if request.param == "toy" else zoo_path(request.param)


@contextmanager
def isolated(source: str | Path, store: Path | None = None) -> Iterator[Runtime]:
    policy = dataclasses.replace(QUICK, hang_timeout=8.0)
    with perdure.open(source, isolated=policy, store=store, **KEPT) as rt:
        yield rt


def texts(count: int) -> list[list[int]]:
    return [[(at * 37 + number * 11) % 199 + 20 for at in range(100 + number)] for number in range(count)]


def cold_replies(rt: Runtime, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """What is said of them where nothing is kept."""
    replies = []
    for prompt in prompts:
        rt.cache.clear()
        replies.append(rt.generate(prompt, **ASKED))
    assert not any(reply.reuse.reused for reply in replies)
    return [reply.tokens for reply in replies]


def waiting(rt: Runtime, *, stored: bool) -> list[list[int]]:
    """Three conversations, two of which wait; `stored` on disk too, or not."""
    prompts = [[*prompt, *rt.generate(prompt, **ASKED).tokens, 33] for prompt in texts(3)]
    if stored:
        for prompt in prompts:
            rt.cache.save(prompt[:-2])
        # Putting anything to sleep waits until all is written.
        rt.cache.sleep([1, 2, 3])
    assert all("slot" in rt.cache.held(prompt) for prompt in prompts)
    return prompts


@pytest.mark.extension("workers")
@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGSTOP", marks=SELDOM)])
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "in memory"])
def test_an_engine_lost_while_conversations_wait_in_it(
    source: str | Path, name: str, stored: bool, tmp_path: Path
) -> None:
    """Killed, or stopped until it is replaced: each of them goes on, from the store where that has them."""
    store = tmp_path / "store" if stored else None
    with isolated(source, store) as rt:
        prompts = waiting(rt, stored=stored)
        os.kill(engines.pid(rt), getattr(signal, name))
        found = [rt.cache.held(prompt) for prompt in prompts]
        # Whether reading them beats computing them is for the measured rates to say.
        assert [usage["disk"].tokens >= BLOCK for usage in found if usage] == [True] * (3 * stored)
        replies = [rt.generate(prompt, **ASKED) for prompt in prompts]
        health = engines.remote(rt).health()
        assert health.restarts == 1
        assert (name in (health.last_death or "")) or "no step ended" in (health.last_death or "")
        for reply in replies:
            assert set(reply.reuse.tiers) <= {"disk", "memory"}
            assert reply.reuse.reused or reply.reuse.why
        # And it swaps as before.
        again = [rt.generate(prompt, **ASKED) for prompt in prompts]
        assert all(reply.reuse.tiers.get("slot") for reply in again)
        cold = cold_replies(rt, prompts)
    assert [reply.tokens for reply in replies] == [reply.tokens for reply in again] == cold


@pytest.mark.extension("workers")
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=SELDOM if name != "toy" else []) for name in MODELS]
)
def test_an_engine_killed_in_the_midst_of_a_copy(
    model: str, zoo_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 between two places: the request that asked for it is tried again, and nobody can tell."""
    monkeypatch.setenv(engines.FOLDER, str(tmp_path))
    monkeypatch.setenv(engines.MODEL, "" if model == "toy" else str(zoo_path(model)))
    with isolated("ext.workers.engines:dying_at_a_copy", tmp_path / "store") as rt:
        prompts = waiting(rt, stored=True)
        engines.mark().touch()
        replies = [rt.generate(prompt, **ASKED) for prompt in prompts]
        assert not engines.mark().exists()
        health = engines.remote(rt).health()
        assert (health.restarts, "SIGKILL" in (health.last_death or "")) == (1, True)
        again = [rt.generate(prompt, **ASKED) for prompt in prompts]
        assert all(reply.reuse.tiers.get("slot") for reply in again)
        cold = cold_replies(rt, prompts)
    assert [reply.tokens for reply in replies] == [reply.tokens for reply in again] == cold
