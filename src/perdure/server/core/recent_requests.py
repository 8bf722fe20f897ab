"""The last requests, for whoever wants to see what was reused and why not more."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from perdure.chat.reply import ChatReply
from perdure.decode.request import Reply, Timings, Usage
from perdure.decode.slots import ReuseReport

_KEPT = 200
"""Of each namespace."""
_NAMESPACES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentRequest:
    """How one request was answered. What was said is not in it."""

    number: int
    ended: float
    session: str | None
    finish_reason: str
    usage: Usage
    reuse: ReuseReport
    timings: Timings


class RecentRequests:
    """The last requests of each namespace, in memory. Safe from any thread.

    Numbers count up within a namespace, so that they tell nobody what others ask.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, deque[RecentRequest]] = {}
        self._numbers: dict[str, itertools.count[int]] = {}

    def add(
        self, namespace: str, replies: Sequence[Reply] | Sequence[ChatReply], session: str | None
    ) -> None:
        first = replies[0]
        with self._lock:
            # The one that asked last stands last: the first goes when there are too many.
            found = self._of.pop(namespace, None) or deque(maxlen=_KEPT)
            self._of[namespace] = found
            found.append(
                RecentRequest(
                    number=next(self._numbers.setdefault(namespace, itertools.count(1))),
                    ended=time.time(),
                    session=session,
                    finish_reason=first.finish_reason,
                    usage=first.usage,
                    reuse=first.reuse,
                    timings=first.timings,
                )
            )
            if len(self._of) > _NAMESPACES:
                oldest = next(iter(self._of))
                del self._of[oldest], self._numbers[oldest]

    def latest(self, namespace: str, *, limit: int, before: int | None = None) -> list[RecentRequest]:
        """The latest first: up to `limit`, of those that came before number `before`."""
        with self._lock:
            found = list(self._of.get(namespace, ()))
        return [each for each in reversed(found) if before is None or each.number < before][:limit]
