"""What every engine does when it decodes. The same tests, unchanged, on the toy engine and on llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from inside import core_of
from perdure import (
    Context,
    ContextOverflow,
    DecodeCancelled,
    DecodeError,
    Feed,
    InvalidInputError,
    RowError,
    SequenceError,
    TokenError,
)
from perdure.memory import FullAttention, SlidingWindow
from subjects import NARROW, Row, Subject, check

from .failures import failing_decode

N_BATCH = 8


def holds(ctx: Context, *sequences: list[int]) -> bool:
    """The ledger says these tokens, and the engine's own positions agree."""
    return all(
        ctx.tokens(seq) == tokens and ctx.length(seq) == len(tokens) == core_of(ctx).newest(seq) + 1
        for seq, tokens in enumerate(sequences)
    )


def check_next(subject: Subject, ctx: Context, text: list[int], seq: int) -> None:
    """The row of one more token of `seq`, which holds `text`, is that of a fresh context."""
    narrow = subject.narrow
    ctx.decode([5], seq)
    cold = subject.cold([[*text, 5]], n_batch=NARROW, **narrow.settings)
    check(ctx.logits().copy(), cold, narrow.bound)


def stop_at(monkeypatch: pytest.MonkeyPatch, ctx: Context, number: int) -> None:
    """Let the `number`-th native decode from now on be stopped as it begins."""
    core, decode = core_of(ctx), core_of(ctx).decode
    calls = iter(range(1, 1000))

    def tripped(batch: Any) -> Any:
        if next(calls) == number:
            core.stop()
        return decode(batch)

    monkeypatch.setattr(core, "decode", tripped)


def rows_one_by_one(subject: Subject, tokens: list[int]) -> list[Row]:
    found = []
    with subject.context(fine=True, n_seq=1) as ctx:
        for token in tokens:
            ctx.decode([token])
            found.append(ctx.logits().copy())
    return found


# Any length.


@pytest.mark.parametrize("length", [1, N_BATCH - 1, N_BATCH, N_BATCH + 1, 3 * N_BATCH, 10 * N_BATCH])
def test_b2_a_prompt_of_any_length_is_decoded_at_our_positions(subject: Subject, length: int) -> None:
    tokens = subject.tokens(length)
    with subject.context(fine=True) as ctx:
        ctx.decode(tokens)
        assert holds(ctx, tokens, [], [])
        by_hand = [tokens[at : at + N_BATCH] for at in range(0, length, N_BATCH)]
        check(ctx.logits().copy(), subject.cold(by_hand, fine=True))
        check(ctx.logits().copy(), rows_one_by_one(subject, tokens)[-1], subject.rounding.fine)


def test_b2_a_prompt_in_pieces_is_the_same_prompt(subject: Subject) -> None:
    tokens = subject.tokens(40)
    with subject.context(fine=True) as ctx:
        for at, end in [(0, 1), (1, 9), (9, 10), (10, 33), (33, 40)]:
            ctx.decode(tokens[at:end])
            assert holds(ctx, tokens[:end])
        check(ctx.logits().copy(), subject.cold([tokens], fine=True), subject.rounding.fine)


@pytest.mark.parametrize("given", [tuple, np.array, lambda tokens: np.array(tokens, np.uint16)])
def test_tokens_come_in_any_flat_sequence(subject: Subject, given: Callable[[list[int]], Any]) -> None:
    tokens = subject.tokens(12)
    with subject.context() as ctx:
        ctx.decode(given(tokens))
        assert holds(ctx, tokens)


def test_the_same_tokens_at_the_same_shapes_give_the_same_bits(subject: Subject) -> None:
    """W≡C where nothing but the place differs: any stream, any context, any neighbours."""
    tokens = subject.tokens(30)
    cold = subject.cold([tokens[:17], tokens[17:]])
    with subject.context() as ctx:
        for seq in (2, 0, 1):
            ctx.decode(tokens[:17], seq)
            ctx.decode(tokens[17:], seq)
            check(ctx.logits().copy(), cold)


def test_one_pool_of_cells_is_the_same_within_the_noise(subject: Subject) -> None:
    tokens = subject.tokens(30)
    cold = subject.cold([tokens], fine=True)
    with subject.context(shared=True, fine=True) as ctx:
        for seq in (2, 0, 1):
            ctx.decode(tokens, seq)
            check(ctx.logits().copy(), cold, subject.rounding.fine)
        assert holds(ctx, tokens, tokens, tokens)


def test_other_tokens_give_other_logits(subject: Subject) -> None:
    """What makes the bounds above mean something: one wrong token is far outside them."""
    tokens = subject.tokens(30)
    cold = subject.cold([tokens], fine=True)
    for place in (0, 1, 15, 28, 29):
        with pytest.raises(AssertionError, match="warm is not cold"):
            check(
                subject.cold([[*tokens[:place], 255 - tokens[place], *tokens[place + 1 :]]], fine=True),
                cold,
                subject.apart * subject.rounding.fine,
            )


# Rows.


@pytest.mark.parametrize("length", [5, N_BATCH, 3 * N_BATCH + 2])
def test_all_rows_are_those_of_decoding_one_by_one(subject: Subject, length: int) -> None:
    tokens = subject.tokens(length)
    with subject.context(fine=True) as ctx:
        ctx.decode(tokens, rows="all")
        for index, row in enumerate(rows_one_by_one(subject, tokens)):
            check(ctx.logits(index).copy(), row, subject.rounding.fine)
            assert ctx.logits(index - length) is ctx.logits(index)


def test_more_rows_than_a_step_gives_still_all_arrive(subject: Subject) -> None:
    with subject.context(fine=True, n_batch=90) as ctx:
        limit = ctx.capabilities.max_outputs
        tokens = subject.tokens(limit + 10)
        ctx.decode(tokens, rows="all")
        for index in (0, limit - 1, limit, limit + 9):
            check(
                ctx.logits(index).copy(),
                subject.cold([tokens[: index + 1]], fine=True),
                subject.rounding.fine,
            )


def test_rows_are_those_asked_for_also_in_earlier_steps(subject: Subject) -> None:
    tokens = subject.tokens(3 * N_BATCH)
    with subject.context(fine=True) as ctx:
        ctx.decode(tokens, rows="all")
        every = [ctx.logits(index).copy() for index in range(len(tokens))]
        ctx.clear()
        ctx.decode(tokens, rows=[0, N_BATCH - 1, N_BATCH, -1])
        for index in (0, N_BATCH - 1, N_BATCH, len(tokens) - 1, -1):
            # How many rows a step gives is part of its shape.
            check(ctx.logits(index).copy(), every[index], subject.rounding.fine)
        with pytest.raises(RowError, match=rf"row 1 of {len(tokens)}"):
            ctx.logits(1)


def test_no_rows_means_no_rows(subject: Subject) -> None:
    with subject.context() as ctx:
        with pytest.raises(RowError, match="no logits yet"):
            ctx.logits()
        ctx.decode(subject.tokens(10), rows="none")
        with pytest.raises(RowError):
            ctx.logits()
        ctx.decode([1])
        check(ctx.logits().copy(), subject.cold([subject.tokens(10), [1]]))


# Several sequences in a step.


def test_a_step_serves_several_sequences_as_if_each_were_alone(subject: Subject) -> None:
    texts = [subject.tokens(12, seed) for seed in range(3)]
    with subject.context(fine=True) as ctx:
        for at, end in [(0, 2), (2, 3), (3, 5)]:
            ctx.step([Feed(seq, texts[seq][at:end]) for seq in (2, 0, 1)])
        ctx.step([Feed(1, texts[1][5:11]), Feed(0, texts[0][5:6])])
        assert holds(ctx, texts[0][:6], texts[1][:11], texts[2][:5])
        check(ctx.logits(seq=0).copy(), subject.cold([texts[0][:6]], fine=True), subject.rounding.fine)
        check(ctx.logits(seq=1).copy(), subject.cold([texts[1][:11]], fine=True), subject.rounding.fine)
        ctx.decode(texts[2][5:], seq=2)
        check(ctx.logits().copy(), subject.cold([texts[2]], fine=True), subject.rounding.fine)


def test_rows_of_a_step_are_named_by_sequence(subject: Subject) -> None:
    one, two = subject.tokens(3, 1), subject.tokens(4, 2)
    with subject.context(fine=True) as ctx:
        ctx.step([Feed(1, two, rows="all"), Feed(0, one, rows=[0])])
        with pytest.raises(RowError, match=r"sequences \[0, 1\]; name one"):
            ctx.logits()
        with pytest.raises(RowError, match="not 2"):
            ctx.logits(seq=2)
        with pytest.raises(RowError):
            ctx.logits(seq=0)
        check(ctx.logits(0, seq=0).copy(), subject.cold([one[:1]], fine=True), subject.rounding.fine)
        for row in range(4):
            check(
                ctx.logits(row, seq=1).copy(),
                subject.cold([two[: row + 1]], fine=True),
                subject.rounding.fine,
            )


def test_a_step_of_one_token_a_sequence_is_a_step_like_any_other(subject: Subject) -> None:
    """Every reply in the making takes such steps: they have a shorter way, with the same result."""
    texts = {seq: subject.tokens(5 + seq, seq) for seq in (2, 0, 1)}
    with subject.context() as short, subject.context() as long:
        for ctx in (short, long):
            for seq, text in texts.items():
                ctx.decode(text, seq=seq)
        for token in (9, 200):
            short.step([Feed(seq, [token + seq]) for seq in texts])
            long.step([Feed(seq, np.array([token + seq])) for seq in texts])
            for seq in texts:
                assert short.tokens(seq) == long.tokens(seq)
                check(short.logits(seq=seq).copy(), long.logits(seq=seq).copy())
        with pytest.raises(RowError, match="name one"):
            short.logits()
        for wrong in (short.n_vocab, -1):
            with pytest.raises(TokenError):
                short.step([Feed(0, [1]), Feed(1, [wrong])])
        with pytest.raises(SequenceError):
            short.step([Feed(0, [1]), Feed(0, [2])])
        assert short.lengths() == long.lengths()


def test_rows_read_together_are_the_rows_read_one_by_one(subject: Subject) -> None:
    with subject.context() as ctx:
        ctx.step([Feed(2, subject.tokens(3, 2)), Feed(0, subject.tokens(2), rows="all"), Feed(1, [7])])
        places = [(0, 1), (-1, 2), (1, 0), (0, 0)]
        for chosen in (places, places[:2], sorted(places, key=lambda place: place[::-1])):
            table = ctx.read_rows(lambda rows: rows.copy(), chosen)
            for row, (place, seq) in zip(table, chosen, strict=True):
                assert row.tolist() == ctx.logits(place, seq).tolist()
        with pytest.raises(RowError):
            ctx.read_rows(lambda rows: rows.copy(), [(0, 2)])


def test_b6_a_full_sequence_keeps_a_step_of_single_tokens_from_all(subject: Subject) -> None:
    with subject.context(n_ctx=8) as ctx:
        ctx.decode(subject.tokens(8), seq=0)
        ctx.decode(subject.tokens(3), seq=1)
        with pytest.raises(ContextOverflow):
            ctx.step([Feed(0, [1]), Feed(1, [2])])
        assert ctx.lengths() == [8, 3, 0]


def test_a_step_takes_each_sequence_once_and_no_more_than_a_batch(subject: Subject) -> None:
    with subject.context() as ctx:
        with pytest.raises(SequenceError):
            ctx.step([Feed(0, [1]), Feed(0, [2])])
        with pytest.raises(InvalidInputError, match="1 to 8 tokens, got 9"):
            ctx.step([Feed(0, [1] * 5), Feed(1, [2] * 4)])
        with pytest.raises(InvalidInputError, match="got 0"):
            ctx.step([])
        assert holds(ctx, [], [], [])


# Bad input, and no room.


@pytest.mark.parametrize(
    "tokens", [[], [-1], [100_000], [[1, 2]], [1.5], ["a"], None, [1, None], np.zeros((2, 2), np.int32)]
)
def test_b3_bad_tokens_are_refused_and_nothing_changes(subject: Subject, tokens: Any) -> None:
    with subject.context() as ctx:
        ctx.decode(subject.tokens(5))
        row = ctx.logits()
        with pytest.raises(TokenError):
            ctx.decode(tokens)
        with pytest.raises(TokenError):
            ctx.step([Feed(0, [1]), Feed(1, tokens)])
        assert holds(ctx, subject.tokens(5), [], [])
        assert not row.stale


@pytest.mark.parametrize("seq", [-1, 3, 256, 1.0, None, "0"])
def test_b3_bad_sequences_are_refused_and_nothing_changes(subject: Subject, seq: Any) -> None:
    with subject.context() as ctx:
        ctx.decode(subject.tokens(5))
        state = ctx.save()
        calls: list[Callable[[], object]] = [
            lambda: ctx.decode([1], seq),
            lambda: ctx.step([Feed(seq, [1])]),
            lambda: ctx.tokens(seq),
            lambda: ctx.truncate(0, seq),
            lambda: ctx.fork(0, seq),
            lambda: ctx.fork(seq, 0),
            lambda: ctx.save(seq),
            lambda: ctx.load(state, seq),
            lambda: ctx.checkpoint(seq),
        ]
        for call in calls:
            with pytest.raises(SequenceError, match="sequences run from 0 to 2"):
                call()
        assert holds(ctx, subject.tokens(5), [], [])


@pytest.mark.parametrize("rows", ["first", [5], [-6], [0.0], ["0"]])
def test_b3_bad_rows_are_refused_and_nothing_changes(subject: Subject, rows: Any) -> None:
    with subject.context() as ctx:
        with pytest.raises(RowError):
            ctx.decode(subject.tokens(5), rows=rows)
        assert holds(ctx, [])


def test_too_many_tokens_are_an_error_with_the_numbers_before_any_work(subject: Subject) -> None:
    with subject.context(n_ctx=20) as ctx:
        ctx.decode(subject.tokens(15))
        calls: list[Callable[[], object]] = [
            lambda: ctx.decode([1] * 6),
            lambda: ctx.step([Feed(1, [1]), Feed(0, [1] * 6)]),
        ]
        for call in calls:
            with pytest.raises(ContextOverflow, match="21 tokens, 20 fit") as caught:
                call()
            assert (caught.value.needed, caught.value.fits) == (21, 20)
        assert holds(ctx, subject.tokens(15), [], [])
        ctx.decode([1] * 5)
        assert holds(ctx, [*subject.tokens(15), *[1] * 5], [], [])


# Failure.


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_b6_a_decode_stopped_at_any_step_leaves_the_state_before_it(
    subject: Subject, number: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, more = subject.tokens(20), subject.tokens(3 * N_BATCH + 1, 1)
    with subject.context(shared=shared, swa_full=False, fine=shared) as ctx:
        ctx.decode(text)
        with monkeypatch.context() as patch:
            stop_at(patch, ctx, number)
            with pytest.raises(DecodeCancelled, match="nothing was changed") as caught:
                ctx.decode(more)
        assert caught.value.kept == {0: 20}
        assert holds(ctx, text, [], [])
        with pytest.raises(RowError):
            ctx.logits()
        ctx.decode(more)
        cold = subject.cold([text, more], fine=shared)
        check(ctx.logits().copy(), cold, subject.rounding.fine if shared else 0.0)


def test_b6_a_decode_cut_into_steps_by_its_rows_is_undone_whole(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = subject.tokens(20)
    settings: dict[str, Any] = {"n_ctx": 200, "n_batch": 150, "swa_full": False}
    with subject.context(**settings) as ctx:
        more = subject.tokens(2 * ctx.capabilities.max_outputs + 1, 1)
        ctx.decode(text)
        with monkeypatch.context() as patch:
            stop_at(patch, ctx, 3)
            with pytest.raises(DecodeCancelled, match="nothing was changed"):
                ctx.decode(more, rows="all")
        assert holds(ctx, text)
        ctx.decode([5])
        check(ctx.logits().copy(), subject.cold([text, [5]], **settings))


@pytest.mark.parametrize("after", [0, 1, 2, 20, 60])
def test_b6_a_failed_step_leaves_each_sequence_before_it_or_says_what_is_left(
    subject: Subject, after: int
) -> None:
    texts = {seq: subject.tokens(9 + seq, seq) for seq in range(3)}
    with subject.context(n_batch=NARROW, **subject.narrow.settings) as ctx:
        for seq in (0, 2, 1):
            ctx.decode(texts[seq], seq)
        # The first step takes sequences that lie on both sides of the third.
        for feeds in ({0: [1], 1: [5]}, {2: [6], 1: [3, 4]}):
            try:
                with failing_decode(ctx, step=1, after=after):
                    ctx.step([Feed(seq, tokens) for seq, tokens in feeds.items()])
                texts = {seq: [*text, *feeds.get(seq, [])] for seq, text in texts.items()}
            except DecodeError as error:
                lost = {seq for seq, count in error.kept.items() if count != len(texts[seq])}
                # One token more is not worth a copy of a recurrent state: it may have to be given up.
                assert not lost or not ctx.memory.cuts
                texts = {seq: [] if seq in lost else text for seq, text in texts.items()}
            assert holds(ctx, *texts.values())
        for seq, text in texts.items():
            check_next(subject, ctx, text, seq)


def test_b6_after_a_failed_step_of_sequences_apart_tokens_go_where_they_would_have_gone(
    subject: Subject,
) -> None:
    """Without flash attention the places of cells count, to the last bit."""
    if not subject.toy and subject.kind is not FullAttention:
        pytest.skip("its cells have no places of their own, or lose them")
    texts = [subject.tokens(45, seq) for seq in range(3)]
    with subject.context(n_batch=NARROW, fine=True) as ctx:
        for seq, text in enumerate(texts):
            ctx.decode(text, seq)
        with pytest.raises(DecodeError), failing_decode(ctx, step=1, after=0):
            ctx.step([Feed(0, [1]), Feed(2, [1])])
        for seq, text in enumerate(texts):
            if ctx.tokens(seq):
                ctx.decode([5], seq)
                cold = subject.cold([[*text, 5]], n_batch=NARROW, fine=True)
                check(ctx.logits().copy(), cold, subject.narrow_bound(fine=True))


def test_b6_cancelling_a_step_never_costs_a_sequence_that_is_no_part_of_it(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [subject.tokens(9 + seq, seq) for seq in range(3)]
    with subject.context(n_batch=NARROW, **subject.narrow.settings) as ctx:
        for seq in (0, 2, 1):
            ctx.decode(texts[seq], seq)
        decode = core_of(ctx).decode

        def cancelled(batch: Any) -> Any:
            ctx.cancel()
            return decode(batch)

        monkeypatch.setattr(core_of(ctx), "decode", cancelled)
        for pair in ((0, 1), (1, 2)):
            feeds = [Feed(seq, [1]) for seq in pair]
            if ctx.memory.cuts:
                with pytest.raises(DecodeCancelled, match="nothing was changed"):
                    ctx.step(feeds)
            else:
                ctx.step(feeds)
                for seq in pair:
                    texts[seq].append(1)
        monkeypatch.undo()
        assert holds(ctx, *texts)
        for seq, text in enumerate(texts):
            check_next(subject, ctx, text, seq)


def test_b6_a_failed_decode_into_an_empty_sequence_leaves_it_empty(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = subject.tokens(2 * N_BATCH)
    with subject.context() as ctx:
        with monkeypatch.context() as patch:
            stop_at(patch, ctx, 2)
            with pytest.raises(DecodeCancelled):
                ctx.decode(text)
        assert holds(ctx, [], [], [])
        ctx.decode(text)
        check(ctx.logits().copy(), subject.cold([text]))


def test_capabilities_say_what_the_memory_can_do(subject: Subject) -> None:
    with subject.context(shared=True) as ctx:
        assert ctx.capabilities.truncate == (ctx.memory.kind in (FullAttention, SlidingWindow))
        assert ctx.capabilities.shared
        assert ctx.capabilities.max_outputs >= ctx.n_seq
        assert ctx.n_vocab == subject.model.n_vocab
