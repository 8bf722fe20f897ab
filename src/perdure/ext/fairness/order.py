"""The order of requests where several namespaces ask: each has a share of the engine, by its weight.

A namespace has a virtual time: the tokens that were computed for it, of prompts and of replies, divided by
its weight. The one that is behind goes first:

    prompts  a step reads those of the namespace whose time is least; what room is left goes to the next
    slots    each slot that a namespace has counts as QUANTUM tokens more. A free one goes to the namespace
             whose time is least with it; one is taken from another that is ahead by more than a QUANTUM

`priority` orders the requests of one namespace. A namespace that asks for little falls behind by CREDIT at
most: so much it has at once when it asks for more. Whatever nobody else wants, one namespace has alone.

`lag_bound` is how far a namespace that waits for a slot can be behind another that has one. It follows from
the rule for slots: with h of n slots, it waits only while every other one with g slots has

    time' + g QUANTUM / weight'  <=  time + (h + 1) QUANTUM / weight + QUANTUM / min(weight, weight')

where g is at least 1, and so h at most n - 1. One step at most is computed until that is checked again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

from perdure.spi.decode import QueueOrder, Rank, SequenceGroup, Step, TokenSequence
from perdure.spi.runtime import Request

QUANTUM = 512
"""Tokens that a slot counts for, and by which a namespace is ahead before another takes its slot."""
CREDIT = 2048
"""Tokens, of weight 1, by which a namespace that asks for nothing can be behind the others."""
_ACCOUNTS = 1024
"""Namespaces that are remembered while they ask for nothing."""

Groups: TypeAlias = Sequence[SequenceGroup]
Ready: TypeAlias = list[tuple[SequenceGroup, TokenSequence]]


def lag_bound(weight: float, other: float, *, slots: int, step: int, quantum: float = QUANTUM) -> float:
    """Tokens by which a namespace of `weight` that waits for a slot can be behind one of weight `other`, if a
    step computes `step` tokens at most. Requests that keep their slots (several samples, `exact`) add
    what they have yet to compute, times weight / other."""
    return (slots + 1) * quantum + step * weight / other


@dataclass(slots=True)
class Account:
    """What a namespace has had."""

    weight: float = 1.0
    time: float = -math.inf
    """Tokens by weight; after a pause no less than those of the others, but for CREDIT."""
    served: int = 0
    """Tokens that were computed for it."""
    lag: float = 0.0
    """Tokens by which it is behind the namespace that is furthest ahead, while it waits; else 0."""
    longest_lag: float = 0.0


class FairOrder(QueueOrder):
    """Each namespace has its share by weight; all of it where it is alone."""

    def __init__(self, *, quantum: float = QUANTUM, credit: float = CREDIT) -> None:
        self.quantum = quantum
        self.credit = credit
        self.accounts: dict[str, Account] = {}
        self._present: set[str] = set()
        """Those that ask for something."""
        self._now = 0.0
        """The time of the namespace that is furthest behind, of those that wait; it never goes back."""
        self._seen: set[SequenceGroup] = set()
        """Requests that had no slot when slots were given out last."""
        self._gave_way: set[SequenceGroup] = set()
        """Requests that lost their slots since the last step: each loses one slot a step."""

    def waiting(self, groups: Groups, active: Groups) -> list[SequenceGroup]:
        slots, ordered = _slots(active), list[tuple[float, SequenceGroup]]()
        for group in super().waiting(groups, active):
            request = group.sequences[0].request
            account = self._account(request)
            if group not in self._seen:
                account.weight = request.weight
            ordered.append((self._with_slots(account, slots[request.namespace] + 1), group))
            if group.pending_prefix is None:
                slots[request.namespace] += 1
        self._seen = set(groups)
        ordered.sort(key=lambda pair: pair[0])
        return [group for _, group in ordered]

    def to_give_way(self, waiting: Groups, active: Groups) -> SequenceGroup | None:
        able = [group for group in active if group not in self._gave_way]
        wanting = _by_namespace(group for group in waiting if group.pending_prefix is None)
        having = _by_namespace(able)
        group = None
        for name, groups in wanting.items():
            group = group or super().to_give_way(groups, having.get(name, []))
        group = group or self._ahead(wanting, having, _slots(active))
        if group is not None:
            self._gave_way.add(group)
        return group

    def _ahead(
        self,
        wanting: Mapping[str, Sequence[SequenceGroup]],
        having: Mapping[str, Sequence[SequenceGroup]],
        slots: Counter[str],
    ) -> SequenceGroup | None:
        """The request that gives its slot to one of another namespace that is behind."""
        accounts = self.accounts
        behind = {name: self._account(wanting[name][0].sequences[0].request) for name in wanting}
        for name in sorted(behind, key=lambda name: self._with_slots(behind[name], slots[name] + 1)):
            mine = behind[name]
            for other in sorted(having, key=lambda name: -self._with_slots(accounts[name], slots[name])):
                theirs = accounts[other]
                margin = self.quantum / min(mine.weight, theirs.weight)
                limit = self._with_slots(mine, slots[name] + 1) + margin
                if other == name or self._with_slots(theirs, slots[other]) <= limit:
                    continue
                if (group := self.last_of(having[other])) is not None:
                    return group
        return None

    def _with_slots(self, account: Account, count: int) -> float:
        """The time of a namespace that has so many slots, as far as slots go."""
        return account.time + count * self.quantum / account.weight

    def prompts(self, prefills: Ready, turn: int) -> Ready:
        queues: dict[str, Ready] = {}
        for pair in prefills:
            queues.setdefault(pair[1].request.namespace, []).append(pair)
        if len(queues) < 2:
            return super().prompts(prefills, turn)
        first = sorted(queues, key=lambda name: self._account(queues[name][0][1].request).time)
        return [pair for name in first for pair in super(FairOrder, self).prompts(queues[name], turn)]

    def served(self, steps: Sequence[Step], waiting: Groups, active: Groups) -> None:
        self._gave_way.clear()
        for step in steps:
            for chunk in step:
                if chunk.group.rank < Rank.IDLE:
                    account = self._account(chunk.sequence.request)
                    tokens = chunk.count + chunk.agreed
                    account.served += tokens
                    account.time += tokens / account.weight
        self._seen.intersection_update(waiting)
        without = {_namespace(group) for group in self._seen if group.pending_prefix is None}
        reading = {_namespace(group) for group in active if _is_reading(group)}
        having = {_namespace(group) for group in active if group.rank < Rank.IDLE}
        self._settle(without, reading, having)

    def _settle(self, without: set[str], reading: set[str], having: set[str]) -> None:
        """Have no namespace be far behind because it asks for little, and note the lags of those `without` a
        slot for some request. Others have prompts to be read, or slots."""
        accounts = self.accounts
        for name in self._present:
            accounts[name].lag = 0.0
        self._present = {name for name in without | having if name in accounts}
        ahead = max((accounts[name].time for name in having), default=self._now)
        self._now = max(self._now, min((accounts[name].time for name in without | reading), default=ahead))
        for name in having - without - reading:
            accounts[name].time = max(accounts[name].time, self._now - self.credit)
        for name in without:
            account = accounts[name]
            account.lag = max(0.0, ahead - account.time) * account.weight
            account.longest_lag = max(account.longest_lag, account.lag)

    def shares(self) -> Mapping[str, Mapping[str, float]]:
        return {name: asdict(account) for name, account in list(self.accounts.items())}

    def _account(self, request: Request) -> Account:
        """That of the namespace of a request."""
        name = request.namespace
        if name in self._present:
            return self.accounts[name]
        if (account := self.accounts.get(name)) is None:
            if len(self.accounts) >= _ACCOUNTS:
                for absent in self.accounts.keys() - self._present:
                    del self.accounts[absent]
            account = self.accounts[name] = Account()
        account.weight = request.weight
        account.time = max(account.time, self._now - (self.credit if self._present else 0.0))
        self._present.add(name)
        return account


def _namespace(group: SequenceGroup) -> str:
    return group.sequences[0].request.namespace


def _by_namespace(groups: Iterable[SequenceGroup]) -> dict[str, list[SequenceGroup]]:
    found: dict[str, list[SequenceGroup]] = {}
    for group in groups:
        found.setdefault(_namespace(group), []).append(group)
    return found


def _slots(active: Iterable[SequenceGroup]) -> Counter[str]:
    """How many slots each namespace has."""
    slots: Counter[str] = Counter()
    for group in active:
        slots[_namespace(group)] += group.slots
    return slots


def _is_reading(group: SequenceGroup) -> bool:
    """Whether it has a prompt that is not read to its end."""
    first = group.sequences[0]
    return group.rank < Rank.IDLE and first.seq is not None and first.cached < first.prompt_length - 1
