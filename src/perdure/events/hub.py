"""The hub that events go through. The queues of its subscribers are in `subscription.py`."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from perdure.checks import check_whole
from perdure.errors import InvalidInputError
from perdure.events import LIMIT
from perdure.events.background import BackgroundThread

if TYPE_CHECKING:
    from perdure.events.event import Event, LateEvent, Observer, PlainEvent
    from perdure.events.subscription import Subscription


log = logging.getLogger("perdure.events")


class EventHub:
    """Hands events on to subscribers.

    Always holds: `on` is False exactly while nobody has subscribed; a hub never waits, and whatever an
    observer does or raises reaches nobody else. Anyone may subscribe; any thread may emit.
    """

    def __init__(self, changed: Callable[[bool], None] = lambda has_listeners: None) -> None:
        """`changed` is called with whether a subscriber wants all events, whenever that changes."""
        self._changed = changed
        self._changing = threading.RLock()
        self._all: tuple[Subscription, ...] = ()
        self._by_request: dict[str, Subscription] = {}
        self.ids: Iterator[str] = map(f"{secrets.token_hex(4)}-{{}}".format, itertools.count(1))
        """Ids for requests that no other one has, in any process."""
        self._threads: set[threading.Thread] = set()
        self._wanted = False
        self.on = False
        self.wants_tokens = True
        """Whether subscribers of all requests want events of tokens, if there are such subscribers."""
        self.release: Callable[[], None] = _nothing
        """Emits the events that were held back so far. Called before another event, in any thread."""

    # For subscribers.

    def subscribe(self, kinds: Iterable[str] | None = None, *, limit: int = LIMIT) -> Subscription:
        """All events from now on, or those of some kinds."""
        from perdure.events.subscription import Subscription

        check_whole("limit", limit, 1)
        chosen = None if kinds is None else _checked_kinds(kinds)
        subscription = Subscription(chosen, limit, self._unsubscribe)
        self.release()
        with self._changing:
            self._all = (*self._all, subscription)
            self._update()
        return subscription

    def join(self, subscription: Subscription) -> Callable[[], None]:
        """Hand all events to a subscription that is there already, until what this gives is called."""
        self.release()
        with self._changing:
            self._all = (*self._all, subscription)
            self._update()
        return lambda: self._unsubscribe(subscription)

    def call(
        self, observer: Observer, kinds: Iterable[str] | None = None, *, limit: int = LIMIT
    ) -> Subscription:
        """Call `observer` with each event from now on, in a separate thread."""
        subscription = self.subscribe(kinds, limit=limit)
        self._start(subscription, observer)
        return subscription

    def observe(self, request: str, observer: Observer) -> None:
        """Call `observer` with the events of one request, in a separate thread."""
        from perdure.events.subscription import Subscription

        subscription = Subscription()
        self.forward(request, subscription)
        self._start(subscription, observer, f" of request {request}")

    def forward(self, request: str, subscription: Subscription) -> None:
        """Hand the events of one request to a subscription."""
        with self._changing:
            self._by_request[request] = subscription
            self._update()

    def _start(self, subscription: Subscription, observer: Observer, whose: str = "") -> None:
        thread = BackgroundThread(
            _run_observer, subscription, observer, whose, name="perdure-observer", restart=True
        )
        with self._changing:
            self._threads = {each for each in self._threads if each.is_alive()} | {thread}
        thread.start()

    def _unsubscribe(self, subscription: Subscription) -> None:
        self.release()
        with self._changing:
            if subscription in self._all:
                self._all = tuple(each for each in self._all if each is not subscription)
                self._update()

    def _update(self) -> None:
        self.on = bool(self._all or self._by_request)
        self.wants_tokens = not self._all or any(each.wants("TokenDrawn") for each in self._all)
        if self._wanted != bool(self._all):
            self._wanted = bool(self._all)
            self._changed(self._wanted)

    def close(self, patience: float = 1.0) -> None:
        """End every subscription; observers have `patience` seconds for what has come."""
        self.release()
        with self._changing:
            ending = {*self._all, *self._by_request.values()}
            self._all, self._by_request, self.on = (), {}, False
            threads = list(self._threads)
        for subscription in ending:
            subscription.end()
        end = time.monotonic() + patience
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    # For callers that emit events.

    def watches(self, request: str) -> bool:
        """Whether a subscriber wants the events of a request."""
        return bool(self._all) or request in self._by_request

    def wants_tokens_of(self, request: str) -> bool:
        """Whether a subscriber wants the tokens of a request."""
        return (bool(self._all) and self.wants_tokens) or request in self._by_request

    def emit(self, kind: type[Event], request: str, *fields: Any) -> None:
        """Emit an event that happens now; `fields` are those of its kind, in their order."""
        self.release()
        self.hand_on((kind.__name__, time.time(), request, *fields))

    def hand_on(self, plain: PlainEvent | LateEvent) -> None:
        """Hand on an event that happened here or in the engine's process."""
        for subscription in self._all:
            subscription.push(plain)
        request = plain[2]
        if request and (own := self._by_request.get(request)) is not None:
            # Another process may want all events, and those of requests that it sent.
            if own not in self._all:
                own.push(plain)
            if plain[0] == "Ended" and plain[-1]:
                self.forget(request)

    def hand_on_all(self, events: Sequence[PlainEvent], dropped: int = 0) -> None:
        """The same for many; `dropped` had no room on their way here."""
        for plain in events:
            self.hand_on(plain)
        if dropped:
            for subscription in self._all:
                subscription.dropped += dropped

    def forget(self, request: str) -> None:
        """No more events of a request come."""
        with self._changing:
            own = self._by_request.pop(request, None)
            if own is None:
                return
            self._update()
        if not own.shared:
            own.end()


def _nothing() -> None:
    """Nothing was held back."""


def _run_observer(subscription: Subscription, observer: Observer, whose: str) -> None:
    failed = 0
    for event in subscription:
        try:
            observer(event)
        except Exception:
            failed += 1
            if failed == 1:
                log.exception(
                    "an observer%s failed at %s; it is called with the next event", whose, event.kind
                )
    if subscription.dropped:
        log.warning("an observer%s was too slow: %d events were dropped", whose, subscription.dropped)


def _checked_kinds(kinds: Iterable[str]) -> frozenset[str]:
    from perdure.events.event import KINDS

    chosen = frozenset([kinds] if isinstance(kinds, str) else kinds)
    for name in chosen:
        if name not in KINDS:
            raise InvalidInputError(f"there is no event {name!r}; there are {', '.join(KINDS)}")
    return chosen
