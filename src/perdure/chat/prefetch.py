"""Prefetching: the beginning of a conversation's next prompt is read while the engine has nothing to do.

    prompt, reply       user: Why?   assistant: <think>Hm. Light…</think>Because of light.
    the next prompt     user: Why?   assistant: Because of light.   user: …

A template that drops the reasoning of earlier turns has the reply read again in the next prompt. Prefetched,
the form without it is cached by then. It is only ever state: a reply has the same tokens with it and without.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Protocol

from perdure.backend import Backend
from perdure.decode.request import Delta, Reply, Request
from perdure.decode.stream import Stream, one_request
from perdure.errors import PerdureError
from perdure.events.background import BackgroundThread
from perdure.request_options import Sampling

log = logging.getLogger("perdure.chat")

WORTH = 8
"""Tokens that the next prompt would have to read before it pays to read them ahead."""
_WAITING = 64
"""What is due for conversations; of more, the oldest is not done."""
_READING = 16
"""Prompts that wait to be read; of more, the oldest are cancelled."""
_IDLE = 10.0
"""Seconds after which a thread that has nothing to do ends."""


class Payer(Protocol):
    """The account that pays for tokens that are read ahead. For any thread."""

    @property
    def tokens_left(self) -> int | None:
        """What it may still have computed; None is without a bound."""
        ...

    def spend(self, prompt: int, completion: int = 0) -> None: ...


PAYER: ContextVar[Payer | None] = ContextVar("PAYER", default=None)
"""The account that pays for requests of this task or thread; None: none."""


def reading(
    tokens: Sequence[int],
    *,
    namespace: str,
    adapters: Mapping[str, float] | None,
    conversation: str = "",
) -> Request:
    """Idle work that has `tokens` read, and their state kept."""
    # The last token is doubled: what is fed to draw from is not kept.
    return Request(
        prompt=[*tokens, tokens[-1]],
        max_tokens=1,
        sampling=Sampling(temperature=0),
        namespace=namespace,
        adapters=adapters,
        conversation=conversation,
        idle=True,
    )


class Prefetcher:
    """Renders the beginnings of next prompts in a thread and has the engine read them. Safe from any thread.

    Always holds: no reply waits for it; what it asks for is idle work, which gives way to every request.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._changed = threading.Condition()
        self._due: deque[Callable[[], Request | None]] = deque()
        self._reading: deque[Stream[Delta, Reply]] = deque()
        """What was asked for, so that it can be ended."""
        self._thread: threading.Thread | None = None
        self._busy = False

    def prefetch(
        self,
        beginning: Callable[[], Sequence[int]],
        read: Sequence[int] | None,
        *,
        budget: int,
        namespace: str,
        adapters: Mapping[str, float] | None,
        conversation: str = "",
    ) -> None:
        """Have read what `beginning` gives, up to `budget` tokens behind those that were `read` already; None
        where that is for the cache to say. The account that asks for it pays at once, and one without tokens
        left gets nothing read."""
        payer = PAYER.get()

        def request() -> Request | None:
            left = payer.tokens_left if payer is not None else None
            if left is not None and left < WORTH:
                return None
            tokens = list(beginning())
            if not tokens:
                return None
            if read is not None:
                shared = _shared(tokens, read)
            else:
                estimate = self._backend.cache.plan(tokens, namespace=namespace, adapters=adapters)
                shared = len(tokens) - estimate.computed
            most = budget if left is None else min(budget, left)
            tokens = tokens[: min(shared + most, self._backend.n_ctx - 2)]
            if len(tokens) - shared < WORTH:
                return None
            if payer is not None:
                payer.spend(len(tokens) - shared)
            return reading(tokens, namespace=namespace, adapters=adapters, conversation=conversation)

        self._add(request)

    def then(self, function: Callable[[], object]) -> None:
        """Call `function` in this thread, once what is due by now was asked for."""

        def call() -> None:
            function()

        self._add(call)

    def _add(self, make: Callable[[], Request | None]) -> None:
        with self._changed:
            self._due.append(make)
            while len(self._due) > _WAITING:
                self._due.popleft()
            if self._thread is None:
                self._thread = BackgroundThread(self._run, name="perdure-prefetch")
                self._thread.start()
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all that was due is read."""
        with self._changed:
            self._changed.wait_for(lambda: not self._due and not self._busy)
            reading = list(self._reading)
        for stream in reading:
            with suppress(PerdureError):
                stream.replies()

    def _run(self) -> None:
        while (make := self._next()) is not None:
            try:
                request = make()
                if request is not None:
                    self._reading.append(Stream(one_request(request), self._backend.submit))
                while self._reading and (self._reading[0].done or len(self._reading) > _READING):
                    self._reading.popleft().cancel()
            except PerdureError as error:
                # A template that refuses what it is asked, an engine that is closed: nothing is prefetched.
                log.debug("a prompt was not prefetched: %s", error)
            except BaseException:
                # Whatever it was: what is due next does not wait for a thread that is gone.
                log.exception("a prompt could not be prefetched")

    def _next(self) -> Callable[[], Request | None] | None:
        """What is due next; None where nothing was for a while, and the thread ends."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._due, _IDLE):
                self._thread = None
                return None
            self._busy = True
            return self._due.popleft()


def _shared(tokens: Sequence[int], read: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    count = 0
    for one, other in zip(tokens, read, strict=False):
        if one != other:
            break
        count += 1
    return count
