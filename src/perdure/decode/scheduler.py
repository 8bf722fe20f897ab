"""The scheduler: who gets a slot, and what the next steps compute.

Everything here is a function of the groups that it is given, their slots and a budget. It starts no thread
and computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from perdure.checks import is_number
from perdure.decode.sequence import SequenceGroup, TokenSequence
from perdure.decode.slots import PendingPrefix, Slots
from perdure.errors import InvalidInputError

TIMED = 16
"""Steps of so many tokens tell how fast prompts are computed; shorter ones are mostly overhead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one step can take."""

    tokens: int
    rows: int
    """Rows of logits."""
    chunk: int
    """Prompt tokens a step while others wait: what a running reply can be held up by."""


@dataclass(slots=True, eq=False)
class Chunk:
    """A part of a step: the `count` tokens of a sequence that follow its first `start`.

    Every token of a reply makes one, so it is not frozen: that would make it thrice as dear.
    """

    group: SequenceGroup
    sequence: TokenSequence
    start: int
    count: int


Step: TypeAlias = Sequence[Chunk]
"""What one native call computes."""
Ready: TypeAlias = list[tuple[SequenceGroup, TokenSequence]]


def admit(waiting: Iterable[SequenceGroup], slots: Slots) -> Iterator[SequenceGroup]:
    """Give free slots to those who wait, first come first served.

    Yields each group that was dealt with: it has a slot now, or an error ended it.
    """
    for group in waiting:
        if group.pending_prefix is not None and not slots.is_ready(group.pending_prefix):
            continue
        first = group.sequences[0]
        try:
            # At least one token is computed, so that there is a row to draw from; a scored prompt needs all.
            known = np.array(first.tokens[:-1], np.int32)
            request = first.request
            slot = slots.acquire(
                known, namespace=request.namespace, reuse=not first.scoring, pins=request.pins
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
        group.start(slot)
        yield group


class Scheduler(Protocol):
    """A way to put sequences into steps."""

    def plan(self, groups: Iterable[SequenceGroup], slots: Slots, budget: Budget, *, turn: int) -> list[Step]:
        """The next steps. Prompts take turns, a chunk each, whoever's `turn` it is first."""
        ...


class BatchScheduler:
    """One step serves everybody: a token of each reply, and a chunk of prompts beside them."""

    def plan(self, groups: Iterable[SequenceGroup], slots: Slots, budget: Budget, *, turn: int) -> list[Step]:
        step, prefills, suspects = _ready(groups)
        # A sequence whose tokens may have made a step fail is computed by itself.
        steps: list[Step] = []
        for group, sequence in suspects:
            steps.append([_prompt_chunk(group, sequence, slots, budget.chunk, budget.rows)])
        if prefills:
            self._add_prompts(step, prefills, slots, budget, turn)
        return [*steps, step] if step else steps

    def _add_prompts(
        self, step: list[Chunk], prefills: Ready, slots: Slots, budget: Budget, turn: int
    ) -> None:
        alone = not step and len(prefills) == 1
        tokens = min(budget.tokens - len(step), budget.tokens if alone else budget.chunk)
        rows = budget.rows - len(step)
        for group, sequence in _in_turn(prefills, turn):
            if tokens <= 0 or rows <= 0:
                break
            chunk = _prompt_chunk(group, sequence, slots, tokens, rows)
            step.append(chunk)
            tokens -= chunk.count
            rows -= chunk.count if sequence.scoring else 1


class ExactScheduler:
    """Every step is of one sequence and cut at fixed places, so that a reply has the bits it has alone."""

    def plan(self, groups: Iterable[SequenceGroup], slots: Slots, budget: Budget, *, turn: int) -> list[Step]:
        # Nobody is a suspect: no step has more than one sequence.
        chunks, prefills, _ = _ready(groups)
        for group, sequence in _in_turn(prefills, turn)[:1]:
            chunks.append(Chunk(group, sequence, sequence.cached, self._count(sequence, budget)))
        return [[chunk] for chunk in chunks]

    def _count(self, sequence: TokenSequence, budget: Budget) -> int:
        """Prompts are cut at multiples of the chunk, replies at every token, whoever else is there."""
        if sequence.cached >= sequence.prompt_length:
            return 1
        size = min(budget.chunk, budget.rows) if sequence.scoring else budget.chunk
        end = min((sequence.cached // size + 1) * size, sequence.prompt_length)
        return end - sequence.cached


def _ready(groups: Iterable[SequenceGroup]) -> tuple[list[Chunk], Ready, Ready]:
    """Those that have a slot: the next token of each reply, the sequences with more than that to compute, and
    those that are computed by themselves.

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
            elif cached + 1 < len(sequence.tokens):
                prefills.append((group, sequence))
            else:
                decodes.append(Chunk(group, sequence, cached, 1))
    return decodes, prefills, suspects


def _in_turn(prefills: Ready, turn: int) -> Ready:
    first = turn % len(prefills) if prefills else 0
    return prefills[first:] + prefills[:first]


def _prompt_chunk(
    group: SequenceGroup, sequence: TokenSequence, slots: Slots, tokens: int, rows: int
) -> Chunk:
    """The next tokens of a prompt, as many as fit a step that has room for `tokens` and for `rows`."""
    assert sequence.seq is not None
    count = min(sequence.remaining, tokens, rows if sequence.scoring else tokens)
    count = slots.chunk(sequence.seq, sequence.cached, count, sequence.checkpoint_at)
    return Chunk(group, sequence, sequence.cached, count)


class Pace:
    """The size of a prompt's chunk while others wait, learned from the steps that were taken.

    Always holds: it is from 16 to the largest step. With a stall of 0 it stays as it was set.
    """

    def __init__(self, *, chunk: int, largest: int, stall: float) -> None:
        if not is_number(stall) or not 0 <= stall < math.inf:
            raise InvalidInputError(f"stall is a number of seconds, 0 for chunks of {chunk}, got {stall!r}")
        self.chunk = min(chunk, largest)
        self._largest = largest
        self._stall = stall

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if not self._stall or tokens < TIMED or seconds <= 0:
            return
        aim = self._stall * tokens / seconds
        # Half way at a time: one slow step says little, and larger steps are faster by the token.
        self.chunk = max(min(TIMED, self._largest), min(self._largest, round((self.chunk + aim) / 2)))
