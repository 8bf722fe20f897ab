"""`ctx.kv`: keys and values of the cache as numbers, equal to a model in NumPy over the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ext.inspection.reference import Gemma3, Llama
from perdure import InvalidInputError, Model
from perdure.testing.toy import ToyModel
from zoo.attention import GEMMA3_GLOBAL, GEMMA3_WINDOW

ZooPath = Callable[[str], Path]
TOKENS = [5, 17, 3, 40, 9, 22, 61, 8, 30, 12]


@pytest.fixture(scope="module")
def model(zoo_path: ZooPath) -> Model:
    return Model(zoo_path("llama"))


@pytest.mark.parametrize(
    ("kind", "error", "later"),
    [("f32", 1e-4, 6e-3), ("f16", 3e-3, 1e-2), ("bf16", 3e-2, 6e-2), ("q8_0", 4e-2, 8e-2)],
)
def test_keys_and_values_equal_a_model_in_numpy(
    model: Model, zoo_path: ZooPath, kind: str, error: float, later: float
) -> None:
    """In the first layer to the type's own precision; behind it flash attention rounds, too."""
    reference = Llama(zoo_path("llama"))
    expected = reference(TOKENS)
    with model.context(n_ctx=256, n_seq=2, threads=1, k_type=kind, v_type=kind) as ctx:
        ctx.decode(TOKENS, 1)
        whole, plain = ctx.kv(1), ctx.kv(1, rope=False)
        assert whole.k.shape == (reference.layers, len(TOKENS), reference.kv_heads, reference.size)
        for ours, theirs in (
            (whole.k, expected.rotated_keys),
            (plain.k, expected.keys),
            (whole.v, expected.values),
        ):
            np.testing.assert_allclose(ours[0], theirs[0], atol=error)
            np.testing.assert_allclose(ours, np.stack(theirs), atol=later)
        part = ctx.kv(1, 2, 4, 7)
        np.testing.assert_array_equal(part.k[0], whole.k[2, 4:7])
        np.testing.assert_allclose(ctx.kv(1, 2, 4, 7, rope=False).k[0], plain.k[2, 4:7], atol=1e-6)
        # The context is as it was.
        assert ctx.tokens(1) == TOKENS
        ctx.decode([7], 1)


def test_rows_of_a_block_are_read_like_those_of_a_sequence(model: Model) -> None:
    with model.context(n_ctx=256, threads=1) as ctx:
        ctx.decode(TOKENS)
        rows = ctx.capture().rows
        assert rows is not None
        block = rows.cut(4, 8)
        np.testing.assert_array_equal(
            ctx.kv_of(block, 1, start=4, rope=False).k, ctx.kv(0, 1, 4, 8, rope=False).k
        )


def test_what_there_is_not_is_refused_with_numbers(model: Model) -> None:
    with model.context(n_ctx=256, threads=1) as ctx:
        with pytest.raises(InvalidInputError, match="empty"):
            ctx.kv()
        ctx.decode(TOKENS)
        with pytest.raises(InvalidInputError, match="layer is a whole number from 0 to 2, got 3"):
            ctx.kv(0, 3)
        with pytest.raises(InvalidInputError, match="stop is a whole number from 0 to 10, got 11"):
            ctx.kv(0, 0, 0, 11)
        with pytest.raises(InvalidInputError, match="are none"):
            ctx.kv(0, 0, 5, 5)
        with pytest.raises(InvalidInputError, match="rows have"):
            ctx.kv_of(np.zeros((2, 3), np.uint8))


@pytest.mark.parametrize("settings", [{}, {"n_seq": 2}, {"swa_full": True}])
def test_layers_with_a_window_have_what_it_still_holds(zoo_path: ZooPath, settings: dict[str, Any]) -> None:
    """Global layers have all tokens, sliding ones the last; both equal a model in NumPy."""
    reference = Gemma3(zoo_path("gemma3"), GEMMA3_WINDOW)
    tokens = [(7 * at * at + 3 * at) % 60 + 2 for at in range(100)]
    expected = reference(tokens)
    with Model(zoo_path("gemma3")).context(
        n_ctx=256, threads=1, k_type="f32", v_type="f32", **settings
    ) as ctx:
        # Also a sequence that the window has not left yet.
        ctx.decode(tokens[:10])
        short = ctx.kv(rope=False)
        assert short.start == 0
        assert short.layers == tuple(range(reference.layers))
        np.testing.assert_allclose(short.k, np.stack(expected.keys)[:, :10], atol=0.02)
        ctx.decode(tokens[10:])
        whole = ctx.kv(0, GEMMA3_GLOBAL, rope=False)
        assert (whole.start, whole.tokens) == (0, 100)
        np.testing.assert_allclose(whole.k[0], expected.keys[GEMMA3_GLOBAL], atol=0.02)
        kv, plain = ctx.kv(), ctx.kv(rope=False)
        assert kv.start >= 100 - GEMMA3_WINDOW - 1
        assert kv.start + kv.tokens == 100
        for layer in range(reference.layers):
            for ours, theirs in (
                (kv.k, expected.rotated_keys),
                (plain.k, expected.keys),
                (kv.v, expected.values),
            ):
                np.testing.assert_allclose(ours[layer], theirs[layer][kv.start :], atol=0.02)
        part = ctx.kv(0, 2, 90, 95)
        np.testing.assert_array_equal(part.k[0], kv.k[2, 90 - kv.start : 95 - kv.start])
        with pytest.raises(InvalidInputError, match=rf"layer 2 keeps a window: .* from {kv.start} on"):
            ctx.kv(0, 2, 3, 95)
        with pytest.raises(InvalidInputError, match=r"layers \[5\] have all 100"):
            ctx.kv(0, None, 0)
        rows = ctx.capture().rows
        assert rows is not None
        np.testing.assert_array_equal(ctx.kv_of(rows.cut(4, 8), start=4).k, ctx.kv(0, 5, 4, 8).k)
        with pytest.raises(InvalidInputError, match="layer 2 keeps a window"):
            ctx.kv_of(rows.cut(4, 8), 2, start=4)


def test_a_model_with_other_memories_is_refused(zoo_path: ZooPath) -> None:
    with Model(zoo_path("mamba")).context(n_ctx=256, threads=1) as ctx:
        ctx.decode(TOKENS)
        with pytest.raises(InvalidInputError, match="cannot be told apart"):
            ctx.kv()


def test_an_engine_without_keys_and_values_says_so() -> None:
    with ToyModel().context(n_ctx=64) as ctx:
        ctx.decode([1, 2, 3])
        with pytest.raises(InvalidInputError, match="cannot be told apart"):
            ctx.kv()
