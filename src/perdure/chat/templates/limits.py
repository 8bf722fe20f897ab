"""Limits on one rendering of a template: time, and memory."""

from __future__ import annotations

import time
from collections.abc import ItemsView, KeysView, ValuesView
from typing import Any

from perdure.errors import TemplateError

_SECONDS = 1.5
_CHARACTERS = 32 << 20
_LARGEST = 4 << 20
_DEEPEST = 60
_CALLS = 100


class RenderLimits:
    """Counts what a rendering makes, before it makes it.

    A value's weight is its characters and items, through all that it holds. No value weighs more than
    `largest`, so no single step of a template takes long; all that is made together has a limit, so memory
    has one too, even if nothing is ever let go of.
    """

    __slots__ = ("_deadline", "_left", "_started", "_weights", "depth", "given", "largest")

    def __init__(self, given: int) -> None:
        """`given` is the weight of what the template is to render."""
        self._left = _CHARACTERS + 64 * given
        self.largest = _LARGEST + 16 * given
        self._deadline = time.monotonic() + _SECONDS
        self._started = time.thread_time()
        self.depth = 0
        self.given: frozenset[int] | None = None
        """The lists that belong to whoever asked, once one is about to be changed."""
        # The values are kept with their weights, since an id is another's once its owner is gone.
        self._weights: dict[int, tuple[object, int]] = {}

    def tick(self) -> None:
        if time.monotonic() > self._deadline:
            self._late()

    def spend(self, size: int) -> None:
        """Account for a text of that size."""
        self._left -= size
        if self._left < 0 or size > self.largest:
            self.fits(size)
            raise TemplateError("the template makes more text than any conversation needs")

    def fits(self, size: int) -> None:
        """That a value of this weight may be made."""
        if size > self.largest:
            raise TemplateError(
                f"the template makes a value of {size} characters or items; {self.largest} fit"
            )

    def take(self, value: Any) -> None:
        """Account for a value that was made."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, (list, tuple, dict, bytes)):
            self.weigh(value)
            self.spend(2 * len(value))

    def weigh(self, value: Any, depth: int = 0) -> int:
        if isinstance(value, (str, bytes)):
            return len(value) + 1
        if value is None or isinstance(value, (int, float)):
            return 1
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, dict):
            items: Any = (part for pair in value.items() for part in pair)
        elif isinstance(value, (list, tuple, KeysView, ValuesView, ItemsView)):
            items = value
        else:
            return 1
        if depth == _DEEPEST:
            raise TemplateError(f"the template nests values deeper than {_DEEPEST}")
        total = 1
        for item in items:
            total += self.weigh(item, depth + 1)
            self.fits(total)
        self.know(value, total)
        return total

    def added(self, value: Any, weight: int) -> None:
        """Account for a list made of others, which weighs no more than `weight`."""
        self.fits(weight)
        self.spend(2 * len(value))
        self.know(value, weight)

    def know(self, value: Any, weight: int) -> None:
        self._weights[id(value)] = (value, weight)

    def enter(self) -> None:
        self.depth += 1
        if self.depth > _CALLS:
            raise TemplateError(f"the template's macros call each other more than {_CALLS} deep")

    def _late(self) -> None:
        used = time.thread_time() - self._started
        if used >= _SECONDS:
            raise TemplateError(f"the template takes longer than {_SECONDS} seconds to render")
        # Others had the processor: that time is given back.
        self._deadline = time.monotonic() + _SECONDS - used
