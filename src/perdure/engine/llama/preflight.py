"""Preflight check of a model's header: numbers on which the library would end the process, or decides by."""

from __future__ import annotations

import math

from perdure.errors import ModelFileError
from perdure.models import Header, Strings

MAX_LAYERS = 512


def check_header(header: Header) -> None:
    """Raise `ModelFileError` where the library is known to abort instead of refusing the file."""
    name = header.path.name
    architecture = header.text("general.architecture")
    layers = header.integer(f"{architecture}.block_count")
    if layers is not None and not 1 <= layers <= MAX_LAYERS:
        raise ModelFileError(f"{name} says that it has {layers} layers; 1 to {MAX_LAYERS} can be used")
    for key, value in header.metadata.items():
        if key.endswith("epsilon") and isinstance(value, float) and not 0 <= value < math.inf:
            raise ModelFileError(f"{name} is damaged: {key} is {value}")
    turned = header.integer(f"{architecture}.rope.dimension_count") or 0
    head = header.integer(f"{architecture}.attention.key_length") or turned
    if turned % 2 or turned > head:
        raise ModelFileError(f"{name} is damaged: it rotates {turned} of the {head} values of a head")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Strings) and (twice := _repeated(tokens)):
        raise ModelFileError(f"{name} is damaged: its vocabulary has {twice!r} twice")


def rope_limit(header: Header) -> int | None:
    """The context size above which the library takes the long one of a model's two sets of RoPE factors.

    None for a model that has not two of them, or whose first file does not say.
    """
    if not any(tensor.name.startswith("rope_factors_long") for tensor in header.tensors):
        return None
    architecture = header.text("general.architecture")
    original = header.integer(f"{architecture}.rope.scaling.original_context_length")
    return original if original is not None else header.integer(f"{architecture}.context_length")


def rope_factors(limit: int | None, n_ctx_seq: int) -> str:
    """The set of RoPE factors that a context uses: the library decides by `llama_n_ctx_seq`."""
    if limit is None:
        return "one"
    return "long" if n_ctx_seq > limit else "short"


def _repeated(tokens: Strings) -> bytes | None:
    """A token that is there twice. The library reads each up to its first NUL, and names empty ones."""
    seen = set(tokens)
    if len(seen) == len(tokens) and not any("\0" in token for token in seen):
        return None
    words: set[bytes] = set()
    for index in range(len(tokens)):
        word = tokens.raw(index).split(b"\0", 1)[0]
        if word in words:
            return word
        if word:
            words.add(word)
    return None
