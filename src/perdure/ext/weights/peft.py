"""An adapter's folder as a GGUF adapter: names, scales and the order of rows as llama.cpp has them.

As PEFT writes it:

adapter_config.json         {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "use_rslora": false, …}
adapter_model.safetensors   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [r, in]
                            base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out, r]

As mlx-lm writes it, and `perdure train`:

adapter_config.json         {"fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0, …}}
adapters.safetensors        model.layers.0.self_attn.q_proj.lora_a   [in, r]
                            model.layers.0.self_attn.q_proj.lora_b   [r, out]
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from perdure import InvalidInputError, ModelFileError
from perdure.ext.weights.tensors import Planned, Rows, TensorFile, TensorInfo, write_model
from perdure.spi.base import TABLE_BYTES, is_number, is_whole, read_file

_ROTATED = ("llama",)
"""Architectures whose Q and K rows GGUF has in another order: pairs that rotate together lie side by side."""
ARCHITECTURES = (*_ROTATED, "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<part>[a-z_]+\.[a-z_]+)")
_HALF = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
_TABLE = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<half>[AB])(?:\.default)?")
_MLX = re.compile(r"(?P<module>.+)\.lora_(?P<half>[ab])")


def convert_peft(
    folder: str | os.PathLike[str], base: str | os.PathLike[str], target: str | os.PathLike[str]
) -> Path:
    """Write a LoRA of PEFT or mlx-lm as a GGUF adapter for the model `base`, which says architecture and
    shapes."""
    place = Path(folder)
    config = _config(place)
    with TensorFile(base) as model, TensorFile(_weights(place, config)) as source:
        architecture = str(model.metadata.get("general.architecture"))
        if architecture not in ARCHITECTURES:
            raise InvalidInputError(
                f"adapters for {architecture} cannot be converted; those for {', '.join(ARCHITECTURES)} can"
            )
        planned: list[Planned] = []
        for name, halves in sorted(_pairs(source).items()):
            planned += _adapted(name, halves, source, model, config, architecture)
        if not planned:
            raise ModelFileError(f"{source.path} holds no LoRA tensors")
        about: dict[str, str | int | float | Sequence[str]] = {
            "general.architecture": architecture,
            "general.type": "adapter",
            "general.name": place.resolve().name,
            "adapter.type": "lora",
            "adapter.lora.alpha": float(config["lora_alpha"]),
            "perdure.version": version("perdure"),
        }
        write_model(Path(target), planned, texts=about)
    return Path(target)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "adapter_config.json"
    try:
        config = json.loads(read_file(path, TABLE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not the settings of a PEFT adapter: {error}") from None
    if isinstance(config, dict) and "fine_tune_type" in config:
        return _mlx_config(path, config)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelFileError(f"{path} is not of a LoRA adapter (peft_type)")
    for key in ("use_dora", "fan_in_fan_out", "modules_to_save", "lora_bias"):
        if config.get(key):
            raise InvalidInputError(f"{path} asks for {key}, which a GGUF adapter cannot hold")
    if config.get("bias", "none") != "none":
        raise InvalidInputError(f"{path} trains biases, which a GGUF adapter cannot hold")
    if not is_number(config.get("lora_alpha")) or not config["lora_alpha"]:
        raise ModelFileError(f"{path} has no lora_alpha")
    return config


def _mlx_config(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What mlx-lm says, as PEFT would say it: its scale is alpha divided by the rank."""
    if config["fine_tune_type"] != "lora":
        raise InvalidInputError(
            f"{path} is of type {str(config['fine_tune_type'])[:40]!r}; a GGUF adapter holds a lora"
        )
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    if not is_number(scale) or not math.isfinite(scale) or not scale:
        raise ModelFileError(f"{path} has no scale in its lora_parameters")
    return {"lora_alpha": 1.0, "mlx_scale": float(scale)}


def _weights(folder: Path, config: dict[str, Any]) -> Path:
    if "mlx_scale" in config:
        return folder / "adapters.safetensors"
    path = folder / "adapter_model.safetensors"
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise InvalidInputError(f"{folder} has its weights as a pickle; save it as safetensors first")
    return path


def _pairs(source: TensorFile) -> dict[str, dict[str, TensorInfo]]:
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in source.tensors.items():
        match = _HALF.fullmatch(name) or _TABLE.fullmatch(name) or _MLX.fullmatch(name)
        if match is None or len(tensor.shape) != 2 or not tensor.is_float:
            raise InvalidInputError(
                f"{source.path} holds {name[:120]!r}, which is no part of a LoRA of matrices"
            )
        pairs.setdefault(match["module"], {})[match["half"].upper()] = tensor
    for module, halves in pairs.items():
        if len(halves) != 2:
            raise ModelFileError(f"{source.path} is damaged: {module[:120]} has one half of its LoRA")
    return pairs


def _adapted(
    module: str,
    halves: dict[str, TensorInfo],
    source: TensorFile,
    model: TensorFile,
    config: dict[str, Any],
    architecture: str,
) -> list[Planned]:
    name = _tensor_name(module)
    tensor = model.tensors.get(name)
    if tensor is None:
        raise InvalidInputError(f"the adapter changes {module[:120]}, and the model has no {name}")
    a, b = source.floats(halves["A"]), source.floats(halves["B"])
    if "mlx_scale" in config:
        a, b = a.T, b.T
    rank, is_table = a.shape[0], name == "token_embd.weight"
    expected = (tensor.rows, tensor.width) if is_table else (tensor.width, tensor.rows)
    if b.shape[1] != rank or (a.shape[1], b.shape[0]) != expected:
        raise InvalidInputError(
            f"the adapter's {module[:120]} is for a matrix of {b.shape[0]} by {a.shape[1]}, {name} has "
            f"{tensor.rows} by {tensor.width}"
        )
    b = b * np.float32(_factor(module, rank, config))
    part = name.split(".")[-2]
    if architecture in _ROTATED and part in ("attn_q", "attn_k"):
        key = "head_count" if part == "attn_q" else "head_count_kv"
        heads = model.metadata.get(f"{architecture}.attention.{key}")
        if not is_whole(heads) or b.shape[0] % (2 * heads):
            raise InvalidInputError(f"the model does not say how many heads {name} has")
        b = rotated(b, heads)
    return [_plain(f"{name}.lora_a", a.T if is_table else a), _plain(f"{name}.lora_b", b)]


def rotated(rows: Rows, heads: int) -> Rows:
    """Rows of Q or K in GGUF's order: of each head, its two halves in turn."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _tensor_name(module: str) -> str:
    if module.endswith("embed_tokens"):
        return "token_embd.weight"
    if module.endswith("lm_head"):
        return "output.weight"
    match = _LAYER.fullmatch(module)
    part = _PARTS.get(match["part"]) if match else None
    if match is None or part is None:
        raise InvalidInputError(
            f"the adapter changes {module[:120]!r}, for which there is no name in GGUF here"
        )
    return f"blk.{int(match['layer'])}.{part}.weight"


def _factor(module: str, rank: int, config: dict[str, Any]) -> float:
    """What B is multiplied with: GGUF has one alpha for all, and divides it by the rank."""
    if "mlx_scale" in config:
        return float(config["mlx_scale"]) * rank
    alpha = float(config["lora_alpha"])
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        if module == pattern or module.endswith(f".{pattern}"):
            alpha = float(own)
    return alpha / float(config["lora_alpha"]) * (math.sqrt(rank) if config.get("use_rslora") else 1.0)


def _plain(name: str, rows: Rows) -> Planned:
    data = np.ascontiguousarray(rows, np.float32)
    shape = (data.shape[1], data.shape[0])
    return Planned(name=name, type="F32", shape=shape, pieces=lambda: [data.reshape(-1).view(np.uint8)])
