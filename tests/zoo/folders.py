"""Toy models as folders, for MLX: random weights in the shapes that mlx-lm's classes ask for.

Each has the vocabulary of the zoo's GGUF files, so that tokens of one engine are tokens of the other.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import tokenizer

HERE = importlib.util.find_spec("mlx_lm") is not None and importlib.util.find_spec("mlx") is not None
"""Whether this machine has mlx: there are no wheels for Windows, musl, and glibc before 2.35."""

WIDTH = 64
WINDOW = 16
SIZE = 392

_PLAIN: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": SIZE,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

FOLDERS: dict[str, dict[str, Any]] = {
    # As many tokens as the zoo's files have; the others have some that no text is made of.
    "llama": {**_PLAIN, "model_type": "llama", "vocab_size": 384},
    "gemma3": {
        **_PLAIN,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0,
    },
    "mamba": {
        "model_type": "mamba",
        "vocab_size": SIZE,
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 3,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "tie_word_embeddings": False,
    },
    "jamba": {
        **_PLAIN,
        "model_type": "jamba",
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
        "num_experts": 1,
        "num_experts_per_tok": 1,
    },
    "qwen3moe": {
        **_PLAIN,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    # Three of four layers see only their chunk.
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            **_PLAIN,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
}


def digest() -> str:
    """Changes with what is written."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


def write(name: str, folder: Path) -> Path:
    """Write the toy model `name` into a separate folder there."""
    config = FOLDERS[name]
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path)
    (path / "config.json").write_text(json.dumps(config))
    _write_weights(config, path, seed=name)
    (path / "done").touch()
    return path


def _write_weights(config: Mapping[str, Any], path: Path, seed: str) -> None:
    from perdure.ext.mlx import packages

    packages.load()
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    made, arguments = _get_classes(dict(config))
    random = np.random.default_rng(list(seed.encode()))
    weights: dict[str, Any] = {}
    for name, value in tree_flatten(made(arguments.from_dict(dict(config))).parameters()):
        shape = tuple(value.shape)
        if name.endswith("dt_proj.bias"):
            # As real models begin: a state keeps what it read for tens of tokens. The class's own bias makes
            # it forget a token behind twenty more, and then no logits tell a wrong token from the right one.
            steps = np.exp(random.uniform(np.log(0.01), np.log(0.1), shape))
            weights[name] = mx.array(np.log(np.expm1(steps)).astype(np.float32))
            continue
        if name.endswith("bias"):
            # The class draws these by the clock.
            weights[name] = mx.array(random.uniform(-0.5, 0.5, shape).astype(np.float32))
            continue
        if value.ndim < 2 or "A_log" in name:
            weights[name] = value
            continue
        gain = 8.0 if "embed" in name else 3.0 if "head" in name else 0.05 if "dt_proj" in name else 1.5
        numbers = random.standard_normal(shape).astype(np.float32) * np.float32(gain / np.sqrt(shape[-1]))
        if "head" in name:
            # Marks, and tokens without a text, are hardly ever drawn: a reply's text gives its tokens.
            numbers[len(tokenizer.vocabulary().tokens) :] = 0
        weights[name] = mx.array(numbers)
    mx.eval(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})


def write_adapter(model: Path, folder: Path, *, kind: str = "lora", seed: int = 1) -> Path:
    """A random adapter, in the shapes that mlx-lm's own tuner makes for this model."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    loaded, _ = load_model(model)
    loaded.freeze()
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.down_proj"]}
    linear_to_lora_layers(loaded, 2, parameters, use_dora=kind == "dora")
    random = np.random.default_rng(seed)
    weights = {
        name: value if name.endswith(".m") else mx.array(random.standard_normal(value.shape).astype("f") / 4)
        for name, value in tree_flatten(loaded.trainable_parameters())
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_tokenizer(path: Path) -> None:
    """The zoo's vocabulary as tokenizer.json, with its chat template."""
    known = tokenizer.vocabulary()
    ids = {token: place for place, token in enumerate(known.tokens)}
    first = len(known.tokens)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": first + place, "content": text, **flags} for place, text in enumerate(tokenizer.CONTROLS)]
    said = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": ids,
            "merges": [merge.split(" ") for merge in known.merges],
        },
    }
    (path / "tokenizer.json").write_text(json.dumps(said, ensure_ascii=False))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": tokenizer.END_OF_TEXT,
                "eos_token": tokenizer.TURN_END,
                "chat_template": tokenizer.CHATML,
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
        )
    )
