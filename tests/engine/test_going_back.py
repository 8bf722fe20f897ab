"""Cutting, copying, clearing, keeping and putting back: on both engines, and always W≡C at the next token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inside import core_of
from perdure import (
    CannotRewindError,
    Context,
    ContextOverflow,
    CorruptStateError,
    DecodeCancelled,
    DecodeError,
    EngineError,
    Feed,
    IncompatibleStateError,
    InvalidInputError,
    RowError,
    SequenceError,
)
from perdure.engine.contract import Outcome
from perdure.memory import FullAttention, Recurrent, SlidingWindow
from subjects import NARROW, Row, Subject, check

from .failures import failing_decode

LENGTH = 70


def opened(subject: Subject, **settings: Any) -> Context:
    """One pool of cells is never exact, so there the settings are those that round least."""
    fine = settings.get("shared", False)
    return subject.context(**{"n_batch": NARROW, "fine": fine, **subject.narrow.settings, **settings})


def cold(subject: Subject, tokens: list[int], **settings: Any) -> Row:
    return subject.cold([tokens], n_batch=NARROW, **{**subject.narrow.settings, **settings})


def go_on(subject: Subject, ctx: Context, tokens: list[int], seq: int = 0) -> None:
    """`seq` holds `tokens`, by its ledger and by the engine's positions, and goes on as if cold."""
    assert ctx.tokens(seq) == tokens
    assert core_of(ctx).newest(seq) == len(tokens) - 1
    ctx.decode([65], seq)
    check_alike(subject, ctx, [*tokens, 65])


def check_alike(subject: Subject, ctx: Context, tokens: list[int], **settings: Any) -> None:
    """The last row of `ctx` is that of a fresh context with the same tokens."""
    fine = ctx.capabilities.shared
    bound = subject.rounding.fine if fine else subject.narrow.bound
    check(ctx.logits().copy(), cold(subject, tokens, fine=fine, **settings), bound)


@pytest.mark.parametrize("fine", [False, True])
def test_narrow_steps_are_computed_alike_or_nearly(subject: Subject, fine: bool) -> None:
    """What the comparisons here stand on, besides the promise itself."""
    tokens = subject.tokens(LENGTH)
    for n_batch in (1, 2):
        settings = {"fine": fine, **subject.narrow.settings}
        row = subject.cold([tokens], n_batch=n_batch, **settings)
        check(row, cold(subject, tokens, fine=fine), subject.narrow_bound(fine=fine))


# Cutting.


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize("back", [1, 2, 7, 8, 9, 31, 32, 33, LENGTH - 1, LENGTH])
def test_k4_a_cut_leaves_exactly_the_tokens_it_says_or_is_refused(
    subject: Subject, back: int, swa_full: bool, shared: bool
) -> None:
    tokens = subject.tokens(LENGTH)
    with opened(subject, swa_full=swa_full, shared=shared) as ctx:
        ctx.decode(tokens)
        reachable = ctx.shortest_cut()
        if LENGTH - back == 0 or LENGTH - back >= reachable:
            ctx.truncate(LENGTH - back)
            go_on(subject, ctx, tokens[: LENGTH - back])
            return
        assert subject.kind is not FullAttention
        with pytest.raises(CannotRewindError) as caught:
            ctx.truncate(LENGTH - back)
        assert (caught.value.asked, caught.value.reachable) == (LENGTH - back, reachable)
        ctx.truncate(reachable)
        go_on(subject, ctx, tokens[:reachable])


def test_k1_a_kept_window_can_be_cut_anywhere(subject: Subject) -> None:
    with opened(subject, swa_full=True) as ctx:
        ctx.decode(subject.tokens(LENGTH))
        assert ctx.shortest_cut() == (1 if ctx.memory.cuts else LENGTH)
        assert ctx.shortest_cut(1) == 0


def test_cutting_to_the_present_length_changes_nothing(subject: Subject) -> None:
    tokens = subject.tokens(10)
    with opened(subject) as ctx:
        ctx.decode(tokens)
        ctx.truncate(10)
        go_on(subject, ctx, tokens)
        for length in (-1, 12):
            with pytest.raises(InvalidInputError, match=f"holds 11 tokens, cannot keep {length}"):
                ctx.truncate(length)


# Forking.


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("swa_full", [True, False])
def test_forks_go_their_own_ways(subject: Subject, shared: bool, swa_full: bool) -> None:
    tokens = subject.tokens(40)
    with opened(subject, shared=shared, swa_full=swa_full) as ctx:
        ctx.decode([9, 9, 9], seq=1)
        ctx.decode(tokens)
        ctx.fork(0, 1)
        ctx.fork(1, 2)
        with pytest.raises(RowError):
            ctx.logits()
        ctx.decode([1, 2, 3, 4], seq=1)
        ctx.clear(0)
        go_on(subject, ctx, tokens, seq=2)
        go_on(subject, ctx, [*tokens, 1, 2, 3, 4], seq=1)
        go_on(subject, ctx, [], seq=0)


def test_forks_of_a_long_sequence_all_have_room(subject: Subject) -> None:
    """In one pool, the engine never gives up a cell of the window that two sequences share."""
    if subject.kind is not SlidingWindow:
        pytest.skip("no window")
    tokens = subject.tokens(250)
    with opened(subject, n_ctx=330, shared=True, swa_full=False) as ctx:
        ctx.decode(tokens)
        ctx.fork(0, 1)
        ctx.fork(1, 2)
        for seq in (2, 0, 1):
            ctx.decode(subject.tokens(60, seq), seq)
        for seq in (0, 2, 1):
            ctx.decode([65], seq)
            assert ctx.tokens(seq) == [*tokens, *subject.tokens(60, seq), 65]
            check_alike(subject, ctx, ctx.tokens(seq), n_ctx=330)


def test_a_fork_can_be_saved_and_replaced_before_anything_is_decoded(subject: Subject) -> None:
    """The engine may put a copy off; what is read or written meanwhile must still be the copy."""
    tokens, other = subject.tokens(20), subject.tokens(11, 1)
    with opened(subject) as ctx:
        ctx.decode(other, seq=1)
        kept = ctx.save(1)
        ctx.decode(tokens)
        ctx.fork(0, 1)
        state = ctx.save(1)
        ctx.fork(0, 2)
        ctx.load(kept, 2)
        ctx.fork(2, 0)
        ctx.load(state, 2)
        go_on(subject, ctx, other, seq=0)
        go_on(subject, ctx, tokens, seq=1)
        go_on(subject, ctx, tokens, seq=2)


def test_a_fork_of_nothing_is_nothing(subject: Subject) -> None:
    with opened(subject) as ctx:
        ctx.decode([1, 2], seq=1)
        ctx.fork(0, 1)
        go_on(subject, ctx, [], seq=1)
        with pytest.raises(SequenceError):
            ctx.fork(1, 1)


# Clearing.


@pytest.mark.parametrize("shared", [False, True])
def test_k6_a_cleared_context_is_a_new_one(subject: Subject, shared: bool) -> None:
    tokens = subject.tokens(30)
    with opened(subject, shared=shared) as used, opened(subject, shared=shared) as new:
        for seq in (2, 0, 1):
            used.decode(subject.tokens(50, seq), seq)
        used.fork(0, 1)
        used.clear()
        assert [used.tokens(seq) for seq in range(3)] == [[], [], []]
        with pytest.raises(RowError, match="no logits yet"):
            used.logits()
        for ctx in (used, new):
            ctx.decode(tokens, rows="all")
        for row in range(30):
            check(used.logits(row).copy(), new.logits(row).copy())
        assert used.save() == new.save()


def test_clearing_one_sequence_leaves_the_others(subject: Subject) -> None:
    with opened(subject) as ctx:
        for seq in range(3):
            ctx.decode(subject.tokens(20, seq), seq)
        ctx.clear(1)
        for seq in range(3):
            go_on(subject, ctx, [] if seq == 1 else subject.tokens(20, seq), seq)


# Saving and loading.


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("swa_full", [True, False])
def test_saved_state_goes_on_in_any_sequence_of_any_such_context(
    subject: Subject, shared: bool, swa_full: bool
) -> None:
    tokens = subject.tokens(50)
    with opened(subject, shared=shared, swa_full=swa_full) as ctx:
        ctx.decode(tokens)
        state = ctx.save()
        go_on(subject, ctx, tokens)
        ctx.decode([1, 2, 3], seq=2)
        for seq in (2, 0):
            ctx.load(state, seq)
            with pytest.raises(RowError):
                ctx.logits()
            go_on(subject, ctx, tokens, seq)
    with opened(subject, shared=shared, swa_full=swa_full) as ctx:
        ctx.load(bytearray(state))
        assert ctx.save() == state
        go_on(subject, ctx, tokens)
        go_on(subject, ctx, [], seq=1)


@pytest.mark.parametrize("back", [1, 2, 8, 32])
def test_k1_a_loaded_sequence_can_be_cut_only_as_far_as_its_window_goes(subject: Subject, back: int) -> None:
    """The engine leaves out of a state what the window masks, also where the context keeps it."""
    tokens = subject.tokens(50)
    with opened(subject) as ctx:
        ctx.decode(tokens)
        ctx.load(ctx.save())
        if 50 - back >= ctx.shortest_cut():
            ctx.truncate(50 - back)
            go_on(subject, ctx, tokens[: 50 - back])
        else:
            assert subject.kind is not FullAttention
            with pytest.raises(CannotRewindError):
                ctx.truncate(50 - back)
            go_on(subject, ctx, tokens)


def test_damaged_state_is_refused_and_nothing_changes(subject: Subject) -> None:
    tokens = subject.tokens(20)
    with opened(subject) as ctx:
        ctx.decode(tokens)
        state = ctx.save()
        ctx.decode([7])
        row = ctx.logits()
        for place in [*range(0, 90, 7), *range(90, len(state), len(state) // 9), len(state) - 1]:
            damaged = bytearray(state)
            damaged[place] ^= 0x10
            with pytest.raises((CorruptStateError, IncompatibleStateError)):
                ctx.load(damaged)
        for cut in (0, 7, 79, len(state) - 1):
            with pytest.raises(CorruptStateError):
                ctx.load(state[:cut])
        for wrong in (state + b"\0", b"nonsense" * 20, "text", None):
            with pytest.raises(CorruptStateError):
                ctx.load(wrong)  # type: ignore[arg-type]
        assert not row.stale
        go_on(subject, ctx, [*tokens, 7])


def test_foreign_state_is_refused_by_name_and_nothing_changes(
    subject: Subject, find_subject: Callable[[str], Subject]
) -> None:
    name = "toy-full" if subject.name != "toy-full" else "toy-hybrid"
    with opened(find_subject(name)) as ctx:
        ctx.decode([1, 2, 3])
        foreign = ctx.save()
    with opened(subject) as ctx:
        ctx.decode([4, 5])
        with pytest.raises(IncompatibleStateError) as caught:
            ctx.load(foreign)
        assert caught.value.field == "weights"
        go_on(subject, ctx, [4, 5])


def test_state_that_does_not_fit_is_refused_with_the_numbers(subject: Subject) -> None:
    with opened(subject) as ctx:
        ctx.decode(subject.tokens(40))
        state = ctx.save()
    with opened(subject, n_ctx=30) as ctx:
        ctx.decode([4, 5])
        with pytest.raises(ContextOverflow) as caught:
            ctx.load(state)
        assert (caught.value.needed, caught.value.fits) == (40, 30)
        go_on(subject, ctx, [4, 5])


def test_there_is_nothing_to_keep_of_an_empty_sequence(subject: Subject) -> None:
    with opened(subject) as ctx:
        ctx.decode([1])
        for call in (ctx.save, ctx.checkpoint):
            with pytest.raises(InvalidInputError, match="sequence 1 is empty"):
                call(1)


# Checkpoints.


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize("back", [0, 1, 8, 9, 32, 33])
def test_k2_a_checkpoint_can_be_gone_back_to(
    subject: Subject, back: int, swa_full: bool, shared: bool
) -> None:
    tokens = subject.tokens(40)
    with opened(subject, swa_full=swa_full, shared=shared) as ctx:
        ctx.decode(tokens)
        point = ctx.checkpoint()
        assert point.length == 40
        for _ in range(2):
            if back:
                ctx.decode(subject.tokens(back, 1))
            ctx.restore(point)
            with pytest.raises(RowError):
                ctx.logits()
            go_on(subject, ctx, tokens)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("length", [270, 290])
def test_k2_a_checkpoint_brings_back_a_window_that_is_gone(
    subject: Subject, length: int, shared: bool
) -> None:
    """The engine gives up cells of a window only past 256, where it starts again in the first cell."""
    if subject.kind is not SlidingWindow:
        pytest.skip("no window")
    tokens = subject.tokens(length)
    with opened(subject, n_ctx=700, swa_full=False, shared=shared) as ctx:
        ctx.decode(tokens)
        point = ctx.checkpoint()
        ctx.decode(subject.tokens(380, 1))
        with pytest.raises(CannotRewindError):
            ctx.truncate(length)
        ctx.restore(point)
        assert ctx.tokens() == tokens
        ctx.decode([65])
        if shared or length == 290:
            check_alike(subject, ctx, [*tokens, 65], n_ctx=700, swa_full=False)
        else:
            # Here the window wraps around, and its cells lie in another order once they are put back.
            again = cold(subject, [*tokens, 65], n_ctx=700, swa_full=False)
            check(ctx.logits().copy(), again, subject.rounding.usual)


def test_a_checkpoint_of_a_memory_that_can_be_cut_is_small(subject: Subject) -> None:
    with opened(subject) as ctx:
        ctx.decode(subject.tokens(90))
        point = ctx.checkpoint()
        if subject.kind is FullAttention:
            assert point.state is None
        else:
            assert point.state is not None
            assert point.nbytes <= len(ctx.save())


def test_a_checkpoint_serves_every_sequence_that_starts_with_its_tokens(subject: Subject) -> None:
    tokens = subject.tokens(30)
    with opened(subject) as ctx:
        ctx.decode(tokens)
        point = ctx.checkpoint()
        ctx.decode([1, 2], seq=0)
        ctx.fork(0, 2)
        ctx.decode([3, 4], seq=2)
        ctx.restore(point, 2)
        go_on(subject, ctx, tokens, seq=2)
        go_on(subject, ctx, [*tokens, 1, 2], seq=0)


def test_a_checkpoint_of_other_tokens_is_refused_where_it_needs_them(subject: Subject) -> None:
    tokens = subject.tokens(30)
    with opened(subject) as ctx:
        ctx.decode(tokens)
        point = ctx.checkpoint()
        ctx.clear(0)
        ctx.decode([*tokens[:29], 255 - tokens[29], 3])
        if subject.kind is Recurrent:
            ctx.restore(point)
            go_on(subject, ctx, tokens)
            ctx.restore(point, 1)
            go_on(subject, ctx, tokens, seq=1)
            return
        with pytest.raises(IncompatibleStateError) as caught:
            ctx.restore(point)
        assert caught.value.field == "tokens"
        go_on(subject, ctx, [*tokens[:29], 255 - tokens[29], 3])


def test_a_checkpoint_of_another_model_is_refused(
    subject: Subject, find_subject: Callable[[str], Subject]
) -> None:
    name = "toy-full" if subject.name != "toy-full" else "toy-hybrid"
    with opened(find_subject(name)) as other, opened(subject) as ctx:
        for each in (other, ctx):
            each.decode([1, 2, 3])
        with pytest.raises(IncompatibleStateError):
            ctx.restore(other.checkpoint())
        go_on(subject, ctx, [1, 2, 3])


# An engine that refuses.


def test_a_refused_write_says_that_the_sequence_is_empty(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = subject.tokens(20)
    with opened(subject) as ctx:
        ctx.decode(tokens)
        state, point = ctx.save(), ctx.checkpoint()
        with monkeypatch.context() as patch:
            patch.setattr(core_of(ctx), "write", lambda *_, **__: False)
            with pytest.raises(EngineError, match="sequence 1 is now empty"):
                ctx.load(state, 1)
            go_on(subject, ctx, [], seq=1)
            if point.state is not None:
                ctx.decode([1, 2])
                with pytest.raises(EngineError, match="sequence 0 is now empty"):
                    ctx.restore(point)
                go_on(subject, ctx, [], seq=0)
        ctx.load(state, 1)
        go_on(subject, ctx, tokens, seq=1)


@pytest.mark.parametrize("swa_full", [False, True])
def test_b6_after_a_step_that_failed_a_window_goes_on_in_its_order(
    find_subject: Callable[[str], Subject], swa_full: bool
) -> None:
    """B6: the engine takes back where it stood in another, longer sequence, and would look from the start."""
    subject = find_subject("gemma3")
    held = {seq: subject.tokens(length, 10 + seq) for seq, length in enumerate((53, 46, 46))}
    with opened(subject, n_ctx=120, n_seq=3, swa_full=swa_full) as ctx:
        for seq, tokens in held.items():
            ctx.decode(tokens, seq)
        with failing_decode(ctx, step=1, after=0, outcome=Outcome.ABORTED), pytest.raises(DecodeError):
            ctx.step([Feed(2, [65]), Feed(0, [65])])
        for seq in (2, 0):
            ctx.decode([65], seq)
            found = cold(subject, [*held[seq], 65], n_ctx=120, swa_full=swa_full)
            check(ctx.logits().copy(), found, subject.narrow_bound(fine=False))


# A step that is cut short.


@pytest.mark.parametrize("step", [1, 3, 6])
@pytest.mark.parametrize("name", ["toy-sliding", "gemma3"])
def test_b6_a_cancelled_step_in_a_pool_that_keeps_windows_gives_no_sequence_up(
    name: str, step: int, find_subject: Callable[[str], Subject]
) -> None:
    """B6: also where the engine has come to the end of its cells, and looks for the next from the first."""
    subject = find_subject(name)
    tokens, more = subject.tokens(100), subject.tokens(120, 2)
    with subject.context(n_ctx=512, n_batch=16, shared=True, swa_full=True) as ctx:
        ctx.decode(tokens)
        ctx.decode(subject.tokens(412, 1), 1)
        ctx.clear(1)
        with failing_decode(ctx, step=step, after=4), pytest.raises(DecodeCancelled) as caught:
            ctx.decode(more)
        assert caught.value.kept == {0: 100}
        assert ctx.tokens(0) == tokens


def test_b6_ctrl_c_behind_a_step_of_one_token_leaves_what_can_be_gone_on_from(subject: Subject) -> None:
    """B6: the token is taken back, or the sequence is emptied where its memory cannot be: the ledger says
    which, and other sequences have lost nothing."""
    tokens, others = subject.tokens(20), subject.tokens(12, 1)
    with opened(subject) as ctx:
        ctx.decode(tokens)
        ctx.decode(others, seq=1)
        core = core_of(ctx)
        decode = core.decode

        def interrupted(batch: Any) -> Any:
            # As it comes: Python acts on the signal once the native call is over.
            decode(batch)
            raise KeyboardInterrupt

        core.decode = interrupted  # type: ignore[method-assign]
        try:
            with pytest.raises(KeyboardInterrupt):
                ctx.decode([65])
        finally:
            core.decode = decode  # type: ignore[method-assign]
        assert ctx.tokens(0) == (tokens if ctx.memory.cuts else [])
        go_on(subject, ctx, ctx.tokens(0), seq=0)
        go_on(subject, ctx, others, seq=1)
