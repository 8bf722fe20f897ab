"""Texts as vectors, on the toy engine and on llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure import (
    ClosedError,
    ContextOverflow,
    DecodeError,
    Embedder,
    InvalidInputError,
    Model,
    Pooling,
    TokenError,
)
from perdure.engine.embedder import CHUNK
from perdure.engine.llama.native import declarations, library
from perdure.testing.toy import Faults, ToyModel
from perdure.testing.toy.faults import PlannedFault
from subjects import Row, Subject
from zoo import Recipe, attention
from zoo.sheet import Sheet

LENGTHS = [1, 5, CHUNK, CHUNK + 1, 3 * CHUNK + 7]


@contextmanager
def embedder(subject: Subject, n_ctx: int = 256) -> Iterator[Embedder]:
    with subject.model.embedder(n_ctx=n_ctx, threads=1) as found:
        yield found


def reference(path: Path, tokens: list[int], pooling: int) -> Row:
    """What the bare library gives for a text that it reads in one step and pools itself."""
    llama = library.load()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 1
    params.embeddings, params.pooling_type, params.flash_attn_type = True, pooling, 1
    context = llama.llama_init_from_model(model, params)
    try:
        ids = (declarations.Token * len(tokens))(*tokens)
        assert llama.llama_decode(context, declarations.LlamaBatch.of(ids)) == 0
        width = llama.llama_model_n_embd_out(model)
        row = np.ctypeslib.as_array(llama.llama_get_embeddings_seq(context, 0), (width,)).astype(np.float64)
        unit: Row = (row / np.linalg.norm(row)).astype(np.float32)
        return unit
    finally:
        llama.llama_free(context)
        llama.llama_model_free(model)


def written(folder: Path, architecture: str, fill: Callable[[Sheet, int], None], **more: Any) -> Path:
    def filled(sheet: Sheet, vocabulary: int) -> None:
        fill(sheet, vocabulary)
        sheet.set(**more)

    return Recipe(name="made", architecture=architecture, memory="full", fill=filled).write(folder)


# What a vector is.


def test_a_vector_has_length_one_whatever_the_length_of_the_text(subject: Subject) -> None:
    with embedder(subject) as found:
        vectors = [found.embed(subject.tokens(length)) for length in LENGTHS]
        for vector in vectors:
            assert vector.dtype == np.float32
            assert vector.shape == (found.width,)
            assert np.linalg.norm(vector.astype(np.float64)) == pytest.approx(1, abs=1e-6)
        assert len({vector.tobytes() for vector in vectors}) == len(vectors)


def test_the_same_text_has_the_same_bits_before_and_after_others(subject: Subject) -> None:
    texts = [subject.tokens(length, seed=length) for length in LENGTHS]
    with embedder(subject) as found:
        first = [found.embed(text).tobytes() for text in texts]
        assert [found.embed(text).tobytes() for text in reversed(texts)] == first[::-1]
    for text, expected in zip(texts, first, strict=True):
        with embedder(subject) as fresh:
            assert fresh.embed(text).tobytes() == expected


def test_a_text_that_was_left_in_the_middle_leaves_nothing(subject: Subject) -> None:
    text = subject.tokens(CHUNK + 9)
    with embedder(subject) as found:
        expected = found.embed(text)
        left = found.begin(subject.tokens(3 * CHUNK, seed=1))
        assert found.step(left) is None
        assert found.embed(text).tobytes() == expected.tobytes()
        with pytest.raises(InvalidInputError, match="another text"):
            found.step(left)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3moe", "deepseek2", "gemma3", "mamba", "jamba"])
def test_the_vector_is_what_the_library_pools(
    name: str, find_subject: Callable[[str], Subject], zoo_path: Callable[[str], Path]
) -> None:
    subject = find_subject(name)
    with embedder(subject) as found:
        for length in (1, 17, CHUNK):
            text = subject.tokens(length)
            expected = reference(zoo_path(name), text, pooling=1)
            np.testing.assert_allclose(found.embed(text), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
def test_chunks_change_no_more_than_rounding_does(
    name: str, find_subject: Callable[[str], Subject], zoo_path: Callable[[str], Path]
) -> None:
    subject = find_subject(name)
    text = subject.tokens(3 * CHUNK + 7)
    with embedder(subject) as found:
        np.testing.assert_allclose(found.embed(text), reference(zoo_path(name), text, pooling=1), atol=2e-3)


@pytest.mark.model
def test_the_default_model_gives_what_the_library_pools() -> None:
    with Model() as model, model.embedder(n_ctx=256) as found:
        text = model.tokenize("A cat sleeps.")
        np.testing.assert_allclose(found.embed(text), reference(model.path, text, pooling=1), atol=1e-5)


# As the file says.


@pytest.mark.parametrize(
    ("named", "pooling"), [(0, Pooling.MEAN), (1, Pooling.MEAN), (2, Pooling.FIRST), (3, Pooling.LAST)]
)
def test_a_text_is_pooled_as_the_file_says(tmp_path: Path, named: int, pooling: Pooling) -> None:
    path = written(tmp_path, "llama", attention.llama, pooling_type=named)
    text = list(range(40, 90))
    with Model(path) as model, model.embedder(n_ctx=256, threads=1) as found:
        assert found.pooling is pooling
        np.testing.assert_allclose(found.embed(text), reference(path, text, named or 1), atol=1e-5)
        # Also where the last token is in another chunk than the first.
        long = found.embed(text * 2)
        assert np.linalg.norm(long) == pytest.approx(1, abs=1e-6)
        if pooling is Pooling.FIRST:
            np.testing.assert_allclose(long, found.embed(text), atol=1e-5)


@pytest.mark.parametrize("named", [4, 9])
def test_a_model_that_ranks_is_refused(tmp_path: Path, named: int) -> None:
    path = written(tmp_path, "llama", attention.llama, pooling_type=named)
    with Model(path) as model, pytest.raises(InvalidInputError, match=f"pooling type {named}"):
        model.embedder()


def test_a_model_that_looks_ahead_reads_a_text_in_one_step(tmp_path: Path) -> None:
    path = written(tmp_path, "gemma-embedding", attention.gemma3, pooling_type=1)
    text = list(range(40, 240))
    with Model(path) as model, model.embedder(n_ctx=256, threads=1) as found:
        vector = found.embed(text)
        np.testing.assert_allclose(vector, reference(path, text, pooling=1), atol=1e-5)
        assert found.embed(text).tobytes() == vector.tobytes()
        with pytest.raises(ContextOverflow):
            found.embed(text * 2)
    with Model(path) as model, model.embedder(n_ctx=1 << 16, threads=1) as found:
        assert found.n_ctx == model.n_ctx_train


def test_a_model_that_looks_ahead_writes_nothing(tmp_path: Path) -> None:
    """The library would end the process over it."""
    path = written(tmp_path, "gemma-embedding", attention.gemma3)
    with Model(path) as model, model.context(n_ctx=256, threads=1) as ctx:
        for count in (1, 200):
            with pytest.raises(InvalidInputError, match="writes none"):
                ctx.decode(list(range(30, 30 + count)))
        ctx.prepare()


# What is wrong is told before anything is computed.


@pytest.mark.parametrize(
    "bad", [[], [-1], [10**6], [2**40], [[1, 2]], [[1], [2, 3]], [1.5], [True], "text", ["a"], 7, None]
)
def test_what_is_no_text_is_refused(subject: Subject, bad: Any) -> None:
    with embedder(subject) as found, pytest.raises(TokenError):
        found.embed(bad)


def test_a_text_that_is_too_long_is_refused_with_its_numbers(subject: Subject) -> None:
    with embedder(subject, n_ctx=100) as found:
        found.embed(subject.tokens(100))
        with pytest.raises(ContextOverflow, match="101 tokens, 100 fit") as refused:
            found.embed(subject.tokens(101))
        assert (refused.value.needed, refused.value.fits) == (101, 100)


@pytest.mark.parametrize("settings", [{"n_ctx": 0}, {"n_ctx": True}, {"n_ctx": 2.0}])
def test_settings_that_make_no_sense_are_refused(subject: Subject, settings: Any) -> None:
    with pytest.raises(InvalidInputError):
        subject.model.embedder(**settings)


def test_a_closed_embedder_says_so_and_may_outlive_its_model(zoo_path: Callable[[str], Path]) -> None:
    model = Model(zoo_path("llama"))
    found = model.embedder(n_ctx=256, threads=1)
    model.close()
    found.embed([40])
    found.close()
    found.close()
    assert found.closed
    with pytest.raises(ClosedError):
        found.embed([40])
    with pytest.raises(ClosedError):
        model.embedder()


def test_a_step_that_fails_costs_one_text() -> None:
    model = ToyModel(faults=Faults(decodes={2: PlannedFault()}))
    with model.embedder(n_ctx=256) as found:
        expected = found.embed([65] * CHUNK)
        with pytest.raises(DecodeError):
            found.embed([65] * CHUNK)
        assert found.embed([65] * CHUNK).tobytes() == expected.tobytes()
