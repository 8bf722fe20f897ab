"""A slot: a sequence of the context, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence of the context. What it holds outlives its request."""

    seq: int
    busy: bool = False
    namespace: str = ""
    exact: int = 0
    """Tokens of it, from the first on, that were or will be computed in the steps of exact mode."""
    forget: bool = False
    """What it holds was cleared while it was busy: it goes when that is over."""
