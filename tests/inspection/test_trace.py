"""`ctx.trace`: hidden states, attention, feed-forward and experts, equal to a model in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from inspection.reference import Llama
from perdure import InvalidInputError, Model
from perdure.testing.toy import ToyModel

ZooPath = Callable[[str], Path]
TOKENS = [5, 17, 3, 40, 9, 22, 61, 8, 30, 12]


def test_hidden_states_and_attention_equal_a_model_in_numpy(zoo_path: ZooPath) -> None:
    expected = Llama(zoo_path("llama"))(TOKENS)
    with Model(zoo_path("llama")).context(n_ctx=256, n_seq=2, threads=1) as ctx:
        ctx.decode(TOKENS, 1)
        row = ctx.logits().copy()
        trace = ctx.trace(1, what=("hidden", "attention", "ffn"))
        assert trace.layers == (0, 1, 2)
        assert trace.hidden is not None
        assert trace.attention is not None
        assert trace.ffn is not None
        assert not trace.flash
        np.testing.assert_allclose(trace.attention, np.stack(expected.attention), atol=3e-3)
        np.testing.assert_allclose(trace.attention.sum(axis=-1), 1, atol=1e-4)
        np.testing.assert_allclose(trace.hidden, np.stack(expected.hidden), atol=3e-2)
        np.testing.assert_allclose(trace.logits, expected.logits[-1], atol=3e-2)
        assert trace.ffn.shape == trace.hidden.shape
        # Nothing changed where it was asked for.
        np.testing.assert_array_equal(ctx.logits(seq=1).copy(), row)
        assert ctx.tokens(1) == TOKENS


def test_some_layers_are_the_same_as_of_all(zoo_path: ZooPath) -> None:
    with Model(zoo_path("llama")).context(n_ctx=512, threads=1) as ctx:
        # More than a step of the trace, and more than the padding of its cells.
        ctx.decode([(7 * at) % 60 + 1 for at in range(300)])
        whole = ctx.trace(what=("hidden", "attention"))
        some = ctx.trace(layers=[2, 0], what=["attention"])
        assert some.layers == (0, 2)
        assert some.hidden is None
        assert whole.attention is not None
        np.testing.assert_array_equal(some.attention, whole.attention[[0, 2]])
        np.testing.assert_allclose(whole.attention.sum(axis=-1), 1, atol=1e-3)
        assert np.triu(whole.attention[0, 0], 1).max() == 0
        plain = ctx.trace(what="hidden")
        assert plain.flash
        assert plain.hidden is not None
        assert whole.hidden is not None
        np.testing.assert_allclose(plain.hidden, whole.hidden, atol=0.1)


def test_experts_are_counted(zoo_path: ZooPath) -> None:
    with Model(zoo_path("qwen3moe")).context(n_ctx=256, threads=1) as ctx:
        ctx.decode(TOKENS)
        trace = ctx.trace(what=("router",))
        assert trace.router is not None
        counts = trace.expert_counts()
        assert counts.shape == (len(trace.layers), trace.experts)
        assert (counts.sum(axis=1) == len(TOKENS) * trace.router.shape[-1]).all()
        assert trace.router.max() < trace.experts


def test_coherence_and_heads_have_names(zoo_path: ZooPath) -> None:
    with Model(zoo_path("llama")).context(n_ctx=256, threads=1) as ctx:
        ctx.decode(TOKENS)
        trace = ctx.trace(what=("hidden", "attention"))
    coherence = trace.layer_coherence()
    np.testing.assert_allclose(np.diag(coherence), 1, atol=1e-5)
    heads = trace.selected_heads(3)
    assert len(heads) == 3
    assert [each.distance for each in heads] == sorted((each.distance for each in heads), reverse=True)
    assert heads[0].name == f"L{heads[0].layer}H{heads[0].head}"


def test_adapters_of_the_sequence_are_traced(zoo_path: ZooPath) -> None:
    model = Model(zoo_path("llama"))
    vector = model.adapter(zoo_path("llama-vector"))
    with model.context(n_ctx=256, threads=1) as ctx:
        ctx.decode(TOKENS)
        before = ctx.trace()
        ctx.clear()
        ctx.adapt({vector: 1.0})
        ctx.decode(TOKENS)
        after = ctx.trace()
    assert before.hidden is not None
    assert after.hidden is not None
    assert not np.allclose(before.hidden[-1], after.hidden[-1])


def test_what_cannot_be_traced_is_refused(zoo_path: ZooPath) -> None:
    with Model(zoo_path("llama")).context(n_ctx=256, threads=1) as ctx:
        with pytest.raises(InvalidInputError, match="empty"):
            ctx.trace()
        ctx.decode(TOKENS)
        with pytest.raises(InvalidInputError, match="what is any of hidden, attention, ffn, router"):
            ctx.trace(what="heads")
        with pytest.raises(InvalidInputError, match="layers is a whole number from 0 to 2, got 3"):
            ctx.trace(layers=[3])
        with pytest.raises(InvalidInputError, match="no router"):
            ctx.trace(what="router").expert_counts()
    with ToyModel().context(n_ctx=64) as toy:
        toy.decode([1, 2])
        with pytest.raises(InvalidInputError, match="no layers"):
            toy.trace()
