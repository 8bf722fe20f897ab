"""The next step is built while one is computed. Nothing that happens in between may be lost on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from perdure import Context
from perdure.engine.registry import open_model
from subjects import MLX, Subject, check

Find = Callable[[str], Subject]


def replaced(ctx: Context, other: bytes, spare: list[int]) -> None:
    ctx.load(other)


def cut_and_read_again(ctx: Context, other: bytes, spare: list[int]) -> None:
    ctx.clear(0)
    ctx.decode(spare)


def forked(ctx: Context, other: bytes, spare: list[int]) -> None:
    ctx.clear(1)
    ctx.load(other, 1)
    ctx.fork(1, 0)


@pytest.mark.parametrize("change", [replaced, cut_and_read_again, forked])
@pytest.mark.parametrize("name", MLX)
def test_a_built_step_is_forgotten_where_the_state_changes(
    find_subject: Find, name: str, change: Callable[[Context, bytes, list[int]], None]
) -> None:
    """As long as before, and made of other tokens."""
    subject = find_subject(name)
    tokens, spare = subject.tokens(20), subject.tokens(20, seed=1)
    with subject.context() as ctx:
        ctx.decode(spare)
        other = ctx.save()
        ctx.decode([7])
        cold = ctx.logits().copy()
        ctx.clear()
        ctx.decode(tokens[:15])
        for token in tokens[15:]:
            ctx.decode([token])
        change(ctx, other, spare)
        assert ctx.tokens() == spare
        ctx.decode([7])
        check(ctx.logits().copy(), cold)


@pytest.mark.parametrize("name", MLX)
def test_a_step_that_was_built_gives_the_same_bits(find_subject: Find, name: str) -> None:
    """W≡C: each step here is built anew, since another sequence has a token in between."""
    subject = find_subject(name)
    tokens = subject.tokens(40)
    with subject.context() as ctx:
        rows = []
        for token in tokens:
            ctx.decode([token])
            rows.append(ctx.logits().copy())
        ctx.clear()
        for token, row in zip(tokens, rows, strict=True):
            ctx.decode([token])
            check(ctx.logits().copy(), row)
            ctx.decode([1], seq=1)


def test_rows_are_written_in_place(llama: Path) -> None:
    """A step that was built has handles of the rows before it: kept too long, all are copied at a token."""
    model = open_model(llama, {}, cells=0)
    with model.context(n_ctx=900, n_seq=1, n_batch=100) as ctx:
        ctx.decode([number % 256 for number in range(800)])
        ctx.decode([1])
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        for _ in range(5):
            ctx.decode([2])
        assert 0 < mx.get_peak_memory() - before < (ctx.row_bytes() or 0) * 800 / 4


def test_a_class_that_looks_at_a_token_is_asked_with_the_true_one(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models import llama as theirs

    told = theirs.Model.__call__

    def looks(self: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        # As a class does that sends a token to experts by numbers that it has read.
        return told(self, inputs, *given, **named) + (inputs[0, -1].item() % 7)

    monkeypatch.setattr(theirs.Model, "__call__", looks)
    model = open_model(llama, {}, cells=0)
    with model.context(n_ctx=64, n_seq=1) as ctx, model.context(n_ctx=64, n_seq=1) as other:
        for end, token in enumerate(text := [3, 12, 5, 9, 30, 2], 1):
            ctx.decode([token])
            other.clear()
            other.decode(text[:end])
            np.testing.assert_allclose(ctx.logits().copy(), other.logits().copy(), atol=1e-3)
