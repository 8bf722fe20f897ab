"""Comparisons of keys and values, and the logit lens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import perdure
from ext.inspection.reference import Llama
from perdure import InvalidInputError, Model
from perdure.cache.block import Block
from perdure.ext.inspection.key_values import compare, drift, effective_rank, norms, similarity
from perdure.ext.inspection.lens import logit_lens

ZooPath = Callable[[str], Path]
TOKENS = [5, 17, 3, 40, 9, 22, 61, 8, 30, 12]


def test_a_branch_equals_its_parent_until_they_part(zoo_path: ZooPath) -> None:
    with Model(zoo_path("llama")).context(n_ctx=256, n_seq=2, threads=1) as ctx:
        ctx.decode(TOKENS)
        ctx.fork(0, 1)
        assert compare(ctx.kv(0), ctx.kv(1)).equal
        ctx.truncate(6, 1)
        ctx.decode([50, 51, 52, 53], 1)
        found = compare(ctx.kv(0), ctx.kv(1))
        assert not found.k_drift[:, :6].any()
        assert (found.k_drift[:, 6:].max(axis=(1, 2)) > 0.1).all()
        assert (found.drift_by_layer > 0).all()
        assert found.k_similarity[:, :6].min() == pytest.approx(1, abs=1e-6)


def test_a_stored_block_equals_a_fresh_one(zoo_path: ZooPath) -> None:
    tokens = [(7 * at) % 60 + 1 for at in range(100)]
    with perdure.open(zoo_path("llama"), n_ctx=256, slots=1, threads=1) as rt:
        rt.generate(tokens, max_tokens=1, temperature=0)
        rt.cache.sleep(tokens)
        _, blocks = rt.cache.pack(tokens)
    block: Block = blocks[0]
    assert block.rows is not None
    with Model(zoo_path("llama")).context(n_ctx=256, threads=1) as ctx:
        ctx.decode(tokens)
        stored = ctx.kv_of(block.rows, start=block.start)
        found = compare(stored, ctx.kv(0, None, block.start, block.end))
    # Steps of other sizes round otherwise, in the last bits.
    assert found.k_drift.max() < 0.02
    assert found.v_drift.max() < 0.02
    with pytest.raises(InvalidInputError, match="cannot be compared"):
        compare(stored, type(stored)(k=stored.k, v=stored.v, layers=(9,), start=0, rotated=True))


def test_numbers_of_a_comparison_are_what_they_say() -> None:
    one = np.zeros((1, 3, 1, 4), np.float32)
    one[0, :, 0, 0] = [1, 2, 3]
    other = one.copy()
    other[0, 2, 0, :2] = [0, 3]
    assert norms(one)[0, :, 0].tolist() == [1, 2, 3]
    assert similarity(one, other)[0, :, 0].tolist() == [1, 1, 0]
    assert drift(one, other)[0, :, 0].tolist() == pytest.approx([0, 0, 2**0.5])
    assert effective_rank(one)[0, 0] == pytest.approx(1)
    assert effective_rank(np.eye(4, dtype=np.float32)[None, :, None])[0, 0] == pytest.approx(4)


def test_the_lens_of_the_last_layer_is_the_models_own_answer(zoo_path: ZooPath) -> None:
    expected = Llama(zoo_path("llama"))(TOKENS)
    with Model(zoo_path("llama")).context(n_ctx=256, threads=1) as ctx:
        ctx.decode(TOKENS)
        trace = ctx.trace()
        lens = logit_lens(zoo_path("llama"), trace, top=3)
        assert lens.tokens.shape == (3, len(TOKENS), 3)
        np.testing.assert_array_equal(lens.tokens[-1, :, 0], expected.logits.argmax(axis=1))
        share = np.exp(expected.logits[-1] - expected.logits[-1].max())
        assert lens.probabilities[-1, -1, 0] == pytest.approx(1 / share.sum(), rel=0.05)
        with pytest.raises(InvalidInputError, match="last layer"):
            logit_lens(zoo_path("llama"), ctx.trace(layers=[0, 1]))
        with pytest.raises(InvalidInputError, match="hidden states"):
            logit_lens(zoo_path("llama"), ctx.trace(what="ffn"))
