"""Encoders: vectors of BERT, nomic-bert and ModernBERT, and the scores of a reranker."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import perdure
from inside import weights_of
from perdure import InvalidInputError, Model, Pooling, TokenError
from perdure.engine.contract import PairForm
from perdure.engine.llama.native import library
from perdure.engine.llama.native.declarations import LlamaBatch
from perdure.testing.toy import ToyModel
from server.live_server import live_server
from zoo import Recipe, encoders
from zoo.sheet import Sheet

TEXT = list(range(40, 100))


def written(folder: Path, architecture: str, fill: Callable[[Sheet, int], None]) -> Path:
    return Recipe(name="made", architecture=architecture, memory="full", fill=fill).write(folder)


@pytest.fixture
def ranker(tmp_path: Path) -> Path:
    return written(tmp_path, "bert", encoders.bert_ranker)


def by_library(path: Path, tokens: list[int], pooling: int, width: int) -> np.ndarray:
    """What the library itself pools."""
    lib = library.load()
    with Model(path) as model:
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = params.n_outputs_max = 256
        params.n_threads = params.n_threads_batch = 1
        params.embeddings, params.pooling_type, params.flash_attn_type = True, pooling, 1
        context = lib.llama_init_from_model(weights_of(model).handle, params)
        assert lib.llama_decode(context, LlamaBatch.of((ctypes.c_int32 * len(tokens))(*tokens))) == 0
        row = np.ctypeslib.as_array(lib.llama_get_embeddings_seq(context, 0), (width,)).astype(np.float64)
        lib.llama_free(context)
    return row


@pytest.mark.parametrize(
    ("architecture", "fill", "pooling"),
    [
        ("bert", encoders.bert, 1),
        ("nomic-bert", encoders.nomic_bert, 1),
        ("modern-bert", encoders.modern_bert, 2),
    ],
)
def test_an_encoders_vector_is_what_the_library_pools(
    architecture: str, fill: Callable[[Sheet, int], None], pooling: int, tmp_path: Path
) -> None:
    path = written(tmp_path, architecture, fill)
    expected = by_library(path, TEXT, pooling, 64)
    with Model(path) as model, model.embedder(n_ctx=256, threads=1) as found:
        vector = found.embed(TEXT)
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-4)
        # The first token's state depends on the last one: it looks both ways.
        assert not np.allclose(found.embed([*TEXT[:-1], 200]), vector, atol=1e-3)


@pytest.mark.extension("weights")
def test_a_score_is_that_of_the_two_last_layers(ranker: Path) -> None:
    """NumPy over the first token's state and the file's own tensors."""
    from perdure.ext.weights.tensors import TensorFile

    first = by_library(ranker, TEXT, 2, 64)
    with TensorFile(ranker) as file:
        weight, bias, out, shift = (
            file.floats(file.tensors[name]).astype(np.float64)
            for name in ("cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias")
        )
    expected = out[0] @ np.tanh(weight @ first + bias[0]) + shift[0, 0]
    with Model(ranker) as model, model.embedder(n_ctx=256, threads=1) as found:
        assert found.pooling is Pooling.SCORE
        assert found.width == 1
        (score,) = found.embed(TEXT)
        assert score == pytest.approx(expected, abs=0.02)
        assert found.embed(TEXT).tobytes() == np.float32(score).tobytes()


@pytest.mark.extension("embeddings")
def test_a_reranker_ranks_and_has_no_vectors(ranker: Path) -> None:
    documents = ["the sea is blue", "a mountain", "ships sail"]
    with perdure.open(ranker, n_ctx=256, slots=1, threads=1) as runtime:
        ranked = runtime.rank("the sea", documents)
        assert sorted(each.index for each in ranked) == [0, 1, 2]
        scores = [each.score for each in ranked]
        assert scores == sorted(scores, reverse=True)
        # Each pair is read alone.
        alone = {each.index: runtime.rank("the sea", [documents[each.index]])[0].score for each in ranked}
        assert alone == {each.index: each.score for each in ranked}
        with pytest.raises(InvalidInputError, match="scores pairs"):
            runtime.embed("the sea")
        with pytest.raises(InvalidInputError, match="list of documents"):
            runtime.rank("the sea", [])
        with pytest.raises(TokenError, match="text 1 is empty"):
            runtime.rank("the sea", [""])
        with live_server(runtime) as server, server.client() as client:
            body = {"query": "the sea", "documents": documents}
            found = client.post("/v1/rerank", json=body).json()
            assert [each["index"] for each in found["results"]] == [each.index for each in ranked]
            assert [each["relevance_score"] for each in found["results"]] == scores
            refused = client.post("/v1/embeddings", json={"input": "the sea"})
            assert refused.status_code == 400
            assert "scores pairs" in refused.json()["error"]["message"]


@pytest.mark.extension("embeddings")
def test_another_model_ranks_by_its_vectors() -> None:
    with perdure.open(ToyModel(), n_ctx=256) as runtime:
        best, *_ = runtime.rank("the sea", ["a mountain", "the sea", "ships"])
        assert best.index == 1
        assert best.score == pytest.approx(1.0, abs=1e-5)


def test_a_pair_is_put_together_by_marks_or_by_a_template() -> None:
    """What is written in a query is text, never a mark."""
    model = ToyModel()
    ask, answer = model.tokenize("Why?", bos=False), model.tokenize("<|im_end|>", bos=False)
    marks = PairForm(before=(1,), between=(2, 3), after=(2,))
    assert marks.tokens(model, "Why?", "<|im_end|>") == [1, *ask, 2, 3, *answer, 2]
    form = PairForm(template="<|im_start|>{query}\n{document}<|im_end|>")
    start, end = (model.tokenize(text, special=True, bos=False) for text in ("<|im_start|>", "<|im_end|>"))
    line = model.tokenize("\n", bos=False)
    assert form.tokens(model, "Why?", "<|im_end|>") == [*start, *ask, *line, *answer, *end]
    assert answer != end
