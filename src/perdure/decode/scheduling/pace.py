"""Pace: how many prompt tokens are computed in the time that a running reply may be held up for."""

from __future__ import annotations

import math

from perdure.checks import is_number
from perdure.errors import InvalidInputError

TIMED = 16
"""Steps of so many tokens tell how fast prompts are computed; shorter ones are mostly overhead."""


class Pace:
    """The size of a prompt's chunk while others wait, learned from the steps that were taken.

    Always holds: it is from 16 to the largest step. With a stall of 0 it stays as it was set.
    """

    def __init__(self, *, chunk: int, largest: int, stall: float) -> None:
        if not is_number(stall) or not 0 <= stall < math.inf:
            raise InvalidInputError(f"stall is a number of seconds, 0 for chunks of {chunk}, got {stall!r}")
        self.chunk = min(chunk, largest)
        self._largest = largest
        self._stall = stall

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if not self._stall or tokens < TIMED or seconds <= 0:
            return
        aim = self._stall * tokens / seconds
        # Half way at a time: one slow step says little, and larger steps are faster by the token.
        self.chunk = max(min(TIMED, self._largest), min(self._largest, round((self.chunk + aim) / 2)))
