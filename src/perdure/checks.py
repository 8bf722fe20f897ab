"""Checks of what callers give (numbers, one of several words), and of the thread that a call is made in.

A bool is no number, though Python takes it for an integer.
"""

from __future__ import annotations

import numbers
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard

from perdure.errors import InvalidInputError


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is a Python integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer, one of NumPy's included."""
    # Mostly it is a plain one: asking an abstract class takes ten times as long.
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is an integer or a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value`, if it is a whole number from `low` to `high`."""
    if not is_whole(value) or value < low or (high is not None and value > high):
        to = "" if high is None else f" to {high}"
        raise InvalidInputError(f"{name} is a whole number from {low}{to}, got {value!r}")
    return value


def check_one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Refuse what is none of the words that an option may be."""
    if value not in known:
        raise InvalidInputError(f"{name} is one of {', '.join(known)}, got {value!r}")


# Threads that must not wait.


class WaitInEventLoopError(RuntimeError):
    """A call that may wait for a disk was made in the thread of an event loop: a defect of the caller."""


_NEVER_WAITING: dict[int, list[str]] = {}
"""Threads whose event loop serves everybody, each with the calls that were refused in it."""


@contextmanager
def never_waiting() -> Iterator[list[str]]:
    """Debug mode for the thread of an event loop: refuse in it what may wait. It gives what was refused."""
    thread, refused = threading.get_ident(), list[str]()
    _NEVER_WAITING[thread] = refused
    try:
        yield refused
    finally:
        del _NEVER_WAITING[thread]


def check_may_wait(call: str) -> None:
    """Refuse a call that may wait for a disk, where this thread must not."""
    # In most processes there is no such thread, and nothing is looked up.
    if _NEVER_WAITING and (refused := _NEVER_WAITING.get(threading.get_ident())) is not None:
        refused.append(call)
        raise WaitInEventLoopError(f"{call} in the thread of an event loop; make the call in another thread")
