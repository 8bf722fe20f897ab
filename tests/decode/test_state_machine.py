"""Random lives of the scheduler: no token lost or doubled, no sequence leaked, every reply as alone.

C10, B6 and H7 on every kind of memory of the toy engine, whose logits depend on the tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from decode.observed import (
    Turnstile,
    alone,
    check_delivery,
    check_idle,
    check_ledger,
    core,
    open_toy,
    outcome,
    read,
    trouble,
)
from decode.state_machine import life
from perdure.cache.slots.cache import SlotCache
from perdure.decode.executor import Executor
from perdure.decode.scheduler import Slots
from perdure.decode.sequence import TokenSequence
from perdure.memory import MEMORY_KINDS, MemorySpec, Recurrent

every_kind = pytest.mark.parametrize("kind", MEMORY_KINDS, ids=lambda kind: kind.name)
both_modes = pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])


def live(
    kind: type[MemorySpec], *, exact: bool, examples: int, steps: int = 40, derandomize: bool = False
) -> None:
    run_state_machine_as_test(
        life(kind, exact=exact),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            suppress_health_check=list(HealthCheck),
        ),
    )


@every_kind
@both_modes
def test_whatever_happens_each_reply_is_what_it_is_alone(kind: type[MemorySpec], exact: bool) -> None:
    live(kind, exact=exact, examples=30)


@pytest.mark.soak
@every_kind
@both_modes
def test_whatever_happens_for_long_each_reply_is_what_it_is_alone(
    kind: type[MemorySpec], exact: bool
) -> None:
    live(kind, exact=exact, examples=600, steps=80)


# Planted faults in our own loop, to show that the checks above would see them.


def _forgetful(release: Callable[..., None]) -> Callable[..., None]:
    def forget_the_first(places: object, seq: int) -> None:
        if seq:
            release(places, seq)

    return forget_the_first


def test_a_sequence_that_is_not_given_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for slots in (SlotCache, Slots):
        monkeypatch.setattr(slots, "release", _forgetful(slots.release))
    for cache in (0, 1 << 20):
        with open_toy(slots=2, cache=cache) as rt:
            rt.generate("a", max_tokens=3)
            with pytest.raises(AssertionError, match="of 2 slots are free"):
                check_idle(rt)


def test_a_token_that_is_drawn_but_not_delivered_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = TokenSequence.deliver

    def losing(sequence: TokenSequence) -> None:
        if sequence.written == 3:
            del sequence.undelivered[-1:]
        deliver(sequence)

    monkeypatch.setattr(TokenSequence, "deliver", losing)
    with open_toy() as rt:
        job = rt.submit("a", max_tokens=9, temperature=0, ignore_eos=True)
        with pytest.raises(AssertionError):
            check_delivery(read(job).deltas, outcome(job), rt.model)


def test_state_that_is_believed_after_a_failed_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the recount a recurrent sequence that lost its state is fed on as if it had it."""
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}

    def survives() -> bool:
        gate = Turnstile()
        with open_toy(Recurrent, gate=gate, cache=0) as rt:
            jobs = [rt.submit(prompt, **settings) for prompt in ("one", "two")]
            gate.pass_through(10)
            trouble(rt).fail_decode(after=1)
            gate.open()
            return outcome(jobs[0])[0].tokens == alone(Recurrent, "one", **settings)[0].tokens

    assert survives()
    monkeypatch.setattr(Executor, "_recount", lambda self, active: None)
    assert not survives()


def test_an_engine_that_is_not_left_alone_is_seen() -> None:
    """The ledger check reads the cells themselves."""
    with open_toy() as rt:
        rt.generate("some words", max_tokens=3, temperature=0)
        core(rt).remove(0, 2)
        with pytest.raises(AssertionError):
            check_ledger(rt)
