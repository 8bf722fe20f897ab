"""Planned faults of a toy engine: which calls fail, and how. `Trouble` (`core.py`) carries them out."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from perdure.engine.contract import Outcome


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """How a decode goes wrong: with what outcome, and after how many tokens of its batch.

    FULL and REJECTED come before the first token, and change nothing.
    """

    outcome: Outcome = Outcome.FAILED
    after: int = 0


class Gate:
    """Holds every decode until it is opened or the decode is stopped, so that a test can act meanwhile."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        """Set once a decode waits here."""
        self._open = False
        self._change = threading.Condition()

    def open(self) -> None:
        with self._change:
            self._open = True
            self._change.notify_all()

    def shut(self) -> None:
        with self._change:
            self._open = False
            self.reached.clear()

    def check_stop(self) -> None:
        """Make threads that wait check their stop flag again."""
        with self._change:
            self._change.notify_all()

    def wait(self, stop: threading.Event) -> None:
        with self._change:
            if not self._open:
                self.reached.set()
            self._change.wait_for(lambda: self._open or stop.is_set())


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The planned faults of every context of a model. Calls are counted from 1, for each context alone."""

    no_memory: bool = False
    """No context can be opened."""
    calls: frozenset[int] = frozenset()
    """These native calls fail, each in its own way: a decode or a read fails, a write or an adapter is
    refused, a removal, a copy or a clear does nothing."""
    decodes: Mapping[int, PlannedFault] = field(default_factory=dict)
    """These decodes end like this."""
    writes: frozenset[int] = frozenset()
    """These writes are refused."""
    lies: Mapping[int, int] = field(default_factory=dict)
    """These questions for the newest position get an answer that is off by so much."""
    pace: float = 0.0
    """Seconds that each token takes; a stop ends the wait."""
    gate: Gate | None = None
    """Where every decode waits before each token."""
