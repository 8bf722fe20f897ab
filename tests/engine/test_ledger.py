"""The ledger says what is in the cache, whatever the engine answers when it is asked for its positions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import product

import pytest

from inside import core_of
from perdure import Context, Feed, PerdureError
from perdure.engine.contract import Batch, Outcome
from perdure.memory import MEMORY_KINDS, MemorySpec
from perdure.testing.toy import ToyCore, ToyModel

OUTCOMES = [Outcome.DONE, Outcome.FAILED, Outcome.ABORTED, Outcome.FULL]
WRONG = [(by, range(first, first + count)) for by, first, count in product((-1, 1), (1, 2, 3), (1, 2, 3))]
"""How far off the engine's answers are, and which of them."""


def decodes(ctx: Context) -> list[Callable[[], None]]:
    return [
        lambda: ctx.step([Feed(0, [9])]),
        lambda: ctx.step([Feed(0, [9]), Feed(1, [8])]),
        lambda: ctx.step([Feed(0, [9]), Feed(1, [7, 8])]),
        lambda: ctx.decode([7, 8, 9], 0),
        lambda: ctx.decode([7, 8, 9, 10, 11, 12], 1),
    ]


def other_calls(ctx: Context) -> list[Callable[[], None]]:
    state, checkpoint, parts = ctx.save(0), ctx.checkpoint(1), ctx.capture(1)
    pieces = [] if parts.rows is None else [parts.rows.cut(0, 3)]
    return [
        lambda: ctx.truncate(2, 0),
        lambda: ctx.fork(0, 1),
        lambda: ctx.clear(0),
        lambda: ctx.clear(),
        lambda: ctx.load(state, 2),
        lambda: ctx.restore(checkpoint, 1),
        lambda: ctx.assemble([4, 5, 6], pieces, parts.tail_state, 2),
    ]


CALLS = [
    *[(decodes, at, outcome) for outcome in OUTCOMES for at in range(5)],
    *[(other_calls, at, Outcome.DONE) for at in range(7)],
]


def toy_core(ctx: Context) -> ToyCore:
    core = core_of(ctx)
    assert isinstance(core, ToyCore)
    return core


@pytest.mark.parametrize("kind", MEMORY_KINDS, ids=lambda kind: kind.name)
def test_no_answer_about_positions_parts_the_ledger_from_the_cache(kind: type[MemorySpec]) -> None:
    """B6, K1: every call that reads positions back, with wrong answers in it, one or several that agree.

    An engine that fails, or seems to, is not believed that it changed nothing: what cannot be cut back and
    was not kept before the step is emptied.
    """
    model = ToyModel(kind)
    with model.context(n_ctx=16, n_seq=3, n_batch=4) as ctx, model.context(n_ctx=16, n_batch=4) as cold:
        native = toy_core(ctx)
        computed: dict[tuple[int, ...], bytes] = {(): toy_core(cold).read(0, partial=False).tobytes()}

        def compute(tokens: list[int]) -> bytes:
            if tuple(tokens) not in computed:
                cold.clear()
                cold.decode(tokens)
                computed[tuple(tokens)] = toy_core(cold).read(0, partial=False).tobytes()
            return computed[tuple(tokens)]

        for (calls, at, outcome), (by, questions) in product(CALLS, WRONG):
            ctx.clear()
            ctx.decode([1, 2, 3, 4, 5], 0)
            ctx.decode([4, 5, 6], 1)
            call = calls(ctx)[at]
            if outcome is not Outcome.DONE:
                native.faults.fail_decode(outcome)
            for ahead in questions:
                native.faults.lie(by, ahead)
            with suppress(PerdureError):
                call()
            native.faults.forget()
            for seq in range(3):
                left = ctx.tokens(seq)
                assert native.newest(seq) == len(left) - 1, (calls.__name__, at, outcome, by, questions)
                assert native.read(seq, partial=False).tobytes() == compute(left)


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.FAILED, Outcome.ABORTED])
@pytest.mark.parametrize("kind", MEMORY_KINDS, ids=lambda kind: kind.name)
def test_a_ctrl_c_that_hides_how_a_step_ended_leaves_nothing_spoiled(
    kind: type[MemorySpec], outcome: Outcome, after: int
) -> None:
    """B6, K1: it comes between the end of the native step and the line that looks at its outcome."""
    model = ToyModel(kind)
    with model.context(n_ctx=16, n_seq=3, n_batch=4) as ctx, model.context(n_ctx=16, n_batch=4) as cold:
        native = toy_core(ctx)
        decode = native.decode

        def interrupted(batch: Batch) -> Outcome:
            decode(batch)
            raise KeyboardInterrupt

        for at, by in product(range(5), (None, -1, 1)):
            ctx.clear()
            ctx.decode([1, 2, 3, 4, 5], 0)
            ctx.decode([4, 5, 6], 1)
            call = decodes(ctx)[at]
            if outcome is not Outcome.DONE:
                native.faults.fail_decode(outcome, after=after)
            for ahead in range(1, 4) if by is not None else ():
                native.faults.lie(by or 0, ahead)
            native.decode = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                call()
            native.decode = decode  # type: ignore[method-assign]
            native.faults.forget()
            for seq in range(3):
                left = ctx.tokens(seq)
                assert native.newest(seq) == len(left) - 1, (at, by)
                cold.clear()
                if left:
                    cold.decode(left)
                expected = toy_core(cold).read(0, partial=False).tobytes()
                assert native.read(seq, partial=False).tobytes() == expected, (at, by, seq)
