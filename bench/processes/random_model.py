"""Models of random weights: for speed, not for sense."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a llama or a mixture of experts, and the type of its matrices (`q4_0` or `q8_0`)."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    type: str
    experts: int = 0
    """With experts it is a qwen3moe, each of them `inner` wide, of which `used` compute a token."""
    used: int = 0
    head: int = 0
    """Values of a head, where that is not the width over the heads."""
    counts: bool = False
    """Whether token n + 1 follows token n for sure: all is computed as otherwise, but the layers add nothing,
    and the output of each token is the embedding of the one before. What such a model writes is known."""
    next_token: bool = False
    """Whether it has a next-token layer (MTP), and is a glm4moe whose other layers have no experts. That of a
    model that counts expects what it will write behind four of five tokens."""

    @property
    def architecture(self) -> str:
        return "glm4moe" if self.next_token else "qwen3moe" if self.experts else "llama"

    @property
    def norms(self) -> tuple[str, str]:
        return ("attn_norm", "post_attention_norm" if self.next_token else "ffn_norm")


SMALL = Shape(layers=30, width=576, inner=1536, heads=9, kv_heads=3, vocabulary=49_152, type="q8_0")
EIGHT_BILLION = Shape(
    layers=32, width=4096, inner=14_336, heads=32, kv_heads=8, vocabulary=128_256, type="q4_0"
)
MIXTURE = Shape(
    layers=48,
    width=2048,
    inner=768,
    heads=32,
    kv_heads=4,
    vocabulary=151_936,
    type="q4_0",
    experts=128,
    used=8,
    head=128,
)
"""As Qwen3 30B-A3B: 17 GB."""
SMALL_MIXTURE = Shape(
    layers=8,
    width=512,
    inner=256,
    heads=8,
    kv_heads=2,
    vocabulary=8192,
    type="q8_0",
    experts=16,
    used=4,
    head=64,
)
"""The same in small, for a CPU: 65 MB."""


def write(path: Path, shape: Shape) -> Path:
    """Write such a model, unless it is there."""
    if path.exists():
        return path
    import gguf

    partly = path.with_suffix(".partly")
    writer = gguf.GGUFWriter(partly, shape.architecture)
    layers = shape.layers + shape.next_token
    writer.add_context_length(1 << 17)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    head = shape.head or shape.width // shape.heads
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.inner)
    if shape.next_token:
        writer.add_nextn_predict_layers(1)
        writer.add_leading_dense_block_count(shape.layers)
        # The architecture has experts in that layer: half of the width is one, half is shared.
        writer.add_expert_shared_count(1)
        writer.add_expert_count(1)
        writer.add_expert_used_count(1)
        writer.add_expert_feed_forward_length(shape.inner // 2)
    writer.add_vocab_size(shape.vocabulary)
    _add_words(writer, shape.vocabulary)
    matrices = _Matrices(shape.type)
    queries, keys = head * shape.heads, head * shape.kv_heads
    sizes: dict[str, tuple[int, ...]] = {
        "attn_q": (queries, shape.width),
        "attn_k": (keys, shape.width),
        "attn_v": (keys, shape.width),
        "attn_output": (shape.width, queries),
    }
    inner = {
        "ffn_gate": (shape.inner, shape.width),
        "ffn_up": (shape.inner, shape.width),
        "ffn_down": (shape.width, shape.inner),
    }
    if shape.experts:
        sizes |= {f"{name}_exps": (shape.experts, *size) for name, size in inner.items()}
    else:
        sizes |= inner
    named: dict[str, tuple[int, ...]] = {
        "token_embd": (shape.vocabulary, shape.width),
        "output": (shape.vocabulary, shape.width),
    }
    named |= {f"blk.{at}.{name}": size for at in range(shape.layers) for name, size in sizes.items()}
    if shape.next_token:
        named |= {f"blk.{shape.layers}.{name}": size for name, size in sizes.items() if name not in inner}
        for name, whole in inner.items():
            halved = tuple(shape.inner // 2 if each == shape.inner else each for each in whole)
            named |= {f"blk.{shape.layers}.{name}_exps": (1, *halved)}
            named |= {f"blk.{shape.layers}.{name}_shexp": halved}
    for name, size in named.items():
        matrix = matrices(*size)
        if shape.counts and name == "output":
            matrix = np.roll(matrix, 1, axis=0)
        elif shape.counts and name.endswith(_ADDED):
            matrix = np.zeros_like(matrix)
        writer.add_tensor(f"{name}.weight", matrix, raw_dtype=matrices.type)
    if shape.experts:
        dice = np.random.default_rng(1)
        for at in range(shape.layers):
            router = dice.standard_normal((shape.experts, shape.width), np.float32)
            writer.add_tensor(f"blk.{at}.ffn_gate_inp.weight", router)
            for name in ("attn_q_norm", "attn_k_norm"):
                writer.add_tensor(f"blk.{at}.{name}.weight", np.ones(head, np.float32))
    if shape.next_token:
        block = f"blk.{shape.layers}.nextn"
        # The token counts, and not the hidden state before it.
        of_token = np.eye(shape.width, dtype=np.float16)
        writer.add_tensor(f"{block}.eh_proj.weight", np.hstack([of_token, np.zeros_like(of_token)]))
        seen = matrices(shape.vocabulary, shape.width).copy()
        wrong = np.flatnonzero(np.random.default_rng(2).random(shape.vocabulary) < _WRONG)
        seen[wrong] = seen[np.roll(wrong, 1)]
        writer.add_tensor(f"{block}.embed_tokens.weight", seen, raw_dtype=matrices.type)
        writer.add_tensor(f"blk.{shape.layers}.ffn_gate_inp.weight", np.ones((1, shape.width), np.float32))
        writer.add_tensor(f"blk.{shape.layers}.exp_probs_b.bias", np.zeros(1, np.float32))
        for name in ("enorm", "hnorm", "shared_head_norm"):
            writer.add_tensor(f"{block}.{name}.weight", np.ones(shape.width, np.float32))
    norms = ["output_norm", *(f"blk.{at}.{name}" for at in range(layers) for name in shape.norms)]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(shape.width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partly.replace(path)
    return path


_WRONG = 0.2
"""Of the tokens: behind these a next-token layer expects another one than comes."""
_ADDED = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
"""What a layer adds its outcome by."""


def _add_words(writer: Any, count: int) -> None:
    """A tokenizer of bytes, with words behind them that no text is cut into."""
    from perdure.ext.builds.toy_gguf import bytes_as_text

    letters = bytes_as_text()
    words = [f"\u0120word{number}" for number in range(count - len(letters) - len(_MARKS))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*_MARKS, *letters, *words])
    writer.add_token_types([3] * len(_MARKS) + [1] * (count - len(_MARKS)))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_TEMPLATE)


class _Matrices:
    """Random blocks with sane scales, the same for matrices of the same size."""

    def __init__(self, name: str) -> None:
        import gguf

        self.type = gguf.GGMLQuantizationType[name.upper()]
        self._values, self._bytes = gguf.GGML_QUANT_SIZES[self.type]
        self._spread = {"q4_0": 4.6, "q8_0": 74.0}[name]
        self._dice = np.random.default_rng(0)
        self._made: dict[tuple[int, ...], NDArray[np.uint8]] = {}

    def __call__(self, *size: int) -> NDArray[np.uint8]:
        if size not in self._made:
            columns = size[-1]
            count = math.prod(size) // self._values
            blocks = self._dice.integers(0, 256, (count, self._bytes), np.uint8)
            scale = np.float16(columns**-0.5 / self._spread)
            blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
            self._made[size] = blocks.reshape(*size[:-1], columns // self._values * self._bytes)
        return self._made[size]
