"""What happens when a conversation no longer fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar, get_args

from perdure.chat.message import Message
from perdure.config import Overflow
from perdure.errors import ContextOverflow, InvalidInputError

T = TypeVar("T")


def check_policy(policy: str) -> None:
    if policy not in get_args(Overflow):
        raise InvalidInputError(f"overflow is one of {', '.join(get_args(Overflow))}, got {policy!r}")


def overflow(needed: int, fits: int) -> ContextOverflow:
    return ContextOverflow(
        f"the conversation needs {needed} tokens, {fits} fit (one is left for the reply). Nothing was done. "
        "Send less, open the model with a larger n_ctx, or choose an overflow policy: drop_oldest leaves out "
        "the oldest turns",
        needed=needed,
        fits=fits,
    )


def drop_oldest(
    messages: Sequence[Message], prompt: Callable[[Sequence[Message]], T], *, fits: Callable[[T], bool]
) -> tuple[T, int]:
    """The prompt without as many of the oldest turns as must go, and how many messages those were.

    What stands before the first turn, and the last turn, always stay. A few turns more than must go are left
    out, so that the next prompts start alike and what is kept of them can be used.
    """
    head, turns = _turns(messages)
    few = max(1, len(turns) // 4)
    counts = sorted({min(count, len(turns) - 1) for count in range(0, len(turns) + few, few)})
    low, high = 0, len(counts) - 1
    while low < high:
        middle = (low + high) // 2
        if fits(prompt([*head, *chain.from_iterable(turns[counts[middle] :])])):
            high = middle
        else:
            low = middle + 1
    gone = counts[low] if counts else 0
    kept = [*head, *chain.from_iterable(turns[gone:])]
    return prompt(kept), len(messages) - len(kept)


def _turns(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The messages before the first of a user, and then those of each turn."""
    head: list[Message] = []
    turns: list[list[Message]] = []
    for message in messages:
        if message.role == "user" and (not turns or turns[-1][-1].role != "user"):
            turns.append([message])
        elif turns:
            turns[-1].append(message)
        else:
            head.append(message)
    return head, turns
