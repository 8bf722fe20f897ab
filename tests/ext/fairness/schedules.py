"""Random schedules of several namespaces on the toy engine, and an order that checks itself at each step."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from decode.observed import Turnstile, open_toy
from inside import inside
from perdure import Stream
from perdure.ext.fairness.order import FairOrder, lag_bound
from perdure.request_options import Priority
from perdure.spi.decode import SequenceGroup, Step, TokenSequence

BATCH = 32
QUANTUM, CREDIT = 24, 64
"""Small, so that short requests come to the bound."""


@dataclass(frozen=True)
class Asked:
    """One request of a schedule."""

    namespace: str
    prompt: int
    reply: int
    background: bool = False
    samples: int = 1
    after: int = 0
    """Tokens that the engine computes before it comes."""
    cancelled_after: int | None = None
    """Tokens that the engine computes from then until its client leaves."""

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "prompt": [1 + (at * 7 + len(self.namespace) + self.prompt) % 200 for at in range(self.prompt)],
            "max_tokens": self.reply,
            "temperature": 0,
            "ignore_eos": True,
            "n": self.samples,
        }


@dataclass(frozen=True)
class Schedule:
    weights: dict[str, int]
    requests: tuple[Asked, ...]
    slots: int
    exact: bool = False


class CheckedOrder(FairOrder):
    """Checks at each step that nobody who waits is behind by more than the bound, with a count of tokens that
    is independent of the order's."""

    def __init__(self, slots: int, *, exact: bool = False) -> None:
        super().__init__(quantum=QUANTUM, credit=CREDIT)
        self.slots, self.exact = slots, exact
        self.broken: list[str] = []
        self.computed: Counter[str] = Counter()
        self.checked = 0
        """How often somebody waited for a slot of another."""
        self._offered: dict[SequenceGroup, float] = {}
        self._since: dict[tuple[str, str], tuple[float, float]] = {}
        """For one that waits and one that has slots, when that began: how much more had been computed for the
        second, by weight, and how far it was ahead."""

    def prompts(
        self, prefills: list[tuple[SequenceGroup, TokenSequence]], turn: int
    ) -> list[tuple[SequenceGroup, TokenSequence]]:
        self._offered = {
            group: self.accounts[sequence.request.namespace].time for group, sequence in prefills
        }
        return super().prompts(prefills, turn)

    def served(
        self, steps: Sequence[Step], waiting: Sequence[SequenceGroup], active: Sequence[SequenceGroup]
    ) -> None:
        chunks = [chunk for step in steps for chunk in step]
        for chunk in chunks:
            self.computed[chunk.sequence.request.namespace] += chunk.count + chunk.agreed
        read = {chunk.group for chunk in chunks} & self._offered.keys()
        names_read = {name_of(group) for group in read}
        left = [group for group in self._offered if name_of(group) not in names_read]
        for one in read:
            for other in left:
                if self._offered[one] > self._offered[other]:
                    self.broken.append(f"{name_of(one)} was read before {name_of(other)}, which is behind")
        self._offered = {}
        super().served(steps, waiting, active)
        self._check_lags(waiting, active)

    def _check_lags(self, waiting: Sequence[SequenceGroup], active: Sequence[SequenceGroup]) -> None:
        wait = {name_of(group) for group in waiting if group in self._seen and group.pending_prefix is None}
        have = {name_of(group) for group in active}
        keep = {name_of(group) for group in active if len(group.sequences) > 1}
        since, self._since = self._since, {}
        for name in wait if not self.exact else ():
            for other in have - keep - {name}:
                mine, theirs = self.accounts[name], self.accounts[other]
                bound = lag_bound(mine.weight, theirs.weight, slots=self.slots, step=BATCH, quantum=QUANTUM)
                ahead = theirs.time - mine.time
                counted = self.computed[other] / theirs.weight - self.computed[name] / mine.weight
                self._since[name, other] = began, lead = since.get((name, other), (counted, ahead))
                self.checked += 1
                lag = max(ahead, lead + counted - began) * mine.weight
                if lag > bound + 1e-6:
                    self.broken.append(f"{name} is {lag:g} tokens behind {other}, {bound:g} are allowed")


def name_of(group: SequenceGroup) -> str:
    return group.sequences[0].request.namespace


def schedules(most: int = 14) -> st.SearchStrategy[Schedule]:
    names = st.sampled_from(["a", "b", "c"])
    asked = st.builds(
        Asked,
        namespace=names,
        prompt=st.sampled_from([1, 3, 20, 60, 110]),
        reply=st.sampled_from([1, 2, 12, 40, 80]),
        background=st.booleans(),
        samples=st.sampled_from([1, 1, 1, 1, 1, 2]),
        after=st.sampled_from([0, 0, 0, 1, 30, 150]),
        cancelled_after=st.sampled_from([None, None, None, None, 0, 10, 100]),
    )
    return st.builds(
        Schedule,
        weights=st.fixed_dictionaries({name: st.sampled_from([1, 1, 2, 5]) for name in "abc"}),
        requests=st.lists(asked, min_size=2, max_size=most).map(tuple),
        slots=st.integers(1, 3),
        exact=st.sampled_from([False, False, False, True]),
    )


def play(schedule: Schedule, order: CheckedOrder | None = None) -> CheckedOrder:
    """Have a schedule served, and check each reply; the order says whether bounds were broken."""
    gate = Turnstile()
    order = order or CheckedOrder(schedule.slots, exact=schedule.exact)
    with open_toy(gate=gate, slots=schedule.slots, n_batch=BATCH, exact=schedule.exact) as rt:
        backend = inside(rt)
        backend.weights = dict(schedule.weights)
        backend.engine_loop.scheduler.order = order
        jobs: list[tuple[Asked, Stream[Any, Any]]] = []
        try:
            for asked in schedule.requests:
                if asked.after:
                    if not all(job.done for _, job in jobs):
                        gate.reached.wait(0.2)
                    gate.admit(asked.after)
                priority: Priority = "background" if asked.background else "interactive"
                job = rt.submit(**asked.settings, namespace=asked.namespace, priority=priority)
                jobs.append((asked, job))
                if asked.cancelled_after is not None:
                    gate.admit(asked.cancelled_after)
                    job.cancel()
        finally:
            gate.open()
        for asked, job in jobs:
            job.output.wait(finish=True)
            right = alone(tuple(sorted((name, _frozen(value)) for name, value in asked.settings.items())))
            for reply, tokens in zip(job.output.replies, right, strict=True):
                # Nothing starves, and nothing is lost by giving way.
                if asked.cancelled_after is None:
                    assert (reply.finish_reason, reply.tokens) == ("length", tokens)
                else:
                    assert reply.tokens == tokens[: len(reply.tokens)]
    return order


@functools.cache
def alone(settings: tuple[tuple[str, Any], ...]) -> list[tuple[int, ...]]:
    """What a request gets where there is no other."""
    with open_toy(slots=1, cache=0) as rt:
        return [reply.tokens for reply in rt.submit(**dict(settings)).replies()]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
