"""What is asked: text for a model that can write, tokens for one that only counts.

A model of the kind that `Shape.counts` describes writes token n + 1 behind token n. So whoever asks knows the
reply: a prompt that holds it with changes is an edit, and one with false beginnings misleads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Prompt: TypeAlias = str | Sequence[int]

_FUNCTION = '''def {name}(values, limit):
    """Return the {name} of all values that are below the limit."""
    total = 0
    for value in values:
        if value < limit:
            total += value * {number}
    return total


'''
_NAMES = ("price", "weight", "volume", "height", "length", "width", "depth", "speed", "power", "energy")
_FILE = "".join(
    _FUNCTION.format(name=name, number=at + 2) for at, name in enumerate((*_NAMES, "score", "rank"))
)
_EDITED = _FILE.replace("limit", "bound")
EDIT = f"# The file:\n\n{_FILE}# The same file, with `limit` renamed to `bound`:\n\n{_EDITED[:400]}"
FREE = "The history of the lighthouse is long. It began when a keeper"
SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": "string", "maxLength": 12}
        for name in ("first_name", "family_name", "place_of_birth", "favourite_colour", "profession")
    },
    "required": ["first_name", "family_name", "place_of_birth", "favourite_colour", "profession"],
    "additionalProperties": False,
}
_FIRST = 1000
"""Tokens from here on are plain words."""
_CHANGED = 20
"""One token in so many of a file is changed."""
_FALSE = 8
"""One in so many tokens of a free text comes behind words that another one came behind before."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts for one model."""

    edit: Prompt
    free: Prompt
    """Text in which little comes twice."""
    many: Sequence[Prompt]


def texts(streams: int) -> Prompts:
    """For a model that can write."""
    return Prompts(EDIT, FREE, [f"{FREE} number {at}" for at in range(streams)])


def counted(n_vocab: int, streams: int, length: int = 1000) -> Prompts:
    """For one that counts."""
    dice = random.Random(1)
    others = range(n_vocab // 2, n_vocab)
    file = [dice.choice(others) if at % _CHANGED == 0 else _FIRST + at for at in range(1, length + 1)]
    start = _FIRST + 2 * length
    free: list[int] = []
    for at in range(start, start + length // 2, _FALSE):
        free += [at, at + 1, at + 2, dice.choice(others)]
    many = [[_FIRST + 300 * at + step for step in range(16)] for at in range(streams)]
    return Prompts([*file, _FIRST], [*free, start - 1], many)
