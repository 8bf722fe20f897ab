"""Held blocks: what callers want kept for a time, within a budget that no namespace can take for itself."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from counting import size_of
from perdure.cache.held_blocks import HELD, HeldBlocks


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def names(*given: str) -> list[tuple[bytes, int]]:
    return [(name.encode(), 10) for name in given]


def test_a_pin_ends_with_its_time_and_is_renewed_by_the_next() -> None:
    clock = Clock()
    pins = HeldBlocks(1000, clock=clock)
    assert pins.add("", b"k", names("a", "b"), 300)
    clock.now = 299
    assert pins.holds(b"a")
    assert not pins.holds(b"c")
    assert pins.add("", b"k", names("a", "b"), 300)
    clock.now = 598
    assert pins.holds(b"b")
    clock.now = 599
    assert not pins.holds(b"a")
    assert len(pins) == pins.nbytes == 0


def test_a_key_holds_what_it_was_last_used_for_alone() -> None:
    pins = HeldBlocks(1000)
    assert pins.add("", b"k", names("a", "b"), 60)
    assert pins.add("", b"k", names("a", "c"), 60)
    assert [pins.holds(name) for name in (b"a", b"b", b"c")] == [True, False, True]
    # What another pin holds too stays with that.
    assert pins.add("", b"other", names("a"), 60)
    assert pins.add("", b"k", names("d"), 60)
    assert [pins.holds(name) for name in (b"a", b"c", b"d")] == [True, False, True]


def test_a_namespace_has_half_of_the_budget_and_all_together_the_whole_of_it() -> None:
    pins = HeldBlocks(80)
    assert pins.add("ada", b"1", names("a", "b", "c", "d"), 60)
    assert not pins.add("ada", b"2", names("e"), 60)
    # What is shared counts once.
    assert pins.add("ada", b"2", names("a", "b"), 60)
    assert pins.add("bob", b"1", names("p", "q", "r"), 60)
    assert not pins.add("eve", b"1", names("x", "y"), 60)
    assert pins.add("eve", b"1", names("x"), 60)
    # In the place of what its own key holds there is room.
    assert pins.add("ada", b"1", names("e", "f"), 60)
    assert not pins.holds(b"c")


def test_the_oldest_pin_goes_for_one_too_many() -> None:
    pins = HeldBlocks(1 << 20)
    for number in range(HELD + 1):
        assert pins.add("", str(number).encode(), names(f"b{number}"), 60)
    assert len(pins) == HELD
    assert not pins.holds(b"b0")
    assert pins.holds(b"b1")


def lines(work: Callable[[], object]) -> int:
    """Lines of Python that `work` runs, each time that it does."""
    found = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal found
        found += event == "line"
        return trace

    before = sys.gettrace()
    # What earlier tests left to the collector runs lines of its own when it goes.
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return found


@pytest.mark.parametrize("what", ["pins of one namespace", "namespaces"])
def test_a_pin_costs_the_same_among_many(what: str) -> None:
    """Adding one, asking for one, and its end: counted in lines of Python."""
    costs = []
    for size in (2, HELD - 2):
        clock, fresh = Clock(), itertools.count()
        pins = HeldBlocks(1 << 40, clock=clock)

        def add(seconds: float, pins: HeldBlocks = pins, fresh: Any = fresh) -> bool:
            number = next(fresh)
            space = "" if what.startswith("pins") else f"n{number}"
            return pins.add(space, b"%d" % number, names("shared", f"b{number}"), seconds)

        for _ in range(size):
            assert add(1000)
        adding = lines(lambda: add(10))
        holding = lines(lambda: pins.holds(b"shared"))  # noqa: B023
        clock.now = 11
        ending = lines(lambda: pins.holds(b"shared"))  # noqa: B023
        assert len(pins) == size
        costs.append((adding, holding, ending))
    assert costs[0] == costs[1]


def test_a_checkpoint_that_two_namespaces_pin_is_held_until_both_end() -> None:
    """And leaves nothing behind, in whichever of them it was pinned first."""
    clock = Clock()
    pins = HeldBlocks(1000, clock=clock)
    assert pins.add("ada", b"k", [(b"point", 5)], 10)
    assert pins.add("bob", b"k", [(b"point", 5)], 20)
    clock.now = 10
    assert pins.holds(b"point")
    assert (len(pins), pins.nbytes) == (1, 5)
    clock.now = 20
    assert not pins.holds(b"point")
    assert (len(pins), pins.nbytes) == (0, 0)


def test_a_pin_that_is_renewed_again_and_again_leaves_no_trace() -> None:
    clock = Clock()
    pins = HeldBlocks(1000, clock=clock)
    sizes = []
    for number in range(1000):
        assert pins.add("", b"k", names("a"), 60 - number % 7)
        sizes.append(size_of(pins))
    assert (len(pins), pins.nbytes) == (1, 10)
    assert max(sizes) == max(sizes[:200])
