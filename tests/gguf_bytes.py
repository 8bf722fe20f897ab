"""GGUF files written byte by byte, so that a test can get any byte of them wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", U64: "Q", I64: "q", F64: "d"}
_CODES[BOOL] = "?"


def string(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, raw: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + raw


def text(key: str, value: str | bytes) -> bytes:
    return pair(key, STRING, string(value))


def number(key: str, kind: int, value: float) -> bytes:
    return pair(key, kind, struct.pack("<" + _CODES[kind], value))


def u32(key: str, value: int) -> bytes:
    return number(key, U32, value)


def array(key: str, kind: int, raw: bytes, count: int) -> bytes:
    return pair(key, ARRAY, struct.pack("<IQ", kind, count) + raw)


def numbers(key: str, kind: int, values: Sequence[float]) -> bytes:
    return array(key, kind, struct.pack(f"<{len(values)}{_CODES[kind]}", *values), len(values))


def strings(key: str, values: Sequence[str | bytes]) -> bytes:
    return array(key, STRING, b"".join(map(string, values)), len(values))


def tensor(name: str | bytes, shape: Sequence[int], offset: int, kind: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    n_pairs: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = struct.pack(
        "<QQ", len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs
    )
    head = magic + version + counts + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def tiny(extra: Sequence[bytes] = (), *, data: bytes | None = None) -> bytes:
    """A whole little model: every type of metadata, two tensors."""
    pairs = [
        text("general.architecture", "llama"),
        text("general.name", "Tiny"),
        u32("llama.block_count", 2),
        u32("llama.context_length", 128),
        u32("llama.embedding_length", 16),
        u32("llama.attention.head_count", 4),
        u32("llama.attention.head_count_kv", 2),
        number("a.u8", U8, 200),
        number("a.i8", I8, -3),
        number("a.u16", U16, 60_000),
        number("a.i16", I16, -2),
        number("a.i32", I32, -1),
        number("a.f32", F32, 0.5),
        number("a.bool", BOOL, True),
        number("a.u64", U64, 2**63),
        number("a.i64", I64, -(2**62)),
        number("a.f64", F64, 0.1),
        numbers("tokenizer.ggml.scores", F32, [0.0, -1.0, -2.0]),
        strings("tokenizer.ggml.tokens", ["<s>", "", "é🙂"]),
        *extra,
    ]
    tensors = [tensor("token_embd.weight", [16, 3], 0), tensor("output_norm.weight", [16], 192)]
    return file(pairs, tensors, bytes(range(256)) if data is None else data)
