"""An error that nobody foresaw costs the request that it happens in, and nobody else anything (S6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from decode.observed import check_idle, open_toy
from decode.unexpected import ERRORS, PLACES, plant
from perdure import Runtime
from perdure.decode.output_queue import OutputQueue, notify
from perdure.decode.request import Reply
from perdure.decode.sampling.sampler import draw, draw_together
from perdure.decode.stream import Stream

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def outcome(job: Stream[Any, Any]) -> list[Reply]:
    """All samples, also where one has an error. Nobody is left waiting for them."""
    assert job.output.wait(finish=True, timeout=60)
    return job.output.replies


def check_serves(rt: Runtime) -> None:
    """As many as have slots, and then as many again, all get their replies: no slot was lost."""
    jobs = [rt.submit(f"another prompt, number {number}", **GREEDY) for number in range(2 * rt.slots)]
    for job in jobs:
        [reply] = outcome(job)
        assert (len(reply.tokens), reply.error) == (6, None)
    check_idle(rt)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_an_unexpected_error_costs_one_request_s6(
    place: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6: also MemoryError and "can't start new thread"; the engine thread goes on."""
    error = ERRORS[kind]
    # As often as there are slots: were one lost each time, none would be left.
    left = [error] * 2
    with open_toy(slots=2) as rt:
        expected = outcome(rt.submit("Somebody else", **GREEDY))[0].tokens
        plant(*PLACES[place], lambda: left.pop() if left else None, monkeypatch.setattr)
        replies: list[Reply] = []
        for number in range(4):
            replies += outcome(rt.submit(f"{number} Hello", n=3 if "samples" in place else 1, **GREEDY))
        assert left == [], "it happened"
        for reply in replies:
            if reply.error is not None:
                assert (reply.error, reply.finish_reason) == (error, "error")
            else:
                # Only state was lost, or nothing.
                assert len(reply.tokens) == 6
        check_serves(rt)
        assert outcome(rt.submit("Somebody else", **GREEDY))[0].tokens == expected


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize(
    ("name", "real", "settings"),
    [("draw", draw, {"logprobs": 1, "typical_p": 0.9}), ("draw_together", draw_together, {})],
)
def test_an_error_in_a_draw_for_many_costs_the_one_that_it_belongs_to_s6(
    name: str, real: Any, settings: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6: a step draws for all of them at once."""
    error, happened = ERRORS[kind], []

    def failing(wanted: Sequence[Any], *rows: Any) -> list[int]:
        if any(sampler.sampling.seed == 13 for sampler, _, _ in wanted):
            happened.append(len(wanted))
            raise error
        tokens: list[int] = real(wanted, *rows)
        return tokens

    monkeypatch.setattr(f"perdure.decode.executor.{name}", failing)
    with open_toy(slots=4) as rt:
        jobs = [
            rt.submit("A prompt", temperature=1, seed=seed, max_tokens=6, ignore_eos=True, **settings)
            for seed in (11, 13, 12)
        ]
        replies = [outcome(job)[0] for job in jobs]
        assert happened
        assert [reply.error for reply in replies] == [None, error, None]
        assert [len(reply.tokens) for reply in replies] == [6, 0, 6]
        check_idle(rt)


def test_a_listener_that_fails_keeps_no_other_from_being_told_s6() -> None:
    class Broken:
        def notify(self, waiters: Sequence[Any]) -> None:
            raise MemoryError("planted")

    class Told:
        def __init__(self) -> None:
            self.waiters: list[Any] = []

        def notify(self, waiters: Sequence[Any]) -> None:
            self.waiters += waiters

    first, second, told = OutputQueue(), OutputQueue(), Told()
    first.listen(Broken(), 1)
    second.listen(told, 2)
    notify([first, second])
    assert told.waiters == [2]
