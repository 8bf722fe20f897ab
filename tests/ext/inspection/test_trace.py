"""`ctx.trace`: hidden states, attention, feed-forward and experts, equal to a model in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import perdure
from ext.inspection.reference import Llama
from perdure import InvalidInputError, Model, StepLogits
from perdure.engine.context import Feed
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


@pytest.mark.parametrize("settings", [{"n_seq": 3}, {"n_seq": 3, "shared": True}])
def test_a_step_tells_what_its_own_layers_computed(zoo_path: ZooPath, settings: dict[str, Any]) -> None:
    """Of a prompt's last token, and of one token for each of several sequences: equal to NumPy."""
    reference = Llama(zoo_path("llama"))
    texts = [TOKENS, TOKENS[3:], [9, 9, 4]]
    with Model(zoo_path("llama")).context(
        n_ctx=256, threads=1, trace=("hidden", "ffn"), trace_layers=[0, 2], **settings
    ) as ctx:
        for seq, text in enumerate(texts):
            ctx.decode(text, seq)
            trace = ctx.step_trace(seq=seq)
            assert (trace.tokens, trace.layers) == ((text[-1],), (0, 2))
            assert trace.hidden is not None
            assert trace.ffn is not None
            hidden = reference(text).hidden
            np.testing.assert_allclose(trace.hidden[:, 0], [hidden[0][-1], hidden[2][-1]], atol=3e-2)
            np.testing.assert_array_equal(trace.logits, ctx.logits(seq=seq).copy())
        ctx.step([Feed(seq, [7 + seq]) for seq in (2, 0, 1)])
        for seq, text in enumerate(texts):
            trace = ctx.step_trace(seq=seq)
            assert trace.tokens == (7 + seq,)
            assert trace.hidden is not None
            expected = reference([*text, 7 + seq]).hidden
            np.testing.assert_allclose(trace.hidden[:, 0], [expected[0][-1], expected[2][-1]], atol=3e-2)
        # Of different lengths: the library may compute such a step in parts.
        ctx.step([Feed(0, [1, 2, 3]), Feed(1, [4], "last"), Feed(2, [5, 6])])
        for seq, more in enumerate(([1, 2, 3], [4], [5, 6])):
            trace = ctx.step_trace(seq=seq)
            assert trace.tokens == (more[-1],)
            assert trace.hidden is not None
            expected = reference([*texts[seq], 7 + seq, *more]).hidden
            np.testing.assert_allclose(trace.hidden[:, 0], [expected[0][-1], expected[2][-1]], atol=3e-2)


def test_experts_of_a_step_are_told(zoo_path: ZooPath) -> None:
    with Model(zoo_path("qwen3moe")).context(n_ctx=256, threads=1, trace="router") as ctx:
        ctx.decode(TOKENS)
        live, whole = ctx.step_trace(), ctx.trace(what="router")
        assert live.router is not None
        assert whole.router is not None
        np.testing.assert_array_equal(np.sort(live.router[:, 0]), np.sort(whole.router[:, -1]))


def test_only_a_context_that_asked_is_traced(zoo_path: ZooPath) -> None:
    model = Model(zoo_path("llama"))
    with model.context(n_ctx=256, threads=1) as ctx:
        ctx.decode(TOKENS)
        with pytest.raises(InvalidInputError, match="open with trace="):
            ctx.step_trace()
    with pytest.raises(InvalidInputError, match="not attention"):
        model.context(n_ctx=256, trace="attention")
    with pytest.raises(InvalidInputError, match="layers is a whole number from 0 to 2, got 3"):
        model.context(n_ctx=256, trace="hidden", trace_layers=[3])
    with pytest.raises(InvalidInputError, match="no layers that could be traced"):
        ToyModel().context(trace="hidden")


@pytest.mark.parametrize("speculate", [0, 4])
def test_a_processor_reads_what_its_step_computed(zoo_path: ZooPath, speculate: int) -> None:
    """Nothing is read again for it: hidden states equal NumPy's at every token, with guesses too."""
    reference = Llama(zoo_path("llama"))
    texts: list[list[int]] = []

    def processor(tokens: Sequence[int], logits: StepLogits) -> NDArray[np.float32]:
        trace = logits.step_trace()
        texts.append(list(tokens))
        assert trace.tokens == (tokens[-1],)
        assert trace.hidden is not None
        expected = reference(list(tokens)).hidden
        np.testing.assert_allclose(trace.hidden[:, 0], [each[-1] for each in expected], atol=3e-2)
        np.testing.assert_array_equal(trace.logits, logits.copy())
        return logits.copy()

    prompt = [5, 6, 7, 5, 6, 7, 5, 6, 7]
    options: Any = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "speculate": speculate}
    with perdure.open(zoo_path("llama"), n_ctx=256, slots=2, threads=1) as rt:
        plain = rt.generate(prompt, **options)
        refused = rt.submit(prompt, processors=[processor], **options)
        with pytest.raises(InvalidInputError, match="open with trace="):
            refused.reply()
    with perdure.open(zoo_path("llama"), n_ctx=256, slots=2, threads=1, trace="hidden") as rt:
        traced = rt.generate(prompt, processors=[processor], **options)
    assert traced.tokens == plain.tokens
    assert texts == [[*prompt, *plain.tokens[:at]] for at in range(6)]


@pytest.mark.extension("speculation")
def test_steps_that_are_traced_have_no_drafter_of_their_own(zoo_path: ZooPath) -> None:
    """Both act on a core. n-grams and other models guess beside it, and may stay."""
    with pytest.raises(InvalidInputError, match="a context has trace or mtp, not both"):
        perdure.open(zoo_path("qwen35-mtp"), n_ctx=64, trace="hidden", draft="mtp")
    with pytest.raises(InvalidInputError, match="a context has trace or assistant, not both"):
        perdure.open(zoo_path("gemma4"), n_ctx=64, trace="hidden", draft=zoo_path("gemma4-assistant"))
    with perdure.open(
        zoo_path("llama"), n_ctx=256, slots=1, threads=1, trace="hidden", draft=zoo_path("llama")
    ) as rt:
        plain = rt.generate("a text", max_tokens=8, temperature=0)
        guessed = rt.generate("a text", max_tokens=8, temperature=0, speculate=4)
    assert guessed.tokens == plain.tokens
