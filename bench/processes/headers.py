"""Model files written for measuring: a vocabulary of 262k tokens to decode with, and a large header."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

from bench.child import ROOT

VOCABULARY = 150_000


def wide_model(folder: Path) -> str:
    """The tests' toy model with 262k tokens."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        zoo = importlib.import_module("zoo")
    finally:
        sys.path.remove(str(ROOT / "tests"))
    return str(zoo.write("llama-wide", folder))


def large_vocabulary(folder: Path, *, merges: bool) -> Path:
    """A header like that of a current model: tokens, types and merges, of uneven lengths as in life."""
    random = np.random.default_rng(150)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
    lengths = random.geometric(0.18, VOCABULARY) + 1
    text = random.choice(letters, int(lengths.sum())).tobytes().decode()
    ends = np.cumsum(lengths)
    words = [text[end - size : end] for end, size in zip(ends.tolist(), lengths.tolist(), strict=True)]
    path = folder / "vocabulary.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"{word}{index}" for index, word in enumerate(words)])
    writer.add_token_types([int(TokenType.NORMAL)] * VOCABULARY)
    if merges:
        writer.add_token_merges([f"{word[:2]} {word[2:]}" for word in words])
    writer.add_tensor("token_embd.weight", np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
