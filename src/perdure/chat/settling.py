"""Settling: what the next prompt of a conversation begins with is read while the engine has nothing to do.

    prompt, reply       user: Why?   assistant: <think>Hm. Light…</think>Because of light.
    the next prompt     user: Why?   assistant: Because of light.   user: …

A template that drops the reasoning of earlier turns has the reply read again in the next prompt. Settled, the
form without it is kept by then. It is only ever state: a reply has the same tokens with it and without.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from perdure.backend import Backend
from perdure.decode.request import Delta, Reply, Request
from perdure.decode.stream import Stream, one_request
from perdure.errors import PerdureError
from perdure.request_options import Sampling

log = logging.getLogger("perdure.chat")

WORTH = 8
"""Tokens that the next prompt would have to read before it pays to read them ahead."""
_WAITING = 64
"""What is due for conversations; of more, the oldest is not done."""
_READING = 16
"""Conversations that wait to be settled; of more, the oldest are not."""
_IDLE = 10.0
"""Seconds after which a thread that has nothing to do ends."""


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


class Settler:
    """Finds out how next prompts begin, in a thread of its own, and has them read. Safe from any thread.

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

    def settle(
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
        where that is for the cache to say."""

        def request() -> Request | None:
            tokens = list(beginning())
            if not tokens:
                return None
            if read is not None:
                shared = _shared(tokens, read)
            else:
                plan = self._backend.cache.plan(tokens, namespace=namespace, adapters=adapters)
                shared = len(tokens) - plan.computed
            tokens = tokens[: min(shared + budget, self._backend.n_ctx - 2)]
            if len(tokens) - shared < WORTH:
                return None
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
                self._thread = threading.Thread(target=self._run, name="perdure-settle", daemon=True)
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
                # A template that refuses what it is asked, an engine that is closed: nothing is settled.
                log.debug("a conversation was not settled: %s", error)
            except Exception:
                log.exception("a conversation could not be settled")

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
