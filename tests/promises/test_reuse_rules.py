"""K1, K4, K6: what is kept can be used again, is exactly what it says, and is gone when it is cleared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from inside import core_of
from perdure import CannotRewindError, Checkpoint, Context, Feed, Model
from perdure.memory import FullAttention, SlidingWindow
from promises.kinds import KINDS, MLX, WINDOW, Kind, Row, every, long, positions, prompt, row_after

# The engine rounds a window of 32 up to 256 cells: past that, what lies before the window is gone.
LONG, SHORT = prompt(500), prompt(120)
LENGTHS = {"n_ctx": 768, "n_batch": 64}
CLOSE = 0.1
"""Rounding moves a logit of the toy by up to 0.05 where batch shapes differ; a lost window by more than 1."""

SLIDING = [Kind("gemma3", {"swa_full": False}), Kind("gemma3", {"swa_full": True})]
GOES_BACK_BADLY = [*SLIDING, Kind("mamba"), Kind("jamba"), *MLX[2:6]]


class Reuse:
    """Asks a context for the answer to some tokens, using again what it holds as far as that is allowed."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.points: list[Checkpoint] = []
        self.path: list[str] = []

    def ask(self, tokens: list[int], seq: int = 0) -> Row:
        held = self.ctx.tokens(seq)
        keep = next((at for at, (a, b) in enumerate(zip(held, tokens, strict=False)) if a != b), None)
        # The last token is always decoded again: its row is what was asked for.
        keep = min(len(held), len(tokens) - 1) if keep is None else keep
        if keep < len(held):
            keep = self._go_back(keep, seq, tokens)
        self.ctx.decode(tokens[keep:], seq)
        assert self.ctx.tokens(seq) == tokens
        assert positions(self.ctx, seq) == len(tokens)
        return self.ctx.logits().copy()

    def _go_back(self, keep: int, seq: int, tokens: list[int]) -> int:
        held = self.ctx.tokens(seq)
        with contextlib.suppress(CannotRewindError):
            self.ctx.truncate(keep, seq)
            self.path.append("cut")
            return keep
        assert self.ctx.tokens(seq) == held
        usable = [p for p in self.points if p.length <= keep and p.tokens.tolist() == tokens[: p.length]]
        if usable:
            point = max(usable, key=lambda each: each.length)
            self.ctx.restore(point, seq)
            self.path.append("restored")
            return point.length
        self.ctx.clear(seq)
        self.path.append("recomputed")
        return 0

    def mark(self, seq: int = 0) -> None:
        self.points.append(self.ctx.checkpoint(seq))


Answers = list[tuple[list[int], Row]]


def _again(reuse: Reuse, whole: list[int]) -> Answers:
    return [(whole, reuse.ask(whole)) for _ in range(4)]


def _back(count: int) -> Callable[[Reuse, list[int]], Answers]:
    def pattern(reuse: Reuse, whole: list[int]) -> Answers:
        reuse.ask(whole)
        other = whole[: max(1, len(whole) - count)] + prompt(5, salt=1)
        return [(other, reuse.ask(other))]

    return pattern


def _back_and_forth(reuse: Reuse, whole: list[int]) -> Answers:
    reuse.ask(whole)
    shorter, longer = [*whole[:-20], 1, 2], whole[:-20] + prompt(60, salt=2)
    return [(tokens, reuse.ask(tokens)) for tokens in (shorter, longer, whole, shorter)]


def _further_back(reuse: Reuse, whole: list[int]) -> Answers:
    reuse.ask(whole)
    cuts = [[*whole[: len(whole) - n], 9] for n in (1, 10, 30, 60, 100)]
    return [(tokens, reuse.ask(tokens)) for tokens in cuts]


def _checkpointed(reuse: Reuse, whole: list[int]) -> Answers:
    third = len(whole) // 3
    for point in (third, 2 * third):
        reuse.ask(whole[:point])
        reuse.mark()
    reuse.ask(whole)
    one, two = whole[: third + 30] + prompt(9, salt=1), whole[: 2 * third + 9] + prompt(9, salt=2)
    return [(tokens, reuse.ask(tokens)) for tokens in (one, whole, two)]


def _forked(reuse: Reuse, whole: list[int]) -> Answers:
    reuse.ask(whole)
    reuse.ctx.fork(0, 1)
    one, two = whole[:-10] + prompt(9, salt=1), whole + prompt(9, salt=2)
    return [(one, reuse.ask(one, 1)), (two, reuse.ask(two, 0)), (whole, reuse.ask(whole, 1))]


def _woken(reuse: Reuse, whole: list[int]) -> Answers:
    reuse.ask(whole)
    state = reuse.ctx.save()
    reuse.ctx.clear()
    reuse.ctx.load(state, 1)
    longer, shorter = whole + prompt(9, salt=1), whole[:-50] + prompt(9, salt=2)
    return [(tokens, reuse.ask(tokens, 1)) for tokens in (whole, longer, shorter)]


def _cleared(reuse: Reuse, whole: list[int]) -> Answers:
    reuse.ask(whole)
    reuse.ctx.clear(0)
    other = prompt(len(whole) - 20, salt=3)
    return [(other, reuse.ask(other)), (whole, reuse.ask(whole))]


PATTERNS: dict[str, Callable[[Reuse, list[int]], Answers]] = {
    "the same four times": _again,
    "back by 1": _back(1),
    "back by 8": _back(8),
    "back by the window": _back(32),
    "back by the window and 1": _back(33),
    "back by 100": _back(100),
    "back by half": _back(250),
    "back by all but one": _back(1000),
    "back and forth": _back_and_forth,
    "further back each time": _further_back,
    "with checkpoints": _checkpointed,
    "forked": _forked,
    "saved and loaded": _woken,
    "cleared": _cleared,
}


# K1


@pytest.mark.parametrize("kind", every(GOES_BACK_BADLY))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_k1_reuse_answers_as_a_fresh_context_would(
    pattern: str, kind: Kind, open_model: Callable[[str], Model]
) -> None:
    model = open_model(kind.name)
    with kind.open(model, **LENGTHS) as ctx:
        for tokens, warm in PATTERNS[pattern](Reuse(ctx), LONG):
            cold = row_after(kind, model, [tokens], **LENGTHS)
            assert np.abs(warm - cold).max() < CLOSE


@pytest.mark.parametrize("kind", [*every(KINDS[:-2]), *long(MLX)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_k1_reuse_is_exact_token_by_token(
    pattern: str, kind: Kind, open_model: Callable[[str], Model]
) -> None:
    """At equal batch shapes warm equals cold bit for bit: here every step is one token."""
    model = open_model(kind.name)
    with kind.open(model) as ctx:
        native = ctx.decode

        def one_by_one(tokens: list[int], seq: int = 0) -> None:
            for token in tokens:
                native([token], seq)

        ctx.decode = one_by_one  # type: ignore[method-assign, assignment]
        for tokens, warm in PATTERNS[pattern](Reuse(ctx), SHORT):
            cold = row_after(kind, model, [[token] for token in tokens])
            np.testing.assert_array_equal(warm, cold)


def test_k1_the_patterns_reach_every_way_of_going_back(open_model: Callable[[str], Model]) -> None:
    ways: set[str] = set()
    for pattern in PATTERNS.values():
        with WINDOW.open(open_model("gemma3"), **LENGTHS) as ctx:
            reuse = Reuse(ctx)
            pattern(reuse, LONG)
            ways.update(reuse.path)
    assert ways == {"cut", "restored", "recomputed"}


def test_k1_the_check_sees_a_window_that_is_gone(
    open_model: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a rule that believes the engine, which says yes to every cut."""
    monkeypatch.setattr(SlidingWindow, "can_cut", lambda self, keep, oldest: True)
    model = open_model("gemma3")
    with WINDOW.open(model, **LENGTHS) as ctx:
        ((tokens, warm),) = _back(250)(Reuse(ctx), LONG)
    assert np.abs(warm - row_after(WINDOW, model, [tokens], **LENGTHS)).max() > 10 * CLOSE


@pytest.mark.parametrize("kind", every(GOES_BACK_BADLY))
def test_k1_a_cut_that_cannot_be_is_refused_and_what_it_says_is_true(
    kind: Kind, open_model: Callable[[str], Model]
) -> None:
    model = open_model(kind.name)
    with kind.open(model, **LENGTHS) as ctx:
        ctx.decode(LONG)
        shortest = ctx.shortest_cut()
        if ctx.memory.cuts and ctx.memory.keeps_window:
            assert shortest == 1
        else:
            with pytest.raises(CannotRewindError) as caught:
                ctx.truncate(shortest - 1)
            assert (caught.value.asked, caught.value.reachable) == (shortest - 1, shortest)
            assert ctx.tokens() == LONG
        ctx.truncate(shortest)
        assert ctx.tokens() == LONG[:shortest]
        ctx.decode([5])
        cold = row_after(kind, model, [LONG[:shortest], [5]], **LENGTHS)
        assert np.abs(ctx.logits() - cold).max() < CLOSE


# K4


def _check(ctx: Context, expected: dict[int, list[int]]) -> None:
    for seq, tokens in expected.items():
        assert ctx.tokens(seq) == tokens
        assert ctx.length(seq) == len(tokens)
        assert positions(ctx, seq) == len(tokens)
        if ctx.memory.kind is FullAttention:
            assert core_of(ctx).oldest(seq) == (0 if tokens else -1)


def test_k4_every_call_leaves_exactly_the_tokens_that_it_says(kind: Kind, model: Model) -> None:
    one, two = prompt(30), prompt(12, salt=1)
    with kind.open(model, n_seq=3) as ctx:
        _check(ctx, {0: [], 1: [], 2: []})
        ctx.decode(one)
        _check(ctx, {0: one, 1: [], 2: []})
        ctx.decode(two, seq=1)
        _check(ctx, {0: one, 1: two, 2: []})
        ctx.fork(0, 2)
        _check(ctx, {0: one, 1: two, 2: one})
        ctx.fork(1, 0)
        _check(ctx, {0: two, 1: two, 2: one})
        ctx.step([Feed(2, [1, 2]), Feed(0, [3])])
        _check(ctx, {0: [*two, 3], 1: two, 2: [*one, 1, 2]})
        state, point = ctx.save(2), ctx.checkpoint(2)
        ctx.decode([7, 8, 9], seq=2)
        _check(ctx, {0: [*two, 3], 1: two, 2: [*one, 1, 2, 7, 8, 9]})
        ctx.restore(point, 2)
        _check(ctx, {0: [*two, 3], 1: two, 2: [*one, 1, 2]})
        ctx.load(state, 1)
        _check(ctx, {0: [*two, 3], 1: [*one, 1, 2], 2: [*one, 1, 2]})
        ctx.clear(2)
        _check(ctx, {0: [*two, 3], 1: [*one, 1, 2], 2: []})
        ctx.fork(2, 1)
        _check(ctx, {0: [*two, 3], 1: [], 2: []})
        ctx.truncate(len(two) + 1)
        _check(ctx, {0: [*two, 3], 1: [], 2: []})
        if ctx.memory.cuts:
            ctx.truncate(5)
            _check(ctx, {0: two[:5], 1: [], 2: []})
        ctx.truncate(0)
        _check(ctx, {0: [], 1: [], 2: []})
        ctx.decode(two, seq=1)
        ctx.clear()
        _check(ctx, {0: [], 1: [], 2: []})


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 39, 40])
def test_k4_a_truncated_sequence_goes_on_as_if_it_had_never_been_longer(
    length: int, kind: Kind, model: Model
) -> None:
    tokens = prompt(40)
    with kind.open(model) as ctx:
        for token in tokens:
            ctx.decode([token])
        try:
            ctx.truncate(length)
        except CannotRewindError:
            assert not ctx.memory.cuts
            return
        ctx.decode([5])
        _check(ctx, {0: [*tokens[:length], 5]})
        cold = row_after(kind, model, [[token] for token in tokens[:length]] + [[5]])
        np.testing.assert_array_equal(ctx.logits(), cold)


def test_k4_a_fork_and_its_parent_do_not_disturb_each_other(kind: Kind, model: Model) -> None:
    trunk, left, right = prompt(40), prompt(9, salt=1), prompt(9, salt=2)
    with kind.open(model) as ctx:
        ctx.decode(trunk)
        ctx.fork(0, 1)
        ctx.decode(left)
        after_left = ctx.logits().copy()
        ctx.decode(right, seq=1)
        after_right = ctx.logits().copy()
        _check(ctx, {0: trunk + left, 1: trunk + right})
        bound = CLOSE if ctx.capabilities.shared else 0.0
        assert np.abs(after_left - row_after(kind, model, [trunk, left])).max() <= bound
        assert np.abs(after_right - row_after(kind, model, [trunk, right])).max() <= bound
        ctx.clear(0)
        _check(ctx, {0: [], 1: trunk + right})
        ctx.decode([3], seq=1)
        cold = row_after(kind, model, [trunk, right, [3]])
        assert np.abs(ctx.logits() - cold).max() <= bound


# K6


def _work(ctx: Context) -> None:
    """Leave traces everywhere a context has room for them."""
    ctx.decode(prompt(200, salt=4), rows="all")
    ctx.decode(prompt(50, salt=5), seq=1)
    ctx.fork(0, 1)
    ctx.restore(ctx.checkpoint())
    ctx.load(ctx.save())
    ctx.step([Feed(0, [1, 2, 3]), Feed(1, [4])])
    ctx.cancel()


def _run(ctx: Context, seq: int = 0) -> tuple[list[int], list[Row], bytes]:
    """A greedy reply: its tokens, its rows, and the state that it leaves."""
    rows, feed = [], prompt(40)
    for _ in range(8):
        ctx.decode(feed, seq)
        rows.append(ctx.logits().copy())
        feed = [int(rows[-1].argmax())]
    return ctx.tokens(seq), rows, ctx.save(seq)


def test_k6_a_cleared_context_is_a_new_one_bit_for_bit(kind: Kind, model: Model) -> None:
    with kind.open(model) as new:
        tokens, rows, state = _run(new)
    with kind.open(model) as used:
        _work(used)
        used.clear()
        _check(used, {0: [], 1: []})
        again = _run(used)
        assert again[0] == tokens
        np.testing.assert_array_equal(again[1], rows)
        assert again[2] == state
        used.clear()
        assert _run(used)[2] == state


def test_k6_a_cleared_sequence_is_a_new_one_beside_the_others(kind: Kind, model: Model) -> None:
    with kind.open(model) as new:
        tokens, rows, state = _run(new)
    with kind.open(model) as used:
        _work(used)
        neighbour = used.tokens(1)
        used.clear(0)
        again = _run(used)
        assert again[0] == tokens
        assert used.tokens(1) == neighbour
        if used.capabilities.shared:
            assert np.abs(np.array(again[1]) - rows).max() < CLOSE
        else:
            np.testing.assert_array_equal(again[1], rows)
            assert again[2] == state


def test_k6_clearing_takes_the_adapter_off_only_where_asked(llama: Model, zoo_path: Any) -> None:
    with llama.context(n_ctx=64, threads=1) as ctx:
        plain = _run(ctx)
        ctx.adapt({llama.adapter(zoo_path("llama-lora")): 1.0})
        assert ctx.tokens() == []
        adapted = _run(ctx)
        assert np.abs(np.array(adapted[1][0]) - plain[1][0]).max() > 1
        ctx.clear()
        assert _run(ctx)[2] == adapted[2]
        ctx.adapt({})
        assert _run(ctx)[2] == plain[2]


@pytest.mark.model
def test_k4_and_k6_on_the_default_model(real_model: Model) -> None:
    settings: dict[str, Any] = {"n_ctx": 96, "n_seq": 2, "threads": 1}
    tokens = real_model.tokenize("Once upon a time there was a small town by the sea.")
    with real_model.context(**settings) as new:
        new.decode(tokens)
        row, state = new.logits().copy(), new.save()
    with real_model.context(**settings) as used:
        used.decode(tokens[::-1])
        used.fork(0, 1)
        used.clear()
        used.decode(tokens)
        np.testing.assert_array_equal(used.logits(), row)
        assert used.save() == state
        used.truncate(5)
        assert (used.tokens(), positions(used, 0)) == (tokens[:5], 5)
        used.load(state, 1)
        used.truncate(len(tokens) - 1, seq=1)
        used.decode(tokens[-1:], seq=1)
        assert np.abs(used.logits() - row).max() < 0.5
