"""The scheduler: which request gets a slot, and what the next steps compute.

Everything here is a function of the groups that it is given, their slots and a budget, but for the turns of
sets of adapters, which last a time (`AdapterTurns`). It starts no thread and computes nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perdure.checks import is_number
from perdure.decode.request import KeptPrefix, ReuseReport
from perdure.decode.sequence import PendingPrefix, Rank, SequenceGroup, SlotAssignment, TokenSequence
from perdure.engine.adapters import AdapterSet
from perdure.engine.context import Context
from perdure.errors import CannotRewindError, InvalidInputError

if TYPE_CHECKING:
    from perdure.engine.state import Checkpoint


TIMED = 16
"""Steps of so many tokens measure the speed of prompts; shorter ones are mostly overhead."""
LONGEST = 1.0
"""Seconds that a step of a prompt may take while nobody else is served."""
TILE = 64
"""Tokens from which on attention is computed in tiles on a CPU: behind a long context a step of 48 takes
longer than one of 64."""
_FAR_SLOWER = 1.5
"""How much longer a token takes in steps below that where tiles matter."""
LONGEST_TURN = 0.5
"""Seconds for which one set of adapters may keep the engine from the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one step can take."""

    tokens: int
    rows: int
    """Rows of logits."""
    chunk: int
    """Prompt tokens a step while others wait: what a running reply can be held up by."""
    alone: int = 1 << 30
    """Prompt tokens a step while nobody else is served: what a newcomer can be held up by."""


REPLIED = 16
"""Tokens of a reply that one step computes beside those of others: the last one that was drawn, and those
that a grammar forced or that went back with a wrong guess. More of them are read like a prompt."""


@dataclass(slots=True, eq=False)
class Chunk:
    """A part of a step: the `count` tokens of a sequence that follow its first `start`, and behind them
    guesses at the tokens that come next, the `draft`.

    Every token of a reply makes one, so it is not frozen: that would make it thrice as dear.
    """

    group: SequenceGroup
    sequence: TokenSequence
    start: int
    count: int
    draft: Sequence[int] = ()
    agreed: int = 0
    """How many tokens of the draft are known to be those that were drawn."""
    checkpoint: Checkpoint | None = None
    """Where the sequence goes back to if a guess was wrong and its memory cannot be cut."""

    @property
    def is_prompt(self) -> bool:
        """Whether it reads a prompt, or so much of a reply again that it takes as long."""
        return self.start < self.sequence.prompt_length or self.count > REPLIED

    @property
    def takes_guesses(self) -> bool:
        """Whether its reply asks for guesses, and has some use for them now: a step that failed is computed
        again without."""
        sequence = self.sequence
        asks = sequence.request.speculate != 0 and sequence.cached >= sequence.alone_until
        return asks and not self.is_prompt

    def next_row(self) -> int | None:
        """Of the rows behind its last token and each guess, the one that the sequence draws from next; None
        where a guess was wrong, or all rows were drawn from."""
        tokens, end = self.sequence.tokens, self.start + self.count
        ahead = len(tokens) - end
        if ahead > len(self.draft):
            return None
        while self.agreed < ahead:
            if tokens[end + self.agreed] != self.draft[self.agreed]:
                return None
            self.agreed += 1
        return ahead

    def count_agreed(self) -> int:
        """Compare the whole draft with what was drawn: how many of its tokens are the sequence's."""
        tokens, end = self.sequence.tokens, self.start + self.count
        most = min(len(self.draft), len(tokens) - end)
        while self.agreed < most and tokens[end + self.agreed] == self.draft[self.agreed]:
            self.agreed += 1
        return self.agreed


Step: TypeAlias = Sequence[Chunk]
"""What one native call computes."""
Ready: TypeAlias = list[tuple[SequenceGroup, TokenSequence]]
Groups: TypeAlias = Sequence[SequenceGroup]


class Slots:
    """Assigns slots to requests. Here each starts from an empty one, and nothing is kept between requests.

    Only the engine thread calls it, between steps.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.count = context.n_seq
        """How many requests can have a slot at once."""
        self._free = list(range(context.n_seq))

    def acquire(
        self,
        tokens: NDArray[np.int32],
        *,
        namespace: str = "",
        adapters: AdapterSet | None = None,
        reuse: bool = True,
        pins: Sequence[KeptPrefix] = (),
        conversation: str = "",
        side: bool = False,
    ) -> SlotAssignment | PendingPrefix | None:
        """A slot for a prompt; None where all are taken. After an error nothing is taken.

        It is computed with `adapters`, or where there are none given with those of the context. Which
        conversation it is of, and whether it is only beside one, says what may be evicted later."""
        if not self._free:
            return None
        # The lowest: the engine batches neighbours together.
        seq = min(self._free)
        self.context.clear(seq)
        self.context.adapt(self.context.adapters if adapters is None else adapters, seq)
        self._free.remove(seq)
        return SlotAssignment(
            seq, 0, ReuseReport(computed=len(tokens), why="nothing is kept between requests")
        )

    def is_ready(self, prefix: PendingPrefix) -> bool:
        """Whether the prefix is computed, or will not be: it is time to ask again."""
        return True

    def release(self, seq: int) -> None:
        self._free.append(seq)

    def chunk(self, seq: int, cached: int, count: int, checkpoint_at: Collection[int]) -> int:
        """How many of the next `count` tokens one step may take, so that it ends where a checkpoint is due or
        other adapters begin: `checkpoint_at` are lengths to come back to."""
        return self.context.same_adapters(seq, cached, count)

    def reached(self, seq: int, length: int, checkpoint_at: Collection[int]) -> None:
        """A step has brought `seq` to `length` tokens of its prompt."""

    def timed(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens of prompts has taken so long."""


def admit(waiting: Iterable[SequenceGroup], slots: Slots) -> Iterator[SequenceGroup]:
    """Give free slots to waiting groups, the first one first. Yields each group that was dealt with: it has a
    slot now, or an error ended it."""
    for group in waiting:
        if group.pending_prefix is not None and not slots.is_ready(group.pending_prefix):
            continue
        group.pending_prefix = None
        first = group.sequences[0]
        try:
            # At least one token is computed, so that there is a row to draw from; a scored prompt needs all.
            known = np.array(first.tokens[:-1], np.int32)
            request = first.request
            slot = slots.acquire(
                known,
                namespace=request.namespace,
                adapters=first.adapters,
                reuse=not first.scoring,
                pins=request.pins,
                conversation=request.conversation,
                side=request.side,
            )
        except Exception as error:
            group.fail(error)
            yield group
            continue
        if slot is None:
            return
        if isinstance(slot, PendingPrefix):
            group.pending_prefix = slot
            continue
        try:
            group.start(_outside_media(first, slot, slots.context))
        except Exception as error:
            slots.release(slot.seq)
            group.fail(error)
        yield group


def _outside_media(sequence: TokenSequence, slot: SlotAssignment, context: Context) -> SlotAssignment:
    """A slot whose state does not end inside an image: it is cut back to where that begins."""
    cached = slot.cached
    start = next((start for start, end in sequence.media if start < cached < end), cached)
    if start == cached:
        return slot
    try:
        context.truncate(start, slot.seq)
    except CannotRewindError:
        context.clear(slot.seq)
        start = 0
    computed = slot.report.computed + cached - start
    tiers = dict(slot.report.tiers)
    for tier in reversed(tiers):
        dropped = min(tiers[tier], cached - start)
        tiers[tier] -= dropped
        cached -= dropped
    report = replace(slot.report, tiers=tiers, computed=computed)
    return replace(slot, cached=start, report=report)


class QueueOrder:
    """Which request goes first: by rank, and of one rank as they came.

    The part "order of namespaces" of an extension takes its place once a request has a namespace. Only the
    engine thread calls it, between steps; `shares` is for any thread.
    """

    def waiting(self, groups: Groups, active: Groups) -> list[SequenceGroup]:
        """Those that wait for slots, the first one first."""
        return sorted(groups, key=lambda group: group.rank)

    def to_give_way(self, waiting: Groups, active: Groups) -> SequenceGroup | None:
        """The active group that gives its slot to a waiting one of a lower rank."""
        first = min((group.rank for group in waiting if group.pending_prefix is None), default=Rank.IDLE)
        return self.last_of(group for group in active if group.rank > first)

    def last_of(self, groups: Iterable[SequenceGroup]) -> SequenceGroup | None:
        """Of the groups that can give their slots away, the one of the highest rank that came last."""
        able = [group for group in groups if group.slots == 1 and group.can_give_way]
        return max(able, key=lambda group: (group.rank, group.sequences[0].submitted), default=None)

    def prompts(self, prefills: Ready, turn: int) -> Ready:
        """The prompts that are read now: those of the first rank that there is, which take turns."""
        first = min((group.rank for group, _ in prefills), default=0)
        prefills = [pair for pair in prefills if pair[0].rank == first]
        at = turn % len(prefills) if prefills else 0
        return prefills[at:] + prefills[:at]

    def served(self, steps: Sequence[Step], waiting: Groups, active: Groups) -> None:
        """The steps of a round were computed."""

    def shares(self) -> Mapping[str, Mapping[str, float]]:
        """By namespace: its `weight`, tokens `served`, and by how many it `lags` behind its share."""
        return {}


def promote(waiting: Iterable[SequenceGroup], active: Sequence[SequenceGroup]) -> None:
    """Raise the rank of groups that compute a prefix to that of the groups that wait for it."""
    for group in waiting:
        if (pending := group.pending_prefix) is not None:
            for other in active:
                if other.rank > group.rank and any(each.seq == pending.seq for each in other.sequences):
                    other.rank = group.rank


class AdapterTurns:
    """Whose turn it is of sets of adapters that are used at once.

    To change the set has the engine plan its memory anew: so many seconds, the median of what the first step
    of a turn took longer than its second. A turn lasts `hold` seconds, and longer where changes would take
    more than a twentieth of the time, but `LONGEST_TURN` at most: the others wait for it.
    """

    def __init__(self, hold: float) -> None:
        self._hold = hold
        self._set: AdapterSet | None = None
        self._until = 0.0
        self._costs: deque[float] = deque(maxlen=5)
        """What the last changes cost."""
        self._times: list[float] = []
        """When the first steps of this turn were planned, as long as its change is being measured."""
        self._replies: int | None = None
        """Those that its first step had to serve, if that was all it had to do."""

    def next(self, sets: Sequence[AdapterSet], now: float, replies: int | None) -> AdapterSet:
        """The set of the next step, which is planned `now`. `replies` are those that all the sets have to
        serve where no prompt is to be read: only such steps can be compared."""
        self._measure(now, replies)
        over = now >= self._until and not self._times
        if self._set is None or over or self._set not in sets:
            # Behind the last one, so that each comes to its turn.
            at = sets.index(self._set) + 1 if self._set in sets else 0
            if (chosen := sets[at % len(sets)]) != self._set:
                self._times, self._replies = [] if replies is None else [now], replies
            self._set, self._until = chosen, now + self.length
        return self._set

    @property
    def length(self) -> float:
        """Seconds that a turn lasts."""
        cost = statistics.median(self._costs) if self._costs else 0.0
        return max(self._hold, min(20 * cost, LONGEST_TURN))

    def _measure(self, now: float, replies: int | None) -> None:
        if not self._times:
            return
        self._times.append(now)
        if replies != self._replies:
            self._times = []
        elif len(self._times) == 3:
            first, second, third = self._times
            self._costs.append(max(0.0, (second - first) - (third - second)))
            self._times = []


class Scheduler(Protocol):
    """A way to put sequences into steps."""

    order: QueueOrder

    def next_steps(
        self, groups: Iterable[SequenceGroup], slots: Slots, budget: Budget, *, turn: int
    ) -> list[Step]:
        """The next steps. Prompts take turns, a chunk each; `turn` says which one is first."""
        ...


class BatchScheduler:
    """One step serves everybody: a token of each reply, and a chunk of prompts beside them.

    Where sequences are computed with different adapters, a step serves all those of one set.
    """

    def __init__(self, hold: float = 0.0) -> None:
        self._turns = AdapterTurns(hold)
        self.order = QueueOrder()

    def next_steps(
        self, groups: Iterable[SequenceGroup], slots: Slots, budget: Budget, *, turn: int
    ) -> list[Step]:
        step, prefills, suspects = ready(groups)
        if slots.context.mixed:
            step, prefills = self._of_one_set(step, prefills, slots.context)
        if REPLIED * len(step) > budget.tokens:
            _cut_forced(step, budget.tokens)
        # A sequence whose tokens may have made a step fail is computed by itself.
        steps: list[Step] = []
        for group, sequence in suspects:
            steps.append([_prompt_chunk(group, sequence, slots, budget.chunk, budget.rows)])
        if prefills:
            self._add_prompts(step, prefills, slots, budget, turn)
        return [*steps, step] if step else steps

    def _of_one_set(self, step: list[Chunk], prefills: Ready, context: Context) -> tuple[list[Chunk], Ready]:
        """Those of the set whose turn it is; the next one's, where that is over or has nobody."""
        decodes = [(set_of(chunk.sequence, context), chunk) for chunk in step]
        prompts = [(set_of(pair[1], context), pair) for pair in prefills]
        sets = list(dict.fromkeys([*(each for each, _ in decodes), *(each for each, _ in prompts)]))
        if not sets:
            return step, prefills
        chosen = self._turns.next(sets, time.monotonic(), len(decodes) if not prompts else None)
        return (
            [chunk for each, chunk in decodes if each == chosen],
            [pair for each, pair in prompts if each == chosen],
        )

    def _add_prompts(
        self, step: list[Chunk], prefills: Ready, slots: Slots, budget: Budget, turn: int
    ) -> None:
        prefills = self.order.prompts(prefills, turn)
        # Replies of a later rank may be held up: nobody looks at them.
        alone = len(prefills) == 1 and all(chunk.group.rank > prefills[0][0].rank for chunk in step)
        replied = sum(chunk.count for chunk in step)
        tokens = min(budget.tokens - replied, budget.alone if alone else budget.chunk)
        rows = budget.rows - len(step)
        for group, sequence in prefills:
            if tokens <= 0 or rows <= 0:
                break
            chunk = _prompt_chunk(group, sequence, slots, tokens, rows)
            step.append(chunk)
            tokens -= chunk.count
            rows -= chunk.count if sequence.scoring else 1


def ready(groups: Iterable[SequenceGroup]) -> tuple[list[Chunk], Ready, Ready]:
    """Those that have a slot: the next tokens of each reply, the sequences with a prompt or much of a reply
    to compute, and those that are computed by themselves.

    At every token, for everybody, in one pass: each call more is felt.
    """
    decodes: list[Chunk] = []
    prefills: Ready = []
    suspects: Ready = []
    for group in groups:
        for sequence in group.sequences:
            if sequence.seq is None or sequence.finish_reason is not None:
                continue
            cached = sequence.cached
            if cached < sequence.alone_until:
                suspects.append((group, sequence))
                continue
            count = len(sequence.tokens) - cached
            if count > 1 and (cached < sequence.prompt_length or count > REPLIED):
                prefills.append((group, sequence))
            else:
                decodes.append(Chunk(group, sequence, cached, count))
    return decodes, prefills, suspects


def _cut_forced(step: Sequence[Chunk], tokens: int) -> None:
    """Leave for later steps what grammars forced beyond the `tokens` of a step. Each reply has one."""
    spare = tokens - len(step)
    for chunk in step:
        if chunk.count > 1:
            chunk.count = 1 + min(chunk.count - 1, spare)
            spare -= chunk.count - 1


def set_of(sequence: TokenSequence, context: Context) -> AdapterSet:
    """What the next token of a sequence is computed with."""
    assert sequence.seq is not None
    return context.adapters_of(sequence.seq).at(sequence.cached)


def _prompt_chunk(
    group: SequenceGroup, sequence: TokenSequence, slots: Slots, tokens: int, rows: int
) -> Chunk:
    """The next tokens of a prompt, as many as fit a step that has room for `tokens` and for `rows`."""
    assert sequence.seq is not None
    count = min(sequence.remaining, tokens, rows if sequence.scoring else tokens)
    count = slots.chunk(sequence.seq, sequence.cached, count, sequence.checkpoint_at)
    if sequence.media:
        count = sequence.step_within_media(count, slots.context.n_batch)
    return Chunk(group, sequence, sequence.cached, count)


class PrefillPacer:
    """The size of a prompt's chunk, learned from the steps that were taken: `chunk` while others wait,
    `alone` while nobody does.

    Always holds: both are from 16 to the largest step; `alone` from `TILE`, once a shorter step was far
    slower by the token. With a stall of 0 they stay as they were set.
    """

    def __init__(self, *, chunk: int, largest: int, stall: float, longest: float = LONGEST) -> None:
        if not is_number(stall) or not 0 <= stall < math.inf:
            raise InvalidInputError(f"stall is a number of seconds, 0 for chunks of {chunk}, got {stall!r}")
        self.chunk = min(chunk, largest)
        # The first step of all is short: nothing is known yet of how long one takes.
        self.alone = self.chunk if stall else largest
        self._largest = largest
        self._stall = stall
        self._longest = max(longest, stall)
        self.a_token = 0.0
        """Seconds that a token of a prompt takes, as of the last step; 0 before the first, which is short."""
        self._in_tiles: float | None = None
        """The same as of the last step of `TILE` tokens and more; None once it was compared with a shorter
        one: both get slower with the context."""
        self._least = TIMED
        """Of `alone`."""

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if tokens < TIMED or seconds <= 0:
            return
        is_first, self.a_token = not self.a_token, seconds / tokens
        if not self._stall:
            return
        if tokens >= TILE:
            self._in_tiles = self.a_token
        elif self._in_tiles is not None:
            if self.a_token > _FAR_SLOWER * self._in_tiles:
                self._least = TILE
            self._in_tiles = None
        # Half way at a time: one slow step says little, and larger steps are faster by the token.
        self.chunk = self._within((self.chunk + self._stall * tokens / seconds) / 2)
        aim = self._longest * tokens / seconds
        size = self._within(max(self._least, aim if is_first else (self.alone + aim) / 2))
        # In whole multiples: kernels compute so many tokens at a time.
        self.alone = size if size < TIMED else size // TIMED * TIMED

    def _within(self, size: float) -> int:
        return max(min(TIMED, self._largest), min(self._largest, round(size)))
