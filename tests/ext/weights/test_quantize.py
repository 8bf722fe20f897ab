"""Quantised files and importance matrices: llama.cpp's own bytes, from a child that may be ended."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from perdure import Model
from perdure.engine.llama.native import library
from perdure.errors import EngineError, InvalidInputError, ModelFileError, ModelNotFoundError
from perdure.ext.weights import quantize as module
from perdure.ext.weights.compare import compare
from perdure.ext.weights.quantize import importance_matrix, quantize, read_importance, run_child
from perdure.ext.weights.structures import Override
from perdure.ext.weights.tensors import TensorFile
from perdure.models import read_header

ZooPath = Callable[[str], Path]
TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 60


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def by_library(source: Path, target: Path, kind: str, texts: dict[str, str] | None = None) -> bytes:
    """What the library writes when it is called by hand, in this process."""
    lib = library.load()
    params = lib.llama_model_quantize_default_params()
    params.ftype = module.TYPES[kind]
    overrides = (Override * (len(texts or {}) + 1))()
    for override, (key, value) in zip(overrides, (texts or {}).items(), strict=False):
        override.tag, override.key, override.text = Override.TEXT, key.encode(), value.encode()
    if texts:
        params.kv_overrides = ctypes.addressof(overrides)
    assert lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)) == 0
    return target.read_bytes()


@pytest.mark.parametrize(("name", "kind"), [("llama", "Q8_0"), ("qwen3moe", "Q4_K_M")])
def test_the_file_is_the_librarys_byte_for_byte(
    name: str, kind: str, zoo_path: ZooPath, tmp_path: Path
) -> None:
    source = zoo_path(name)
    quantize(source, tmp_path / "ours.gguf", kind, provenance=False, threads=1)
    assert (tmp_path / "ours.gguf").read_bytes() == by_library(source, tmp_path / "theirs.gguf", kind)


def test_provenance_is_all_that_is_added(zoo_path: ZooPath, tmp_path: Path) -> None:
    """The same keys, given to the library by hand, make the same bytes; the tensors are the same without."""
    source, ours = zoo_path("llama"), tmp_path / "ours.gguf"
    quantize(source, ours, "q4_k_m", threads=1)
    texts = {key: str(value) for key, value in read_header(ours).metadata.items() if key[:8] == "perdure."}
    assert texts["perdure.quantize.type"] == "Q4_K_M"
    assert texts["perdure.quantize.source"] == "llama.gguf"
    assert len(texts["perdure.quantize.source_sha256"]) == 64
    assert ours.read_bytes() == by_library(source, tmp_path / "theirs.gguf", "Q4_K_M", texts)
    by_library(source, tmp_path / "plain.gguf", "Q4_K_M")
    found = compare(ours, tmp_path / "plain.gguf")
    assert found.same_tensors
    assert set(found.metadata) == set(texts)


def test_a_quantised_model_can_be_used_and_is_near_the_first(zoo_path: ZooPath, tmp_path: Path) -> None:
    quantize(zoo_path("llama"), tmp_path / "q8.gguf", "Q8_0", threads=1)
    rows = []
    for path in (zoo_path("llama"), tmp_path / "q8.gguf"):
        with Model(path) as model, model.context(n_ctx=64, threads=1) as context:
            context.decode([1, 2, 3, 4])
            rows.append(np.array(context.logits()))
    assert 0.0 < np.abs(rows[0] - rows[1]).max() < 0.5


def test_progress_counts_the_tensors(zoo_path: ZooPath, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    made = quantize(
        zoo_path("llama"),
        tmp_path / "out.gguf",
        "Q8_0",
        threads=1,
        progress=lambda done, of: seen.append((done, of)),
    )
    assert seen == [(number, made.tensors) for number in range(1, made.tensors + 1)]
    assert made.bytes_after == (tmp_path / "out.gguf").stat().st_size < made.bytes_before


def test_an_importance_matrix_is_the_mean_square_of_what_weights_are_given(
    zoo_path: ZooPath, tmp_path: Path, text: Path
) -> None:
    """The first layer's input is the embedding, normed: NumPy computes the same."""
    source = zoo_path("llama")
    facts = importance_matrix(source, [text], tmp_path / "im.gguf", chunk=64, chunks=3, threads=1)
    assert facts == {"chunks": 3, "tokens": 192, "tensors": 3 * 7 + 1}
    matrix = read_importance(tmp_path / "im.gguf")
    with Model(source) as model, TensorFile(source) as file:
        tokens = model.tokenize(TEXT)[:192]
        embedding = file.floats(file.tensors["token_embd.weight"])[tokens].astype(np.float64)
        norm = file.floats(file.tensors["blk.0.attn_norm.weight"])[0]
    rows = embedding / np.sqrt(np.square(embedding).mean(axis=1, keepdims=True) + 1e-5) * norm
    expected = np.square(rows).mean(axis=0)
    for part in ("attn_q", "attn_k", "attn_v"):
        np.testing.assert_allclose(matrix[f"blk.0.{part}.weight"], expected, rtol=1e-3)
    # The last layer sees all tokens too, not only the one whose logits a reply would need.
    assert "output.weight" in matrix
    assert "blk.2.ffn_down.weight" in matrix


def test_the_experts_of_a_mixture_are_counted_each(zoo_path: ZooPath, tmp_path: Path, text: Path) -> None:
    importance_matrix(zoo_path("qwen3moe"), [text], tmp_path / "im.gguf", chunk=64, chunks=2, threads=1)
    with TensorFile(tmp_path / "im.gguf") as file:
        counts = file.floats(file.tensors["blk.0.ffn_down_exps.weight.counts"])[:, 0]
        assert len(counts) == 8
        assert counts.sum() == 128 * 4
        sums = file.floats(file.tensors["blk.0.ffn_gate_exps.weight.in_sum2"]).sum(axis=0)
        router = file.floats(file.tensors["blk.0.ffn_gate_inp.weight.in_sum2"])[0]
    # Each token goes to four experts, with the input that the router had.
    np.testing.assert_allclose(sums, 4 * router, rtol=1e-4)


def test_an_importance_matrix_changes_the_file_as_the_library_does_it(
    zoo_path: ZooPath, tmp_path: Path, text: Path
) -> None:
    source = zoo_path("llama")
    importance_matrix(source, [text], tmp_path / "im.gguf", chunk=64, chunks=2, threads=1)
    # The smallest type of 32 numbers that weighs its columns.
    quantize(source, tmp_path / "with.gguf", "IQ4_NL", importance=tmp_path / "im.gguf", threads=1)
    quantize(source, tmp_path / "without.gguf", "IQ4_NL", threads=1)
    found = compare(tmp_path / "with.gguf", tmp_path / "without.gguf")
    changed = {each.name for each in found.tensors if not each.same_bytes}
    assert {"blk.0.attn_q.weight", "blk.2.ffn_down.weight"} <= changed
    assert "perdure.quantize.importance_sha256" in found.metadata


def test_what_cannot_be_done_is_said_before_anything_is_written(
    zoo_path: ZooPath, tmp_path: Path, text: Path
) -> None:
    source, target = zoo_path("llama"), tmp_path / "out.gguf"
    with pytest.raises(InvalidInputError, match="there is no quantisation 'Q9'"):
        quantize(source, target, "Q9")
    with pytest.raises(ModelNotFoundError):
        quantize(tmp_path / "none.gguf", target, "Q8_0")
    with pytest.raises(InvalidInputError, match="no folder"):
        quantize(source, tmp_path / "none" / "out.gguf", "Q8_0")
    with pytest.raises(ModelFileError, match="no importance matrix"):
        quantize(source, target, "Q8_0", importance=source, threads=1)
    with pytest.raises(InvalidInputError, match="one chunk has 65536"):
        importance_matrix(source, [text], target, chunk=65536, threads=1)
    quantize(source, target, "Q8_0", threads=1)
    with pytest.raises(InvalidInputError, match=r"quantised already \(Q8_0\)"):
        quantize(target, tmp_path / "again.gguf", "Q4_0")
    with pytest.raises(InvalidInputError, match="the file to read from"):
        quantize(target, target, "Q4_0", requantize=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "text.txt"]


def test_a_child_that_dies_or_is_left_leaves_no_file(tmp_path: Path, zoo_path: ZooPath) -> None:
    target = tmp_path / "out.gguf"
    with pytest.raises(EngineError, match="exit code 1"):
        run_child({"task": "quantize", "source": "x"}, target, None)

    def leave(done: int, of: int) -> None:
        raise KeyboardInterrupt

    target.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        quantize(zoo_path("llama"), target, "Q8_0", threads=1, progress=leave)
    assert target.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
