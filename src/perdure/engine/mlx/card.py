"""The figures of a folder, for `perdure show`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.checks import is_whole
from perdure.engine.mlx.folder import Folder
from perdure.engine.mlx.weights import skeleton
from perdure.models.card import Card, TypeShare


def card_of(folder: Folder) -> Card:
    """The card of a model in a folder. Its class is made without weights, to see what it keeps."""
    text = folder.text
    memory = skeleton(folder)
    shares: dict[str, list[int]] = {}
    for header in folder.weights:
        for tensor in header.tensors:
            figures = shares.setdefault(tensor.dtype, [0, 0, 0])
            count = 1
            for size in tensor.shape:
                count *= size
            for place, more in enumerate((1, count, tensor.size)):
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
        context_length=_number(text, "max_position_embeddings"),
        embedding_length=_number(text, "hidden_size"),
        layers=_number(text, "num_hidden_layers"),
        heads=_number(text, "num_attention_heads"),
        kv_heads=_number(text, "num_key_value_heads") or _number(text, "num_attention_heads"),
        experts=_number(text, "num_experts") or _number(text, "num_local_experts"),
        vocabulary=_number(text, "vocab_size"),
        tokenizer="tokenizer.json",
        memory=type(memory),
        window=memory.window,
        kv_bytes_per_token=None,
        chat_template=folder.template or None,
        types=tuple(sorted(types, key=lambda share: (-share.bytes, share.type))),
    )


def _number(text: Mapping[str, Any], name: str) -> int | None:
    value = text.get(name)
    return value if is_whole(value) else None
