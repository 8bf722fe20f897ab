"""The rows of logits that the last step gave, and the views taken of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from perdure.checks import is_integer
from perdure.engine.contract import Core, Rows
from perdure.engine.logits import LogitsView, Step
from perdure.errors import RowError

Source: TypeAlias = "int | NDArray[np.float32]"
"""A row's entry in the last batch, where its memory is live; or a copy, of a native step before that."""


def marked(marks: NDArray[np.int8]) -> list[int]:
    """The places of the rows that are wanted."""
    if marks is _ONE:
        return [0]
    return np.flatnonzero(marks).tolist()


class StepRows:
    """Rows by (sequence, place among the tokens that it was fed), good until the next change.

    Whoever changes the cache calls `end` first, so no view can outlive what it shows.
    """

    def __init__(self, core: Core, lock: AbstractContextManager[object]) -> None:
        self._core = core
        self._lock = lock
        self._step = Step(lock, core)
        self._sources: dict[tuple[int, int], Source] = {}
        self._lengths: dict[int, int] = {}

    def publish(self, sources: dict[tuple[int, int], Source], lengths: dict[int, int]) -> None:
        """Offer the rows of a step that fed `lengths` tokens to each sequence."""
        self._sources = sources
        self._lengths = lengths

    def end(self) -> None:
        """Offer nothing more, unless memory is borrowed: then PinnedError, and all is as before."""
        self.renew()
        self._sources = {}
        self._lengths = {}

    def renew(self) -> None:
        """End the views alone: the rows are about to change in place."""
        # A step of which no view was taken can be the next one's too, unless a Ctrl-C came while it ended.
        if self._step.views or not self._step.alive:
            self._step.retire()
            self._step = Step(self._lock, self._core)

    def retire(self) -> None:
        """End the views for good, unless memory is borrowed."""
        self._step.retire()

    def abandon(self) -> None:
        """End the views whoever has borrowed what: their owner is gone."""
        self._step.end()

    def view(self, row: int, seq: int | None) -> LogitsView:
        key = self._key(row, seq)
        found = self._step.views.get(key)
        if found is None:
            source = self._sources[key]
            array = self._core.row(source) if isinstance(source, int) else source.view()
            found = self._step.views[key] = LogitsView(array, self._step)
        return found

    def live(self, row: int, seq: int | None) -> int:
        """The entry of a row in the last batch."""
        source = self._sources[self._key(row, seq)]
        if not isinstance(source, int):
            raise RowError(f"row {row} lies before the last native step; decode less at once to draw from it")
        return source

    def all_live(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """The entries of several rows, each named by (row, sequence)."""
        entries: list[int] = []
        for row, seq in places:
            source = self._sources.get((seq, row))
            # What is refused, and rows that are counted from the end, are for the long way.
            entries.append(source if type(source) is int else self.live(row, seq))
        return entries

    def _key(self, row: int, seq: int | None) -> tuple[int, int]:
        if not self._lengths:
            raise RowError(
                "there are no logits yet: a decode makes them, and every other change (truncate, "
                "fork, load, clear) ends them. Decode at least one token first"
            )
        if seq is None:
            if len(self._lengths) > 1:
                raise RowError(f"the last step had sequences {sorted(self._lengths)}; name one")
            seq = next(iter(self._lengths))
        elif seq not in self._lengths:
            raise RowError(f"the last step had sequences {sorted(self._lengths)}, not {seq}")
        length = self._lengths[seq]
        key = (seq, row + length if row < 0 else row)
        if not 0 <= key[1] < length:
            raise RowError(
                f"there is no row {row}: the last decode had {length} tokens, so rows run from 0 to "
                f"{length - 1}, or from -{length} to -1 counted from the end"
            )
        if key not in self._sources:
            had = sorted(index for owner, index in self._sources if owner == seq)
            raise RowError(f"row {row} of {length} was not asked for; decode gave rows {had[:8]}")
        return key


_ONE: NDArray[np.int8] = np.ones(1, np.int8)
_ONE.flags.writeable = False


def outputs(rows: Rows, count: int) -> NDArray[np.int8]:
    """A mark for each of `count` tokens: whether its row is wanted."""
    if count == 1 and rows == "last":
        return _ONE
    marks = np.zeros(count, np.int8)
    if isinstance(rows, str):
        if rows == "last":
            marks[-1] = 1
        elif rows == "all":
            marks[:] = 1
        elif rows != "none":
            raise RowError(f"rows is 'last', 'all', 'none' or places in the tokens, got {rows!r}")
        return marks
    for row in rows:
        whole = is_integer(row)
        if not whole or not -count <= row < count:
            raise RowError(f"rows of {count} tokens run from 0 to {count - 1}, got {row!r}")
        marks[row] = 1
    return marks
