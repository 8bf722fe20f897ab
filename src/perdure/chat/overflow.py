"""What happens when a conversation no longer fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeVar

from perdure.chat.message import Message
from perdure.errors import ContextOverflow

T = TypeVar("T")

_USUAL, _MOST = 4, 8
"""Characters of a token, as texts usually have them, and as hardly any has."""


def overflow(needed: int, fits: int) -> ContextOverflow:
    return ContextOverflow(
        f"the conversation needs {needed} tokens, {fits} fit (one is left for the reply). Nothing was done. "
        "Send less, open the model with a larger n_ctx, or choose an overflow policy: drop_oldest leaves out "
        "the oldest turns",
        needed=needed,
        fits=fits,
    )


def drop_oldest(
    messages: Sequence[Message],
    prompt: Callable[[Sequence[Message]], T],
    *,
    fits: Callable[[T], bool],
    limit: int,
) -> tuple[T, int]:
    """The prompt without as many of the oldest turns as must go, and how many messages those were. `limit` is
    how many tokens fit, from which a first guess is made.

    What stands before the first turn, and the last turn, always stay. Where turns must go, a few more are
    left out, so that the next prompts start alike and what is kept of them can be used. How many those are
    goes by how many fit, not by how many there are, and so does the work.
    """
    starts = _starts(messages)
    sizes = [len(message.content or "") for message in messages]
    head = messages[: starts[0]]
    made: dict[int, T] = {}

    def make(first: int) -> T:
        """The prompt from turn `first` on."""
        if first not in made:
            made[first] = prompt([*head, *messages[starts[first] :]])
        return made[first]

    def fit(first: int) -> bool:
        return fits(make(first))

    # What is far too long is not even rendered as a whole.
    if sum(sizes) <= _MOST * limit and fit(0):
        return make(0), 0
    count, last = len(starts), len(starts) - 1
    # A power of two: of the last so many turns not all fit, of half as many they do. It is looked for from
    # well below the guess, since what is too long costs most.
    size = 2 << max(0, _guess(starts, sizes, _USUAL * limit).bit_length() - 4)
    while size > 2 and not fit(max(0, count - size // 2)):
        size //= 2
    while size < count and fit(count - size):
        size *= 2
    few = max(1, size // 8)
    lowest = ((count - size) // few + 1) * few if size < count else 0
    firsts = [*range(lowest, last, few), last]
    sure = min(bisect_left(firsts, count - size // 2), len(firsts) - 1)
    first = firsts[bisect_left(firsts, True, hi=sure, key=fit)]
    return make(first), starts[first] - len(head)


def _starts(messages: Sequence[Message]) -> list[int]:
    """Where turns start: at messages of a user that follow none. At least one, which may be the end."""
    roles = [message.role for message in messages]
    starts = [at for at, role in enumerate(roles) if role == "user" and (not at or roles[at - 1] != "user")]
    return starts or [len(messages)]


def _guess(starts: Sequence[int], sizes: Sequence[int], characters: int) -> int:
    """How many of the last turns have so many characters; at least one."""
    end = len(sizes)
    for count, start in enumerate(reversed(starts)):
        characters -= sum(sizes[start:end])
        if characters < 0:
            return max(1, count)
        end = start
    return len(starts)
