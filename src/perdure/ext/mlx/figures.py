"""Figures of a folder, from its headers and its config: how much memory it takes, and its card."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from perdure.ext.mlx.folder import Folder
from perdure.spi.base import is_whole
from perdure.spi.models import Card, Sizes, TensorNames, TypeShare

_NAMES = TensorNames(
    layer=re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\."),
    experts=re.compile(r"\.(?:switch_mlp|experts)\."),
    embedding=re.compile(r"embed|wte"),
)
_ROWS = re.compile(r"\.(?:self_attn|attn|attention)\.")
_STATE = re.compile(r"\.(?:mixer|mamba|linear_attn|conv)\.")
_OTHER_BYTES = 4
"""Bytes of a number of a recurrent state."""


def sizes_of(folder: Folder) -> Sizes:
    """A model's sizes, layer by layer. Nothing is loaded, nothing of MLX imported."""
    text = folder.text
    tensors = [(tensor.name, tensor.size) for header in folder.weights for tensor in header.tensors]
    count = min(_number(text, "num_hidden_layers", "n_layer", "n_layers"), len(tensors))

    def layers_with(part: re.Pattern[str]) -> set[int]:
        matches = (_NAMES.layer.search(name) for name, _ in tensors if part.search(name))
        return {int(match[1]) for match in matches if match}

    rows, recurrent = layers_with(_ROWS), layers_with(_STATE)
    width = _number(text, "hidden_size", "n_embd", "d_model")
    heads = _number(text, "num_attention_heads", "n_head")
    head = _number(text, "head_dim") or (width // heads if heads else 0)
    # The cache has the type that the model computes in; the sizes count in numbers of 16 bits.
    wide = 2 if folder.quantisation == "F32" else 1
    row = (_number(text, "num_key_value_heads") or heads) * head * wide
    return Sizes(
        **_NAMES.weigh(tensors, count),
        tied=not any("head" in name for name, _ in tensors if not _NAMES.layer.search(name)),
        cache=tuple((row, row) if layer in rows else (0, 0) for layer in range(count)),
        states=tuple(_state_bytes(text, width) if layer in recurrent else 0 for layer in range(count)),
        masks=2 if is_whole(text.get("sliding_window")) else 1,
        width=width,
        query=heads * head,
        recurrent=_inner(text, width) if recurrent else 0,
        heads=heads,
        inner=_number(text, "intermediate_size"),
        experts_used=_number(text, "num_experts_per_tok"),
        expert_inner=_number(text, "moe_intermediate_size", "intermediate_size"),
        vocabulary=_number(text, "vocab_size"),
        trained=_number(text, "max_position_embeddings"),
        offloads=False,
    )


def card_of(folder: Folder) -> Card:
    """The card of a model in a folder. Its class is made without weights, to see what it keeps."""
    from perdure.ext.mlx.weights import skeleton

    text = folder.text
    memory = skeleton(folder)
    shares: dict[str, list[int]] = {}
    for header in folder.weights:
        for tensor in header.tensors:
            figures = shares.setdefault(tensor.dtype, [0, 0, 0])
            for place, more in enumerate((1, math.prod(tensor.shape), tensor.size)):
                figures[place] += more
    types = [
        TypeShare(type=name, tensors=figures[0], elements=figures[1], bytes=figures[2])
        for name, figures in shares.items()
    ]
    return Card(
        path=folder.path,
        files=len(folder.weights),
        file_bytes=folder.nbytes,
        architecture=str(folder.config["model_type"]),
        name=folder.path.name,
        quantisation=folder.quantisation or None,
        parameters=folder.parameters,
        context_length=_number(text, "max_position_embeddings") or None,
        embedding_length=_number(text, "hidden_size") or None,
        layers=_number(text, "num_hidden_layers") or None,
        heads=_number(text, "num_attention_heads") or None,
        kv_heads=_number(text, "num_key_value_heads") or _number(text, "num_attention_heads") or None,
        experts=_number(text, "num_experts") or _number(text, "num_local_experts") or None,
        vocabulary=_number(text, "vocab_size") or None,
        tokenizer="tokenizer.json",
        memory=type(memory),
        window=memory.window,
        kv_bytes_per_token=None,
        chat_template=folder.template or None,
        types=tuple(sorted(types, key=lambda share: (-share.bytes, share.type))),
    )


def _inner(text: Mapping[str, Any], width: int) -> int:
    return width * (_number(text, "mamba_expand", "expand") or 2)


def _state_bytes(text: Mapping[str, Any], width: int) -> int:
    """A sequence's state in one recurrent layer: what is convolved, and what is summed up."""
    kernel = _number(text, "mamba_d_conv", "conv_kernel", "conv_L_cache", "linear_conv_kernel_dim") or 4
    inner = _inner(text, width)
    summed = _number(text, "mamba_d_state", "state_size", "ssm_state_size")
    heads = _number(text, "linear_num_value_heads")
    if heads:
        keys, values = _number(text, "linear_key_head_dim"), _number(text, "linear_value_head_dim")
        return _OTHER_BYTES * (heads * keys * values + kernel * 3 * heads * max(keys, values))
    return _OTHER_BYTES * inner * (kernel - 1 + summed)


def _number(text: Mapping[str, Any], *names: str) -> int:
    """The first of these that a config has, as a number of something; 0 where it has none."""
    for name in names:
        value = text.get(name)
        if is_whole(value):
            return int(value)
    return 0
