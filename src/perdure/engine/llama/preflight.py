"""Preflight check of a model's header: numbers on which the library would end the process, or decides by."""

from __future__ import annotations

import math

import numpy as np

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
    guessing = header.integer(f"{architecture}.nextn_predict_layers")
    if architecture == "gemma4-assistant" and guessing != layers:
        raise ModelFileError(f"{name} is damaged: not all of its {layers} layers are said to guess")
    if architecture == "gemma4":
        _check_shared_caches(header, layers or 0)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Strings) and (twice := _repeated(tokens)):
        raise ModelFileError(f"{name} is damaged: its vocabulary has {twice!r} twice")


def _check_shared_caches(header: Header, layers: int) -> None:
    """Gemma 4's last layers read the cache of the last layer before them that is of their kind, with a window
    or without: the library takes it for granted that one of the last two is."""
    windows = header.metadata.get("gemma4.attention.sliding_window_pattern")
    shared = header.integer("gemma4.attention.shared_kv_layers") or 0
    if not isinstance(windows, np.ndarray) or len(windows) != layers or not shared:
        return
    own = layers - shared
    kinds = {bool(windowed) for windowed in windows[max(0, own) :]}
    if own < 2 or any(bool(windows[own - 2 if windowed else own - 1]) is not windowed for windowed in kinds):
        raise ModelFileError(
            f"{header.path.name} is damaged: its last {shared} layers read caches of layers that are not of "
            "their kind"
        )


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
