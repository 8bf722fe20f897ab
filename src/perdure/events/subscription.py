"""The queue of one subscriber of events."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from perdure.closing import Closing
from perdure.events import LIMIT

if TYPE_CHECKING:
    from perdure.events.event import Event, LateEvent, PlainEvent

_LINGER = 0.1
"""Seconds for which events gather before a reader is woken again: each waking takes Python's lock from the
thread that computes."""
_BURST = 16
"""Events after which a reader lets go of Python's lock: the thread that computes may wait for it. To let go
takes as long as two events."""
_NAP = 0.2
"""Seconds: threads wait in short naps, since Python may miss a Ctrl-C that comes just as a wait begins."""


class Subscription(Closing):
    """Events on their way to one reader: iterate it, or `poll` it. Close it, or use `with`.

    Always holds: `push` never waits; of more than `limit` events that nobody has read, the newest are dropped
    and counted in `dropped`.
    """

    def __init__(
        self,
        kinds: frozenset[str] | None = None,
        limit: int = LIMIT,
        closed: Callable[[Subscription], None] | None = None,
    ) -> None:
        self._kinds = kinds
        self._limit = limit
        self._closed = closed
        self._events: deque[PlainEvent | LateEvent] = deque()
        self._asleep = False
        self._wake = threading.Event()
        self._over = False
        self.dropped = 0
        """Events that found no room here."""
        self.shared = False
        """Whether it has the events of several requests, so that it does not end with one of them."""

    # For callers that emit events, in any thread.

    def wants(self, kind: str) -> bool:
        """Whether events of a kind are for it."""
        return self._kinds is None or kind in self._kinds

    def push(self, plain: PlainEvent | LateEvent) -> None:
        if self._kinds is not None and plain[0] not in self._kinds:
            return
        if self._over or len(self._events) >= self._limit:
            self.dropped += not self._over
            return
        self._events.append(plain)
        if self._asleep:
            self._asleep = False
            self._wake.set()

    def end(self) -> None:
        """Nothing more comes: its reader gets what is there, and then the end."""
        self._over = True
        self._wake.set()

    # For its reader.

    def take(self) -> list[PlainEvent]:
        """All that is there, as tuples, without waiting."""
        return list(self._taken())

    def _taken(self) -> Iterator[PlainEvent]:
        """What is there now, one after the other."""
        from perdure.events.event import LateEvent

        events = self._events
        for _ in range(len(events)):
            try:
                event = events.popleft()
            except IndexError:
                # Another reader was faster.
                return
            yield event.made() if type(event) is LateEvent else event

    def poll(self) -> list[Event]:
        """All events that are there, without waiting."""
        from perdure.events.event import event_of

        return [event_of(plain) for plain in self.take()]

    @property
    def waiting(self) -> bool:
        """Whether there is something to take."""
        return bool(self._events)

    @property
    def over(self) -> bool:
        """Whether all events have come."""
        return self._over

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for an event, or for the end; False where `timeout` seconds passed first."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._events and not self._over:
            self._wake.clear()
            self._asleep = True
            if self._events or self._over:
                break
            left = _NAP if end is None else min(_NAP, end - time.monotonic())
            if left <= 0:
                return False
            self._wake.wait(left)
        self._asleep = False
        return True

    def __iter__(self) -> Iterator[Event]:
        from perdure.events.event import event_of

        while True:
            self.wait()
            count = 0
            for plain in self._taken():
                yield event_of(plain)
                count += 1
                if not count % _BURST:
                    time.sleep(0)
            if self._over and not self._events:
                return
            if count < self._limit // 2:
                time.sleep(_LINGER)

    def close(self) -> None:
        """Ask for no more events. Closing twice is fine."""
        if self._closed is not None:
            self._closed(self)
        self.end()
