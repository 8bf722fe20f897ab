"""Preflight check of a model's header: numbers on which the library would end the process, or decides by."""

from __future__ import annotations

import math

import numpy as np

from perdure.errors import InvalidInputError, ModelFileError
from perdure.models import Header, Strings
from perdure.models.placement import ASSISTANTS

MAX_LAYERS = 512
_ROTATE_WHOLE_HEADS = frozenset(
    """
    apertus arcee arctic baichuan chameleon codeshell cogvlm cohere2moe dbrx deci deepseek dots1 dream
    ernie4_5 ernie4_5-moe exaone exaone-moe exaone4 falcon granite granitemoe grok grovemoe hunyuan-moe
    hunyuan_vl internlm2 jais2 llada llada-moe llama llama4 maincoder mellum mistral3 olmo olmo2 olmoe orion
    paddleocr pangu-embedded plamo qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe rnd1 seed_oss
    smallthinker smollm3 starcoder2 xverse
    """.split()  # noqa: SIM905
)
"""Architectures whose graph, in the library, ends the process over a head of which it is to rotate a part."""
_ROTATE = frozenset({"gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "qwen35", "qwen35moe", "qwen3next"})
"""Architectures for which it never ends where nothing is to be rotated."""


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
    if architecture in _ROTATE and header.integer(f"{architecture}.rope.dimension_count") == 0:
        raise ModelFileError(f"{name} is damaged: it rotates none of the values of a head")
    if architecture in _ROTATE_WHOLE_HEADS:
        _check_whole_heads(header, architecture)
    guessing = header.integer(f"{architecture}.nextn_predict_layers")
    if guessing is not None and layers is not None and not 0 <= guessing <= layers:
        raise ModelFileError(f"{name} is damaged: {guessing} of its {layers} layers are said to guess")
    if architecture == "gemma4-assistant" and guessing != layers:
        raise ModelFileError(f"{name} is damaged: not all of its {layers} layers are said to guess")
    if architecture == "gemma4":
        _check_shared_caches(header, layers or 0)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Strings) and (twice := _repeated(tokens)):
        raise ModelFileError(f"{name} is damaged: its vocabulary has {twice!r} twice")


def _check_whole_heads(header: Header, architecture: str) -> None:
    width = header.integer(f"{architecture}.embedding_length")
    heads = header.integer(f"{architecture}.attention.head_count")
    head = header.integer(f"{architecture}.attention.key_length")
    if head is None and width and heads:
        head = width // heads
    turned = header.integer(f"{architecture}.rope.dimension_count")
    if head is not None and turned is not None and turned != head:
        raise ModelFileError(
            f"{header.path.name} is damaged: it rotates {turned} of the {head} values of a head, and "
            f"{architecture} rotates all"
        )


_OTHER_DRAFTERS = frozenset({"eagle3", "dflash"})
"""Drafters of other kinds, which the library has and nobody here can use."""


def refuse_drafter(name: str, architecture: str | None) -> None:
    """Refuse a drafter in the place of a model: it reads the hidden states of another one."""
    if architecture in ASSISTANTS:
        raise InvalidInputError(
            f"{name} guesses for a model of {ASSISTANTS[architecture]}, and cannot be used alone: open that "
            "model, with this file as its draft"
        )
    if architecture in _OTHER_DRAFTERS:
        raise InvalidInputError(
            f"{name} is a drafter of the kind {architecture}, which cannot be used here: guess with a draft "
            "model, by n-grams, or by next-token layers (MTP)"
        )


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
