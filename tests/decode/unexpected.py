"""Errors that nobody foresees, raised in the middle of what the engine thread does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perdure.cache.slots import cache as slot_cache
from perdure.cache.slots.cache import SlotCache, SlotSwapper
from perdure.cache.slots.placement import SlotTable
from perdure.decode import executor
from perdure.decode.sequence import TokenSequence
from perdure.engine.context import Context

ERRORS: dict[str, Exception] = {
    "memory": MemoryError("planted"),
    "threads": RuntimeError("can't start new thread"),
    "defect": KeyError("planted"),
}
PLACES: dict[str, tuple[Any, str]] = {
    "admitting": (SlotCache, "acquire"),
    "admitting, with a slot taken": (slot_cache, "why_not_more"),
    "admitting, while slots are looked at": (SlotTable, "put"),
    "admitting, while state is moved": (SlotSwapper, "_swap_out"),
    "reaching": (SlotCache, "reached"),
    "drawing": (executor, "draw_together"),
    "keeping a prompt for further samples": (Context, "checkpoint"),
    "collecting": (SlotCache, "release"),
    "delivering": (TokenSequence, "reply"),
}
"""What is being done, and the function that does it."""


def plant(
    owner: Any, name: str, wanted: Callable[[], Exception | None], put: Callable[[Any, str, Any], object]
) -> None:
    """Have a function fail, by `put` in its place, whenever an error is wanted: after it did its work, where
    it gives something back."""
    real = getattr(owner, name)

    def rigged(*args: Any, **keywords: Any) -> Any:
        error = wanted()
        if error is not None and name == "release":
            real(*args, **keywords)
        if error is not None:
            raise error
        return real(*args, **keywords)

    put(owner, name, rigged)
