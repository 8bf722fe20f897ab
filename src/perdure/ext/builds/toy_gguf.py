"""Tiny GGUF models with random weights, one a tensor type, for the probe of a library."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH = 256
"""The smallest width that every tensor type can have."""
_HEADS = 4
_WORDS = ["th", "the"]
_ALIGNMENT = 32

# A type's number in GGUF, the values and bytes of a block, and where its 16-bit scales lie in a block.
_TYPES: dict[str, tuple[int, int, int, dict[int, float]]] = {
    "f32": (0, 1, 4, {}),
    "f16": (1, 1, 2, {}),
    "q8_0": (8, 32, 34, {0: 4e-4}),
    "q4_0": (2, 32, 18, {0: 6e-3}),
    "q4_1": (3, 32, 20, {0: 6e-3, 2: -0.05}),
    "q4_K": (12, 256, 144, {0: 2e-4, 2: 1e-3}),
    "q6_K": (14, 256, 210, {208: 3e-5}),
}
TYPES = tuple(_TYPES)


def write(path: Path, kind: str) -> None:
    """Write a llama model of one layer whose matrices are of type `kind`. The same each time."""
    generator = np.random.default_rng(len(kind))
    tokens = [*bytes_as_text(), *_WORDS]
    fields: list[tuple[str, Any]] = [
        ("general.architecture", "llama"),
        ("llama.block_count", 1),
        ("llama.context_length", 512),
        ("llama.embedding_length", WIDTH),
        ("llama.feed_forward_length", WIDTH),
        ("llama.attention.head_count", _HEADS),
        ("llama.attention.head_count_kv", _HEADS),
        ("llama.attention.layer_norm_rms_epsilon", 1e-5),
        ("llama.rope.dimension_count", WIDTH // _HEADS),
        ("tokenizer.ggml.model", "gpt2"),
        # One of those that the library splits with std::regex.
        ("tokenizer.ggml.pre", "falcon"),
        ("tokenizer.ggml.tokens", tokens),
        ("tokenizer.ggml.token_type", [1] * len(tokens)),
        ("tokenizer.ggml.merges", ["t h", "th e"]),
        ("tokenizer.ggml.eos_token_id", 0),
    ]
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors = [("token_embd.weight", len(tokens), kind), ("output.weight", len(tokens), kind)]
    tensors += [(f"blk.0.{name}.weight", WIDTH, kind) for name in square]
    tensors += [(f"{name}.weight", 0, "f32") for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")]
    head, data = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields))), bytearray()
    for key, value in fields:
        head += _text(key) + _value(value)
    for name, rows, type_name in tensors:
        shape = (WIDTH, rows) if rows else (WIDTH,)
        head += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", _TYPES[type_name][0], len(data))
        data += _blocks(generator, type_name, rows) if rows else np.ones(WIDTH, np.float32).tobytes()
        data += bytes(-len(data) % _ALIGNMENT)
    path.write_bytes(head + bytes(-len(head) % _ALIGNMENT) + data)


def _blocks(generator: np.random.Generator, kind: str, rows: int) -> bytes:
    """`rows` rows of random blocks: any bits are a valid block as long as its scales are sane."""
    _, values, size, scales = _TYPES[kind]
    count = rows * WIDTH // values
    if not scales:
        numbers = generator.normal(0, 0.05, count)
        return numbers.astype(np.float32 if size == 4 else np.float16).tobytes()
    blocks: NDArray[np.uint8] = generator.integers(0, 256, (count, size), np.uint8)
    for offset, scale in scales.items():
        drawn = (scale * generator.uniform(0.5, 1.5, count)).astype(np.float16)
        blocks[:, offset : offset + 2] = drawn.view(np.uint8).reshape(count, 2)
    return blocks.tobytes()


def _value(value: Any) -> bytes:
    match value:
        case str():
            return struct.pack("<I", 8) + _text(value)
        case float():
            return struct.pack("<If", 6, value)
        case int():
            return struct.pack("<II", 4, value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        case _:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def bytes_as_text() -> list[str]:
    """The 256 bytes as the letters that GPT-2's vocabularies write for them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]
