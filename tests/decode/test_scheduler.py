"""The scheduler without a thread: who is admitted, and what the next steps hold."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from perdure.decode.exact_scheduler import ExactScheduler
from perdure.decode.request import Request
from perdure.decode.sampling.grammar import Grammars
from perdure.decode.sampling.repetition import BreakerTable
from perdure.decode.scheduler import (
    LONGEST_TURN,
    AdapterTurns,
    BatchScheduler,
    Budget,
    Slots,
    Step,
    admit,
)
from perdure.decode.sequence import PendingPrefix, SequenceGroup, SlotAssignment, make_group
from perdure.engine.adapters import AdapterSet, AdapterTable
from perdure.engine.context import Context
from perdure.testing.toy import ToyModel

BUDGET = Budget(tokens=32, rows=8, chunk=10)


@pytest.fixture
def model() -> ToyModel:
    return ToyModel()


@pytest.fixture
def context(model: ToyModel) -> Iterator[Context]:
    with model.context(n_ctx=256, n_seq=4) as found:
        yield found


def asked(model: ToyModel, context: Context, length: int, **settings: Any) -> SequenceGroup:
    request = Request.of([1 + at % 200 for at in range(length)], **{"max_tokens": 8, **settings})
    return make_group(
        request,
        model=model,
        piece=model.piece,
        context=context,
        grammars=lambda: Grammars(model),
        breakers=BreakerTable(model).find,
        adapters=AdapterTable(model.adapter),
        deadline=None,
    )


def admitted(groups: list[SequenceGroup], slots: Slots) -> list[SequenceGroup]:
    return list(admit(groups, slots))


def writing(group: SequenceGroup) -> SequenceGroup:
    """As it stands once its prompt is computed and a token is drawn."""
    sequence = group.sequences[0]
    sequence.tokens.append(7)
    sequence.cached = len(sequence.tokens) - 1
    return group


def shape(steps: list[Step], groups: list[SequenceGroup]) -> list[list[tuple[int, int, int]]]:
    """For each step: which group, from where, how many tokens."""
    return [[(groups.index(each.group), each.start, each.count) for each in step] for step in steps]


class PickySlots(Slots):
    """Answers each prompt by its length, as it is told to."""

    def __init__(self, context: Context, answers: dict[int, Any]) -> None:
        super().__init__(context)
        self.answers = answers

    def acquire(self, tokens: NDArray[np.int32], **options: Any) -> SlotAssignment | PendingPrefix | None:
        answer = self.answers.get(len(tokens), "free")
        if isinstance(answer, Exception):
            raise answer
        return super().acquire(tokens) if answer == "free" else answer

    def chunk(self, seq: int, cached: int, count: int, checkpoint_at: Collection[int]) -> int:
        return min(count, 4)


# Admission.


def test_slots_go_to_those_who_came_first(model: ToyModel, context: Context) -> None:
    groups = [asked(model, context, 5) for _ in range(6)]
    assert admitted(groups, Slots(context)) == groups[:4]
    assert [group.sequences[0].seq for group in groups] == [0, 1, 2, 3, None, None]
    assert all(each.started is not None for group in groups[:4] for each in group.sequences)


def test_who_is_to_wait_for_anothers_prompt_lets_others_pass(model: ToyModel, context: Context) -> None:
    groups = [asked(model, context, length) for length in (5, 6, 7)]
    assert admitted(groups, PickySlots(context, {5: PendingPrefix(0, 5, 0)})) == [groups[0], groups[2]]


def test_who_waits_for_anothers_prompt_is_asked_about_again_only_when_it_is_over(
    model: ToyModel, context: Context
) -> None:
    """A burst of prompts that begin alike would else be looked up once more in each round."""

    class CountingSlots(PickySlots):
        asked, over = 0, False

        def acquire(self, tokens: NDArray[np.int32], **options: Any) -> SlotAssignment | PendingPrefix | None:
            self.asked += 1
            return super().acquire(tokens)

        def is_ready(self, prefix: PendingPrefix) -> bool:
            return self.over

    groups = [asked(model, context, 6) for _ in range(3)]
    slots = CountingSlots(context, {5: PendingPrefix(0, 5, 0)})
    for _ in range(10):
        assert admitted(groups, slots) == []
    assert slots.asked == 3
    slots.over, slots.answers = True, {}
    assert admitted(groups, slots) == groups
    assert slots.asked == 6


def test_without_a_free_slot_nobody_overtakes(model: ToyModel, context: Context) -> None:
    groups = [asked(model, context, length) for length in (5, 6, 7)]
    assert admitted(groups, PickySlots(context, {5: None})) == groups[:1]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread"), KeyError("x")])
def test_an_unexpected_error_in_admitting_ends_that_request_only(
    error: Exception, model: ToyModel, context: Context
) -> None:
    """H1: nobody else pays for it."""
    groups = [asked(model, context, length) for length in (5, 6, 7)]
    assert admitted(groups, PickySlots(context, {5: error})) == groups
    assert [group.done for group in groups] == [False, True, False]
    assert groups[1].sequences[0].error is error


# Steps that serve everybody.


def test_a_step_has_a_token_of_each_reply_and_a_chunk_of_prompts(model: ToyModel, context: Context) -> None:
    groups = [asked(model, context, length) for length in (5, 40, 6)]
    slots = Slots(context)
    admitted(groups, slots)
    writing(groups[0]), writing(groups[2])
    steps = BatchScheduler().next_steps(groups, slots, BUDGET, turn=0)
    assert shape(steps, groups) == [[(0, 5, 1), (2, 6, 1), (1, 0, 10)]]


def test_a_prompt_alone_fills_the_step(model: ToyModel, context: Context) -> None:
    groups = [asked(model, context, 40)]
    slots = Slots(context)
    admitted(groups, slots)
    assert shape(BatchScheduler().next_steps(groups, slots, BUDGET, turn=0), groups) == [[(0, 0, 32)]]


def test_prompts_take_turns_within_one_chunk(model: ToyModel, context: Context) -> None:
    groups = [asked(model, context, length) for length in (40, 40, 3)]
    slots = Slots(context)
    admitted(groups, slots)
    plans = [
        shape(BatchScheduler().next_steps(groups, slots, BUDGET, turn=turn), groups) for turn in range(3)
    ]
    assert plans == [[[(0, 0, 10)]], [[(1, 0, 10)]], [[(2, 0, 3), (0, 0, 7)]]]


def test_rows_of_a_scored_prompt_count_against_the_budget(model: ToyModel, context: Context) -> None:
    groups = [asked(model, context, 40, prompt_logprobs=0), asked(model, context, 5)]
    slots = Slots(context)
    admitted(groups, slots)
    writing(groups[1])
    assert shape(BatchScheduler().next_steps(groups, slots, BUDGET, turn=0), groups) == [
        [(1, 5, 1), (0, 0, 7)]
    ]


def test_a_sequence_under_suspicion_gets_steps_of_its_own(model: ToyModel, context: Context) -> None:
    groups = [asked(model, context, length) for length in (5, 6)]
    slots = Slots(context)
    admitted(groups, slots)
    writing(groups[0]), writing(groups[1])
    groups[0].sequences[0].alone_until = 6
    steps = BatchScheduler().next_steps(groups, slots, BUDGET, turn=0)
    assert shape(steps, groups) == [[(0, 5, 1)], [(1, 6, 1)]]


def test_slots_may_ask_for_shorter_chunks(model: ToyModel, context: Context) -> None:
    groups = [asked(model, context, 40)]
    slots = PickySlots(context, {})
    admitted(groups, slots)
    assert shape(BatchScheduler().next_steps(groups, slots, BUDGET, turn=0), groups) == [[(0, 0, 4)]]


def test_who_has_no_slot_or_is_done_is_in_no_step(model: ToyModel, context: Context) -> None:
    groups = [asked(model, context, 5), asked(model, context, 6)]
    slots = Slots(context)
    admitted(groups[:1], slots)
    groups[0].end_cancelled()
    assert BatchScheduler().next_steps(groups, slots, BUDGET, turn=0) == []


# Steps of one sequence.


def test_in_exact_mode_each_sequence_has_its_own_step_cut_at_fixed_places(
    model: ToyModel, context: Context
) -> None:
    """C10: whoever else is there, the cuts are the same."""
    groups = [asked(model, context, length) for length in (5, 25, 26)]
    slots = Slots(context)
    admitted(groups, slots)
    writing(groups[0])
    prompt = groups[1].sequences[0]
    cuts = []
    while prompt.remaining:
        steps = ExactScheduler().next_steps(groups, slots, BUDGET, turn=0)
        assert shape(steps, groups)[0] == [(0, 5, 1)]
        cuts.append(steps[1][0].count)
        prompt.cached += cuts[-1]
        if prompt.remaining <= 1:
            break
    assert cuts == [10, 10, 5]


def served(
    model: ToyModel, *, step: float, change: float, hold: float, steps: int = 400, prompts: bool = False
) -> list[AdapterSet]:
    """The sets of `steps` steps while two are used. A step takes `step` seconds, with a change `change` more;
    a busy machine makes every fiftieth ten times as long."""
    sets = [AdapterSet.of({model.adapter(name): 1.0}) for name in ("one", "two")]
    turns, now, chosen = AdapterTurns(hold), 0.0, list[AdapterSet]()
    for at in range(steps):
        chosen.append(turns.next(sets, now, None if prompts else 4))
        took = step * (10 if at % 50 == 49 else 1)
        now += took + (change if at == 0 or chosen[-1] != chosen[-2] else 0.0)
    return chosen


def longest(chosen: Sequence[AdapterSet]) -> int:
    """The most steps in a row of one set."""
    return max(len(list(run)) for _, run in itertools.groupby(chosen))


def changes(chosen: Sequence[AdapterSet]) -> int:
    return sum(1 for one, other in itertools.pairwise(chosen) if one != other)


@pytest.mark.parametrize("step", [0.003, 0.01, 0.03])
@pytest.mark.parametrize("change", [0.001, 0.008, 0.02])
def test_changes_of_adapters_take_little_of_the_time(model: ToyModel, step: float, change: float) -> None:
    chosen = served(model, step=step, change=change, hold=0.05)
    assert changes(chosen) * change <= 0.07 * len(chosen) * step
    assert changes(chosen) > 1
    assert chosen.count(chosen[0]) in range(100, 301)


@pytest.mark.parametrize("change", [0.0, 0.001, 0.3])
def test_no_set_of_adapters_keeps_the_others_waiting_for_long(model: ToyModel, change: float) -> None:
    chosen = served(model, step=0.01, change=change, hold=0.05)
    turn = max(0.05, min(20 * change, LONGEST_TURN))
    assert longest(chosen[20:]) <= turn / 0.01 + 2


def test_slow_steps_alternate_but_for_the_one_that_measures(model: ToyModel) -> None:
    assert longest(served(model, step=0.2, change=0.001, hold=0.05)) == 2


def test_turns_last_their_least_time_while_prompts_are_read(model: ToyModel) -> None:
    assert longest(served(model, step=0.01, change=0.02, hold=0.05, prompts=True)) <= 6
