"""Leaving out the oldest turns: as few as must go, at a cost that goes by what fits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from perdure.chat.message import Message
from perdure.chat.plans import drop_oldest

SYSTEM = Message(role="system", content="Be terse.")
FITS = 20
"""Turns."""


def talk(turns: int) -> list[Message]:
    """A system message, turns of ten characters each, and a last message."""
    said = [
        Message(role=role, content=f"{number:05d}")
        for number in range(turns - 1)
        for role in ("user", "assistant")
    ]
    return [SYSTEM, *said, Message(role="user", content="Last.")]


class Prompts:
    """Makes prompts, and counts the messages that they were made of."""

    def __init__(self, fits: int = FITS) -> None:
        self.rendered = 0
        self._most = 2 * fits

    def make(self, messages: Sequence[Message]) -> list[Message]:
        self.rendered += len(messages)
        return list(messages)

    def fits(self, prompt: list[Message]) -> bool:
        return len(prompt) - 1 < self._most


def dropped(turns: int, *, limit: int = 10 * FITS // 4, fits: int = FITS) -> tuple[list[Message], int, int]:
    """The prompt, how many messages were left out, and how many were rendered for it."""
    prompts = Prompts(fits)
    found, count = drop_oldest(talk(turns), prompts.make, fits=prompts.fits, limit=limit)
    return found, count, prompts.rendered


@pytest.mark.parametrize("turns", [21, 40, 400, 10_000])
def test_most_of_what_fits_stays_however_long_the_conversation_is(turns: int) -> None:
    found, count, _ = dropped(turns)
    kept = (len(found) - 1 + 1) // 2
    assert FITS - 4 <= kept <= FITS
    assert found[0] is SYSTEM
    assert found[1:] == talk(turns)[-(2 * kept - 1) :]
    assert count == len(talk(turns)) - len(found)


def test_the_work_does_not_grow_with_what_is_left_out() -> None:
    costs = [dropped(turns)[2] for turns in (100, 1_000, 10_000)]
    assert max(costs) <= min(costs) + 2 * FITS <= 16 * FITS


@pytest.mark.parametrize("limit", [0, 4, 50, 700, 10**9])
def test_a_wrong_guess_costs_work_and_changes_nothing(limit: int) -> None:
    assert dropped(500, limit=limit)[:2] == dropped(500)[:2]


@pytest.mark.parametrize("limit", [0, 10, 10**9])
def test_what_fits_stays_whole(limit: int) -> None:
    assert dropped(FITS, limit=limit)[:2] == (talk(FITS), 0)


def test_the_next_prompts_start_alike() -> None:
    """What was kept of the last prompt is a beginning of the next, mostly."""
    firsts = [dropped(turns)[0][1] for turns in range(100, 200)]
    assert len(set(firsts)) <= 100 // 3


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_the_last_turn_stays_even_where_nothing_fits(turns: int) -> None:
    found, count, _ = dropped(turns, fits=0)
    assert [message.content for message in found] == ["Be terse.", "Last."]
    assert count == 2 * (turns - 1)
