"""The span in which rows of logits can be read, and a token of a row. Views of rows are in `logits.py`."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from perdure.engine.contract import Floats
from perdure.errors import PinnedError


class Candidate(NamedTuple):
    """A token with its logit and its natural log probability."""

    token: int
    logit: float
    logprob: float
    text: str = ""
    """In a reply: the token's own, where half a character is a question mark."""


def log_norm(row: Floats) -> float:
    """What to subtract from a logit of `row` for its natural log probability."""
    peak = row.max()
    return float(peak) + float(np.log(np.sum(np.exp(row - peak), dtype=np.float64)))


class Step:
    """The span between two changes of a context's state. Once over, it is never alive again.

    While it is alive, `keep` is the owner of the memory that its views read.
    """

    __slots__ = ("alive", "keep", "lock", "pins", "views")

    def __init__(self, lock: AbstractContextManager[object], keep: object) -> None:
        self.lock = lock
        self.keep = keep
        self.alive = True
        self.pins: list[weakref.ref[Floats]] = []
        self.views: dict[object, Any] = {}
        """Those that were taken of its rows, by the row."""

    def retire(self) -> None:
        """End the step, unless memory of it is borrowed."""
        if self.pins and any(pin() is not None for pin in self.pins):
            raise PinnedError(
                "logits of this step are borrowed: leave the borrow() block, and drop every array taken "
                "from it, before the context is used again"
            )
        self.end()

    def end(self) -> None:
        self.alive = False
        self.keep = None
        self.views.clear()
