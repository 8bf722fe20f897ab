"""A trained model's folder as a GGUF file: its weights, and all else of the file that it was made from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perdure import InvalidInputError, ModelFileError
from perdure.ext.weights.peft import rotated
from perdure.ext.weights.tensors import Planned, TensorFile, TensorInfo, from_floats, write_model
from perdure.spi.base import is_whole

ARCHITECTURE = "llama"
"""The one whose weights have the same numbers in both, but for the order of rows."""
LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""What a layer's tensors are called in a GGUF file, and in a folder."""
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>[a-z_]+)\.(?P<kind>weight|bias)")


def is_trained(folder: Path) -> bool:
    """Whether a whole model is in a folder, and no adapter."""
    return (folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))


def convert_trained(
    folder: str | os.PathLike[str], base: str | os.PathLike[str], target: str | os.PathLike[str]
) -> Path:
    """Write the weights of a folder as a GGUF file like `base`: matrices in F16, the rest in F32."""
    place = Path(folder)
    with ExitStack() as opened:
        model = opened.enter_context(TensorFile(base))
        architecture = str(model.metadata.get("general.architecture"))
        if architecture != ARCHITECTURE:
            raise InvalidInputError(
                f"models of {architecture} cannot be converted; those of {ARCHITECTURE} can"
            )
        sources: dict[str, tuple[TensorFile, TensorInfo]] = {}
        for path in sorted(place.glob("model*.safetensors")):
            file = opened.enter_context(TensorFile(path))
            sources.update({name: (file, tensor) for name, tensor in file.tensors.items()})
        planned = [_replaced(tensor, sources, model) for tensor in model.tensors.values()]
        about: dict[str, str | int | float | Sequence[str]] = {
            "perdure.version": version("perdure"),
            "general.name": place.resolve().name,
            "general.file_type": 1,
        }
        write_model(Path(target), planned, like=model, texts=about)
    return Path(target)


def _replaced(
    tensor: TensorInfo, sources: dict[str, tuple[TensorFile, TensorInfo]], model: TensorFile
) -> Planned:
    match = _LAYER.fullmatch(tensor.name)
    part = LAYER_PARTS.get(match["part"]) if match else None
    name = _ENDS.get(tensor.name)
    if match is not None and part is not None:
        name = f"model.layers.{int(match['layer'])}.{part}.{match['kind']}"
    if name is None:
        raise InvalidInputError(f"the model has a {tensor.name}, which a folder has no name for here")
    if name not in sources and tensor.name == "output.weight":
        # It writes with the table that it reads with.
        name = _ENDS["token_embd.weight"]
    if name not in sources:
        raise ModelFileError(f"the folder has no {name}, which the model has as {tensor.name}")
    source, own = sources[name]
    if own.shape != tensor.shape or not own.is_float:
        raise InvalidInputError(
            f"the folder has {name} of {own.shape} in {own.type}, the model has {tensor.shape}: they are of "
            "different sizes, or the folder is quantised"
        )
    kind = "F16" if len(tensor.shape) > 1 else "F32"
    heads = _heads(tensor, model)

    def pieces() -> Iterator[NDArray[np.uint8]]:
        rows = source.floats(own)
        yield from_floats(kind, rotated(rows, heads) if heads else rows).reshape(-1)

    return Planned(name=tensor.name, type=kind, shape=tensor.shape, pieces=pieces)


def _heads(tensor: TensorInfo, model: TensorFile) -> int:
    """Of Q and K, whose rows GGUF has in another order, how many heads they have; else 0."""
    keys = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    key = next((key for part, key in keys.items() if f".{part}." in tensor.name), None)
    if key is None:
        return 0
    heads = model.metadata.get(f"{ARCHITECTURE}.attention.{key}")
    if not is_whole(heads) or not heads or tensor.rows % (2 * heads):
        raise InvalidInputError(f"the model does not say how many heads {tensor.name} has")
    return int(heads)
