"""Routing policy: which replica answers a request.

A request goes where it costs the least until its first token, in seconds:

    cost = time in the queue there + time until the state that is missing there is had

So a session goes where its state is warm, a new conversation where the beginning of its prompt is, one that
is known nowhere to the least loaded replica; and nobody waits in a queue that takes longer than moving the
state to a replica that is free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeAlias

from perdure.spi.base import is_number, is_whole

Mark: TypeAlias = str
"""The digest of a session's name, or of a prompt's beginning."""

MOST_MARKS = 512
"""Marks that a replica reports, the latest ones: 20 kB a time."""
_REMEMBERED = 100_000
_LATELY = 600.0
"""Seconds for which a conversation is taken to go on."""
_RATE, _SECONDS = 200.0, 1.0
"""What a replica is taken for that has not measured anything yet: tokens a second, seconds a request."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What is known of a request before it is answered."""

    marks: tuple[tuple[Mark, int], ...] = ()
    """Beginnings of its prompt, each with its tokens, the shortest first. For a session, the replica that has
    it says how many."""
    tokens: int = 1
    """Of its prompt, roughly: what came with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """What a replica reports of itself every second or so."""

    marks: Mapping[Mark, int] = field(default_factory=dict)
    """What is warm there, with its tokens."""
    queue: int = 0
    """Requests that it has: waiting and being served."""
    slots: int = 1
    seconds: float = _SECONDS
    """A request takes, from its slot to its end."""
    rate: float | None = None
    """Tokens a second at which it gets state that it does not have: computed, or read where replicas share
    it, whichever is faster there. None: not measured yet."""
    full: float = 0.0
    """The state of what was asked for in the last minutes, as a part of what it can have at hand: above 1,
    conversations that go on make way for each other."""
    draining: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "marks": dict(self.marks),
            "queue": self.queue,
            "slots": self.slots,
            "seconds": self.seconds,
            "rate": self.rate,
            "full": self.full,
            "draining": self.draining,
        }

    @classmethod
    def from_json(cls, stats: Mapping[str, Any]) -> ReplicaFacts:
        """What a replica reported; fields that make no sense are left out, as a replica of another version
        may say it in other words."""
        marks = stats.get("marks")
        numbers = {
            name: float(stats[name])
            for name in ("seconds", "rate", "full")
            if is_number(stats.get(name)) and stats[name] > 0
        }
        wholes = {
            name: int(stats[name])
            for name, least in (("queue", 0), ("slots", 1))
            if is_whole(stats.get(name)) and stats[name] >= least
        }
        return cls(
            marks=marks if isinstance(marks, dict) else {},
            draining=stats.get("draining") is True,
            **numbers,  # type: ignore[arg-type]
            **wholes,
        )


def warm_tokens(ask: RoutedRequest, facts: ReplicaFacts) -> int:
    """How much of what is asked for is warm there."""
    return max((facts.marks.get(mark, 0) for mark, _ in ask.marks), default=0)


def cost(ask: RoutedRequest, facts: ReplicaFacts, *, known: int, rate: float) -> float:
    """Seconds until the first token there, where `known` is the most that is warm anywhere, and `rate` tokens
    a second are had that are not."""
    beyond = max(0, facts.queue + 1 - facts.slots)
    missing = max(known, ask.tokens) - min(warm_tokens(ask, facts), max(known, ask.tokens))
    return beyond / facts.slots * facts.seconds + missing / rate


def ranked(ask: RoutedRequest, replicas: Mapping[str, ReplicaFacts]) -> list[str]:
    """All replicas, the one first that answers soonest. Of equal ones that with the shorter queue, then the
    one with less state; one that takes its leave comes last.

    All are taken to get missing state at one rate, the middle of those that were measured: what differs from
    one replica to the next by chance must not draw all new conversations to one.
    """
    rate = median([each.rate for each in replicas.values() if each.rate is not None] or [_RATE])
    known = max((warm_tokens(ask, facts) for facts in replicas.values()), default=0)

    def order(name: str) -> tuple[object, ...]:
        facts = replicas[name]
        return (
            facts.draining,
            cost(ask, facts, known=known, rate=rate),
            facts.queue,
            facts.full,
            sum(facts.marks.values()),
            name,
        )

    return sorted(replicas, key=order)


class RouterMemory:
    """Where a router has sent what lately: what replicas report is some seconds old.

    Sent prompts count as warm on their replica until it reports again; then the report counts.
    """

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._most = most
        self._sent: OrderedDict[Mark, tuple[str, int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def sent(self, ask: RoutedRequest, replica: str, known: int, now: float) -> None:
        for mark, tokens in ask.marks:
            self._sent[mark] = replica, max(tokens, known), now
            self._sent.move_to_end(mark)
        while len(self._sent) > self._most:
            self._sent.popitem(last=False)

    def seen(
        self,
        ask: RoutedRequest,
        replicas: Mapping[str, ReplicaFacts],
        reported_at: Mapping[str, float],
        *,
        trust: float,
    ) -> dict[str, ReplicaFacts]:
        """The facts with what was sent since they were reported, and `trust` seconds before that: a request
        that is being answered is warm nowhere yet."""
        updated = dict(replicas)
        for mark, _ in ask.marks:
            replica, tokens, at = self._sent.get(mark, ("", 0, 0.0))
            facts = updated.get(replica)
            if facts is None or mark in facts.marks or at + trust < reported_at.get(replica, 0.0):
                continue
            updated[replica] = ReplicaFacts(**{**facts.to_json(), "marks": {**facts.marks, mark: tokens}})
        return updated


class WarmMarks:
    """What is warm on a replica: the marks of what it answered last, as far as its memory reaches.

    An estimate: what was used longest ago is taken to be gone once more than `capacity` tokens came after it,
    as the cache does it. A wrong one costs time, never a reply.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._marks: OrderedDict[Mark, tuple[int, Mark]] = OrderedDict()
        """Tokens of each, and the longest mark of the latest request that had it."""
        self._whole: OrderedDict[Mark, tuple[int, set[Mark]]] = OrderedDict()
        """The longest marks, with their tokens and with the marks that go when they go."""
        self._total = 0
        self._recent: OrderedDict[Mark, tuple[int, float]] = OrderedDict()
        """What was asked for lately, whether it is here still or not: tokens, and when."""

    def answered(self, ask: RoutedRequest, tokens: int, now: float = 0.0) -> None:
        """A request was answered: so many tokens of it are here now."""
        if not ask.marks:
            return
        for mark, _ in ask.marks:
            self._recent.pop(mark, None)
        self._recent[ask.marks[-1][0]] = tokens, now
        longest, mine = ask.marks[-1][0], set[Mark]()
        for mark, length in ask.marks:
            # A shorter one that was a conversation's longest is the beginning of this now.
            mine |= self._forget(mark)
            self._marks[mark] = (tokens if mark == longest else min(length, tokens)), longest
            self._marks.move_to_end(mark)
        mine = {mark for mark in mine if self._marks.get(mark, (0, ""))[1] not in self._whole}
        for mark in mine:
            self._marks[mark] = self._marks[mark][0], longest
        self._whole[longest] = tokens, mine | {mark for mark, _ in ask.marks}
        self._total += tokens
        while self._total > self.capacity and len(self._whole) > 1:
            first = next(iter(self._whole))
            for mark in self._forget(first):
                if self._marks[mark][1] == first:
                    del self._marks[mark]

    def _forget(self, longest: Mark) -> set[Mark]:
        tokens, marks = self._whole.pop(longest, (0, set[Mark]()))
        self._total -= tokens
        return {mark for mark in marks if mark in self._marks}

    def full(self, now: float = 0.0) -> float:
        """What was asked for in the last minutes, as a part of the capacity."""
        while self._recent and next(iter(self._recent.values()))[1] < now - _LATELY:
            self._recent.popitem(last=False)
        return sum(tokens for tokens, _ in self._recent.values()) / self.capacity

    def latest(self, most: int = MOST_MARKS) -> dict[Mark, int]:
        names: Sequence[Mark] = list(self._marks)[-most:]
        return {mark: self._marks[mark][0] for mark in names}


def wanted_replicas(facts: Iterable[ReplicaFacts], *, requests: float, target: float) -> int:
    """How many replicas there should be: for so many requests at `target` each, and one more where all have
    more conversations that go on than nine tenths of their memory holds."""
    full = [each.full for each in facts]
    by_queue = -(-requests // target)
    # One more at a time: what moves to it makes room elsewhere.
    by_memory = len(full) + 1 if full and requests > 0 and min(full) > 0.9 else 0
    return max(1, int(by_queue), by_memory)
