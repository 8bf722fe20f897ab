"""Write a GGUF file of the llama architecture as a folder for MLX and Hugging Face.

    python tools/mlx_folder.py MODEL.gguf FOLDER [--dtype float16|float32|bfloat16]

Quantised weights are dequantised: the folder computes what the file computes, up to rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from perdure.ext.weights.safetensors import safetensors_header
from perdure.ext.weights.trained import LAYER_PARTS

TYPES = {"float16": "F16", "float32": "F32", "bfloat16": "BF16"}
# How a text is cut before merges, by the name that llama.cpp has for it.
DIGITS = {"type": "Digits", "individual_digits": True}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
CUTS = {"smollm": [DIGITS, LEVEL], "gpt-2": [LEVEL]}
CONTROL, USER_DEFINED = 3, 4


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("model", type=Path)
    options.add_argument("folder", type=Path)
    options.add_argument("--dtype", choices=TYPES, default="float16")
    given = options.parse_args()
    try:
        write(given.model, given.folder, given.dtype)
    except (ValueError, OSError) as error:
        print(f"{given.model}: {error}", file=sys.stderr)
        return 1
    return 0


def write(model: Path, folder: Path, dtype: str = "float16") -> Path:
    """Write the model file as a folder."""
    reader = GGUFReader(str(model))
    said = {name: field.contents() for name, field in reader.fields.items()}
    if said.get("general.architecture") != "llama":
        raise ValueError(
            f"only the llama architecture is written, this is {said.get('general.architecture')}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    (folder / "config.json").write_text(json.dumps(config(said, dtype, tied=tied), indent=1))
    write_tokenizer(said, folder)
    write_weights(reader, said, folder, dtype)
    return folder


def config(said: dict[str, Any], dtype: str, *, tied: bool) -> dict[str, Any]:
    def number(name: str) -> Any:
        return said[f"llama.{name}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": said.get("llama.attention.key_length")
        or number("embedding_length") // number("attention.head_count"),
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": number("rope.freq_base"),
        "max_position_embeddings": number("context_length"),
        "vocab_size": len(said["tokenizer.ggml.tokens"]),
        "bos_token_id": said.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": said.get("tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
    }


def write_tokenizer(said: dict[str, Any], folder: Path) -> None:
    kind = said.get("tokenizer.ggml.pre", "gpt-2")
    if said.get("tokenizer.ggml.model") != "gpt2" or kind not in CUTS:
        raise ValueError(f"only byte-level tokenizers of {', '.join(CUTS)} are written, this is {kind}")
    tokens, types = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": place, "content": text, **flags, "special": types[place] == CONTROL}
        for place, text in enumerate(tokens)
        if types[place] in (CONTROL, USER_DEFINED)
    ]
    table = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": CUTS[kind]},
        "post_processor": None,
        "decoder": {**LEVEL, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: place for place, text in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in said["tokenizer.ggml.merges"]],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(table, ensure_ascii=False))
    named = {
        f"{name}_token": tokens[said[f"tokenizer.ggml.{name}_token_id"]]
        for name in ("bos", "eos")
        if f"tokenizer.ggml.{name}_token_id" in said
    }
    more = {
        "chat_template": said.get("tokenizer.chat_template", ""),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, **more}))


def write_weights(reader: GGUFReader, said: dict[str, Any], folder: Path, dtype: str) -> None:
    heads = {"attn_q": said["llama.attention.head_count"], "attn_k": said["llama.attention.head_count_kv"]}
    planned: list[tuple[str, Any, int]] = []
    for tensor in reader.tensors:
        part = tensor.name.removesuffix(".weight")
        if part == "token_embd":
            planned.append(("model.embed_tokens.weight", tensor, 0))
        elif part == "output_norm":
            planned.append(("model.norm.weight", tensor, 0))
        elif part == "output":
            planned.append(("lm_head.weight", tensor, 0))
        elif part.startswith("blk.") and part.split(".")[2] in LAYER_PARTS:
            _, layer, what = part.split(".")
            planned.append((f"model.layers.{layer}.{LAYER_PARTS[what]}.weight", tensor, heads.get(what, 0)))
        elif part != "rope_freqs":
            raise ValueError(f"the tensor {tensor.name} has no place in a llama")
    header = [(name, TYPES[dtype], [int(size) for size in tensor.shape[::-1]]) for name, tensor, _ in planned]
    with open(folder / "model.safetensors", "wb") as file:
        file.write(safetensors_header(header, {"format": "mlx"}))
        for _, tensor, count in planned:
            shape = tuple(int(size) for size in tensor.shape[::-1])
            values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            file.write(stored(in_order(values, count), dtype))


def in_order(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """llama.cpp turns neighbours, others turn halves: the rows of queries and keys stand in another order."""
    if not heads:
        return values
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def stored(values: NDArray[Any], dtype: str) -> bytes:
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, dtype).tobytes()
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: NDArray[np.uint32] = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype(np.uint16).tobytes()


if __name__ == "__main__":
    sys.exit(main())
