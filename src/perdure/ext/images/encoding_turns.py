"""Turns at the encoder: one file is encoded at a time, and namespaces take turns.

ada has 40 files to encode, bob has 1: bob's is the next but one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from perdure import BusyError

MOST_WAITING = 16
"""Files of one namespace that wait. Each has a thread of the server."""


class EncodingTurns:
    """Always holds: a namespace whose file waits has a turn after at most one file of each other one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = False
        self._waiting: dict[str, deque[object]] = {}
        """By namespace, the one that is served next first."""

    @contextmanager
    def take(self, namespace: str) -> Iterator[None]:
        """Have the encoder for one file. BusyError where too many of this namespace wait."""
        ticket = object()
        with self._changed:
            mine = self._waiting.setdefault(namespace, deque())
            if len(mine) >= MOST_WAITING:
                raise BusyError(
                    f"{len(mine)} images of yours wait to be encoded; ask again later",
                    waiting=len(mine),
                    limit=MOST_WAITING,
                )
            mine.append(ticket)
            self._changed.wait_for(lambda: not self._taken and self._next() is ticket)
            # Its namespace is the last one now.
            mine.popleft()
            del self._waiting[namespace]
            if mine:
                self._waiting[namespace] = mine
            self._taken = True
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()

    def _next(self) -> object:
        return next(iter(self._waiting.values()))[0]
