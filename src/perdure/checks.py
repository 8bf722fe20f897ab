"""Checks of what callers give: numbers, and one of several words.

A bool is no number, though Python takes it for an integer.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
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
