"""Which slot a prompt gets, and from where its beginning comes: the way that costs least.

Costs are in tokens computed. Everything here is a function of what the slots hold; nothing is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perdure.cache.found import Found

Counts = NDArray[np.int64]

# Moving a token's state is hundreds of times cheaper than computing it; these only have to rank the choices,
# so round figures do.
PUT_BACK = 0.001
_TAKE_OUT = 0.002
_LOST = 0.5
"""A token whose state nobody keeps may be asked for again, or not."""
_PLACE = 16.0
"""Taking the place of a conversation that may go on, even where it can be moved out and back."""


@dataclass(frozen=True, slots=True)
class Option:
    """A way to serve a prompt: in which slot, and where its first `length` tokens come from."""

    seq: int
    length: int
    cost: float
    source: int | Found | None
    """A slot, blocks, or nothing at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best way, and how much of the prompt the ways that there are would bring."""

    best: Option
    sure: int
    """From what is not being computed at the moment."""
    reach: int
    """From anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """What the slots hold now, an element each."""

    idle: NDArray[np.bool_]
    used: Counts
    held: Counts
    reach: Counts
    """How many tokens of the prompt each can be brought to."""


def choose(
    length: int,
    slots: SlotView,
    kept: Sequence[tuple[Found, float]],
    *,
    fits: Callable[[Counts], NDArray[np.bool_] | bool],
    copy: float | None,
) -> Choice:
    """The best way to serve a prompt of `length` tokens.

    `kept` are prefixes in the tiers with what reading them costs, `fits` says whether the state of so many
    tokens can be moved out, and `copy` is what a copy of a slot costs; None where there can be none.
    """
    seqs = np.flatnonzero(slots.idle)
    held, here, used = slots.held[seqs], slots.reach[seqs], slots.used[seqs]
    room = fits(held)

    def displaced(kept: Counts | int) -> NDArray[np.float64]:
        """What it costs to move out, or to lose, what the idle slots hold beyond `kept`."""
        cost = np.where(room, held * (_TAKE_OUT + PUT_BACK), (held - kept) * _LOST)
        return np.where(held <= kept, 0.0, _PLACE + cost)

    in_place = length - here + displaced(here)
    first = int(np.lexsort((used, in_place))[0])
    stays = int(seqs[first]) if here[first] else None
    options = [Option(int(seqs[first]), int(here[first]), float(in_place[first]), stays)]
    moved = displaced(0)
    # The two that are cheapest to empty: the cheapest may be the one to copy from.
    cheapest = [int(at) for at in np.lexsort((used, moved))[:2]]
    for found, read in kept:
        cost = length - found.length + found.length * PUT_BACK + read + moved[cheapest[0]]
        options.append(Option(int(seqs[cheapest[0]]), found.length, float(cost), found))
    source = int(np.argmax(slots.reach))
    there = int(slots.reach[source])
    target = next((at for at in cheapest if seqs[at] != source), None)
    if copy is not None and there and target is not None:
        cost = length - there + copy + moved[target]
        options.append(Option(int(seqs[target]), there, float(cost), source))
    last_used = dict(zip(seqs.tolist(), used.tolist(), strict=True))
    best = min(options, key=lambda option: (option.cost, last_used[option.seq], option.seq))
    lengths = [int(here.max()), *(found.length for found, _ in kept)]
    return Choice(best=best, sure=max(lengths), reach=max(*lengths, there if copy is not None else 0))
