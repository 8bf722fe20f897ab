"""A folder of a BERT encoder as a GGUF file: the vectors are those that its weights say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tools.bert_gguf import write

import perdure

WIDTH, INNER, HEADS, LAYERS, PLACES = 32, 64, 2, 2, 64
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", *(f"##{each}" for each in "abcdefghij")]
CONFIG = {
    "model_type": "bert",
    "max_position_embeddings": PLACES,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
}
Weights = dict[str, NDArray[np.float32]]


def made(folder: Path) -> Weights:
    """A small encoder of random weights, written as a folder."""
    dice = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(WORDS), WIDTH),
        "embeddings.position_embeddings.weight": (PLACES, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "pooler.dense.weight": (WIDTH, WIDTH),
        "pooler.dense.bias": (WIDTH,),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        part = f"encoder.layer.{layer}"
        norms += [f"{part}.attention.output.LayerNorm", f"{part}.output.LayerNorm"]
        for name, tall, wide in (
            *((f"attention.self.{each}", WIDTH, WIDTH) for each in ("query", "key", "value")),
            ("attention.output.dense", WIDTH, WIDTH),
            ("intermediate.dense", INNER, WIDTH),
            ("output.dense", WIDTH, INNER),
        ):
            shapes |= {f"{part}.{name}.weight": (tall, wide), f"{part}.{name}.bias": (tall,)}
    shapes |= {f"{name}.{half}": (WIDTH,) for name in norms for half in ("weight", "bias")}
    weights = {name: (dice.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return weights


def vector(weights: Weights, tokens: list[int]) -> NDArray[np.float64]:
    """The mean of the last layer, as the paper has it."""

    def linear(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    count, size = len(tokens), WIDTH // HEADS
    x = weights["embeddings.word_embeddings.weight"][tokens].astype(np.float64)
    x += weights["embeddings.position_embeddings.weight"][:count]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in range(LAYERS):
        part = f"encoder.layer.{layer}"
        query, key, value = (
            linear(x, f"{part}.attention.self.{each}").reshape(count, HEADS, size).transpose(1, 0, 2)
            for each in ("query", "key", "value")
        )
        scores = np.exp(query @ key.transpose(0, 2, 1) / math.sqrt(size))
        seen = (scores / scores.sum(-1, keepdims=True) @ value).transpose(1, 0, 2).reshape(count, WIDTH)
        x = norm(x + linear(seen, f"{part}.attention.output.dense"), f"{part}.attention.output.LayerNorm")
        inner = linear(x, f"{part}.intermediate.dense")
        inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
        x = norm(x + linear(inner, f"{part}.output.dense"), f"{part}.output.LayerNorm")
    mean: NDArray[np.float64] = x.mean(0)
    return mean / np.linalg.norm(mean)


def test_the_vectors_are_those_of_the_weights(tmp_path: Path) -> None:
    weights = made(tmp_path)
    write(tmp_path, tmp_path / "made.gguf")
    with perdure.open(tmp_path / "made.gguf", n_ctx=64, slots=1, threads=1) as rt:
        # A word, and one that is cut into three.
        assert rt.model.tokenize("a bcd") == [2, 5, 6, 17, 18, 3]
        for tokens in ([2, 5, 3], [2, 5, 6, 17, 18, 3], [2, *range(5, 25), 3]):
            cosine = float(rt.embed(tokens).vectors[0] @ vector(weights, tokens))
            assert cosine == pytest.approx(1, abs=1e-4)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "t5"}))
    with pytest.raises(ValueError, match="t5"):
        write(tmp_path, tmp_path / "made.gguf")
    assert not (tmp_path / "made.gguf").exists()
