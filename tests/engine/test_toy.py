"""The toy engine has the traps of the real one, and goes wrong when it is told to."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import perdure
from inside import core_of
from perdure import (
    Context,
    ContextOverflow,
    DecodeCancelled,
    DecodeError,
    EngineError,
    Feed,
    InvalidInputError,
    OutOfMemoryError,
    PerdureError,
    TokenError,
)
from perdure.engine.contract import Batch, BatchPart, Outcome
from perdure.engine.model import EngineModel
from perdure.memory import MEMORY_KINDS, FullAttention, Hybrid, MemorySpec, Recurrent, SlidingWindow
from perdure.testing.toy import Faults, Gate, PlannedFault, ToyAbort, ToyCore, ToyModel
from subjects import Row

every_kind = pytest.mark.parametrize("kind", MEMORY_KINDS)
rolling = pytest.mark.parametrize("kind", [Recurrent, Hybrid])


def toy_core(ctx: Context) -> ToyCore:
    core = core_of(ctx)
    assert isinstance(core, ToyCore)
    return core


def bare(kind: type[MemorySpec], **settings: Any) -> ToyCore:
    """A core with nothing between it and the test."""
    return toy_core(ToyModel(kind).context(n_ctx=64, n_seq=3, n_batch=32, **settings))


def feed(core: ToyCore, tokens: list[int], start: int = 0, seq: int = 0) -> Outcome:
    batch = Batch(32)
    outputs = np.zeros(len(tokens), np.int8)
    outputs[-1] = 1
    batch.fill([BatchPart(seq, start, np.array(tokens, np.int32), outputs)])
    return core.decode(batch)


def said(core: ToyCore, tokens: list[int], start: int = 0, seq: int = 0) -> Row:
    assert feed(core, tokens, start, seq) is Outcome.DONE
    return core.row(len(tokens) - 1).copy()


TEXT = list(range(30))


# Its traps.


def test_a_cut_through_a_lost_window_looks_fine_and_is_wrong() -> None:
    core = bare(SlidingWindow, swa_full=False)
    for at in range(0, 30, 10):
        feed(core, TEXT[at : at + 10], at)
    core.remove(0, 18)
    assert core.newest(0) == 17
    warm = said(core, [7], 18)
    assert (warm != said(bare(SlidingWindow), [*TEXT[:18], 7])).any()


def test_a_kept_window_can_be_cut() -> None:
    core = bare(SlidingWindow, swa_full=True)
    feed(core, TEXT)
    core.remove(0, 22)
    assert (said(core, [7], 22) == said(bare(SlidingWindow), [*TEXT[:22], 7])).all()


@rolling
def test_a_rolling_state_ignores_a_partial_cut(kind: type[MemorySpec]) -> None:
    core = bare(kind)
    feed(core, TEXT)
    core.remove(0, 20)
    assert (core.newest(0), core.oldest(0)) == (29, 29)
    core.remove(0, 0)
    assert core.newest(0) == -1


@rolling
def test_a_failed_decode_poisons_a_rolling_state_at_an_advanced_position(kind: type[MemorySpec]) -> None:
    core = bare(kind)
    feed(core, TEXT[:20])
    core.faults.fail_decode(after=4)
    assert feed(core, TEXT[20:], 20) is Outcome.FAILED
    assert core.newest(0) == 29
    assert (said(core, [7], 30) != said(bare(kind), [*TEXT, 7])).any()


def test_a_failed_decode_leaves_the_tokens_before_it() -> None:
    core = bare(FullAttention)
    core.faults.fail_decode(after=4)
    assert feed(core, TEXT) is Outcome.FAILED
    assert core.newest(0) == 3


@every_kind
def test_state_is_believed_whatever_it_says(kind: type[MemorySpec]) -> None:
    core = bare(kind)
    feed(core, TEXT)
    state = core.read(0, partial=False).copy()
    state[-1] ^= 1
    assert core.write(1, state, partial=False)
    assert core.newest(1) == 29
    assert (said(core, [7], 30, seq=1) != said(core, [7], 30)).any()
    assert not core.write(1, state[:-3], partial=False)
    assert core.newest(1) == -1


def test_rows_lie_in_one_buffer_that_is_overwritten_and_moved() -> None:
    core = bare(FullAttention)
    before = said(core, TEXT)
    live = core.row(29)
    said(core, [1], 30)
    assert np.shares_memory(live, core.row(0))
    assert (live != before).any()
    batch = Batch(32)
    batch.fill([BatchPart(1, 0, np.arange(5, dtype=np.int32), np.ones(5, np.int8))])
    assert core.decode(batch) is Outcome.DONE
    assert not np.shares_memory(live, core.row(0))
    assert (live == live[0]).all()


def test_what_would_end_the_process_raises_here() -> None:
    core = bare(FullAttention)
    for call in (
        lambda: core.newest(3),
        lambda: core.copy(0, 5),
        lambda: feed(core, [1], seq=3),
        lambda: feed(core, [9999]),
    ):
        with pytest.raises(ToyAbort):
            call()
    core.close()
    with pytest.raises(ToyAbort, match="freed"):
        core.newest(0)


def test_a_gap_in_positions_is_refused_but_an_empty_sequence_may_start_anywhere() -> None:
    core = bare(FullAttention)
    assert feed(core, [1, 2], 5) is Outcome.DONE
    assert feed(core, [1], 9) is Outcome.REJECTED
    assert core.newest(0) == 6


# Its faults.


def test_no_memory_on_open() -> None:
    with pytest.raises(OutOfMemoryError, match="smaller n_ctx"):
        ToyModel(faults=Faults(no_memory=True)).context()


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Outcome.FAILED, DecodeError),
        (Outcome.ABORTED, DecodeCancelled),
        (Outcome.REJECTED, DecodeError),
        (Outcome.FULL, ContextOverflow),
    ],
)
def test_the_planned_decode_goes_wrong_and_no_other(outcome: Outcome, error: type[Exception]) -> None:
    model = ToyModel(faults=Faults(decodes={2: PlannedFault(outcome, after=1)}))
    with model.context() as ctx:
        ctx.decode([1, 2])
        with pytest.raises(error, match="nothing was changed"):
            ctx.decode([3, 4])
        assert ctx.tokens() == [1, 2]
        ctx.decode([3, 4])
        assert ctx.tokens() == [1, 2, 3, 4]


def test_a_refused_write_and_a_lie_are_noticed() -> None:
    with ToyModel(faults=Faults(writes=frozenset({1}))).context(n_seq=2) as ctx:
        ctx.decode([1, 2])
        state = ctx.save()
        with pytest.raises(EngineError, match="refused"):
            ctx.load(state, 1)
        assert ctx.tokens(1) == []
        toy_core(ctx).faults.lie(by=1)
        with pytest.raises(EngineError, match="emptied"):
            ctx.load(state, 1)
        assert ctx.tokens(1) == []
        ctx.load(state, 1)
        assert ctx.tokens(1) == [1, 2]


@pytest.mark.parametrize("closes", [False, True])
def test_a_decode_at_the_gate_can_be_stopped(closes: bool) -> None:
    gate = Gate()
    ctx = ToyModel(faults=Faults(gate=gate)).context()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ctx.decode, TEXT)
        assert gate.reached.wait(30)
        ctx.close() if closes else ctx.cancel()
        with pytest.raises(PerdureError, match="closed" if closes else "cancelled"):
            future.result(30)
    if not closes:
        gate.open()
        ctx.decode(TEXT)
        assert ctx.tokens() == TEXT
        ctx.close()


def test_a_slow_decode_honours_a_stop() -> None:
    ctx = ToyModel(faults=Faults(pace=3600.0)).context()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ctx.decode, TEXT)
        while not ctx._busy:
            assert not future.done()
        ctx.cancel()
        with pytest.raises(DecodeCancelled):
            future.result(30)
    ctx.close()


@every_kind
@pytest.mark.parametrize("shared", [False, True])
def test_b6_whichever_native_call_fails_the_ledger_stays_true(kind: type[MemorySpec], shared: bool) -> None:
    """Every call of a long history fails once, each in a separate run."""
    model = ToyModel(kind)
    calls, number = 1, 0
    while number < calls:
        number += 1
        with model.context(n_ctx=64, n_seq=3, n_batch=8, shared=shared, swa_full=False) as ctx:
            core = toy_core(ctx)
            core.faults.fail_call(number)
            live_through(ctx)
            calls = max(calls, core.faults.n_calls)
            core.faults.forget()
            for seq in range(3):
                tokens = ctx.tokens(seq)
                assert core.newest(seq) == len(tokens) - 1, f"call {number}"
                ctx.decode([7], seq)
                with model.context(n_ctx=64) as cold:
                    cold.decode([*tokens, 7])
                    assert (np.asarray(ctx.logits()) == np.asarray(cold.logits())).all(), f"call {number}"
    assert calls > 20


def live_through(ctx: Context) -> None:
    """A bit of everything; what fails is left as it is."""
    kept: dict[str, bytes] = {}
    acts: list[Callable[[], object]] = [
        lambda: ctx.decode(TEXT[:20]),
        lambda: ctx.fork(0, 1),
        lambda: kept.update(state=ctx.save(0)),
        lambda: ctx.decode(TEXT[20:], seq=1, rows="all"),
        lambda: ctx.step([Feed(0, [1]), Feed(1, [2, 3]), Feed(2, [4])]),
        lambda: ctx.truncate(max(0, ctx.length(1) - 1), 1),
        lambda: ctx.load(kept["state"], 2),
        lambda: ctx.decode(TEXT, seq=2),
        lambda: ctx.fork(2, 0),
        lambda: ctx.clear(1),
        lambda: ctx.decode([5, 6, 7], seq=1),
        lambda: ctx.restore(ctx.checkpoint(2), 2),
        lambda: ctx.fork(1, 2),
        lambda: ctx.clear(),
        lambda: ctx.decode(TEXT[:9], seq=2),
    ]
    for act in acts:
        # Without a saved state there is nothing to load.
        with contextlib.suppress(PerdureError, KeyError):
            act()


# Its text.


def test_it_is_a_model_by_the_contract() -> None:
    model: EngineModel = ToyModel()
    assert model.memory.kind is FullAttention
    assert "im_start" in model.info.template
    assert model.digest != ToyModel(seed=1).digest != ToyModel(SlidingWindow, seed=1).digest


@pytest.mark.parametrize("special", [False, True])
def test_text_is_its_bytes_and_marks_are_tokens_where_asked_for(special: bool) -> None:
    model = ToyModel()
    text = "<|im_start|>é 한국 🙂<|im_end|>"
    tokens = model.tokenize(text, special=special)
    assert model.detokenize(tokens, special=True) == text
    assert (tokens[0] > 255) == special
    assert [model.is_end(token) for token in tokens][-1] == special
    assert model.is_control(tokens[0]) == special
    assert (model.piece(tokens[0]) == b"") == special
    with pytest.raises(TokenError):
        model.piece(model.n_vocab)


def test_an_adapter_changes_what_it_says_and_fits_only_its_model() -> None:
    model = ToyModel()
    with model.context() as ctx:
        ctx.decode(TEXT)
        plain = ctx.logits().copy()
        for scale in (1.0, 0.5):
            ctx.adapt({model.adapter("a"): scale})
            ctx.decode(TEXT)
            assert (ctx.logits() != plain).any()
            plain = ctx.logits().copy()
        with pytest.raises(EngineError, match="refused"):
            ctx.adapt({ToyModel(seed=1).adapter("a"): 1.0})
        assert ctx.tokens() in ([], TEXT)


def test_a_reply_can_have_a_length_of_small_letters_and_spaces() -> None:
    with perdure.open(ToyModel(reply_tokens=9), n_ctx=256, stall=0) as rt:
        session = rt.session("one")
        for temperature in (0.0, 2.0):
            reply = session.say("Hello", temperature=temperature)
            assert re.fullmatch("[a-z ]{9}", reply.text)
            assert reply.finish_reason == "stop"
    with pytest.raises(InvalidInputError, match="full attention"):
        ToyModel(Recurrent, reply_tokens=9)
