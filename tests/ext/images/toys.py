"""Toy models with projectors, random weights in the real architectures: written in milliseconds.

idefics3    llama; causal, an image becomes slices with text between them
llava       llama; a CLIP tower, causal
gemma3      a sliding window; attention within an image is not causal
qwen2vl     positions in two dimensions
qwen3vl     the same interleaved, and rows three times as wide as the model
qwen35      recurrent and attention layers, positions in two dimensions
qwen2a      llama; sounds
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

V, D, H, KV, HD, F, L = (512, 64, 4, 2, 16, 128, 3)
SPECIAL = [
    "<fake_token_around_image>",
    "<global-img>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<start_of_image>",
    "<end_of_image>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<image>",
    "<|im_start|>",
    "<|im_end|>",
]
CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
SPECIAL += [f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)]


class Weights:
    """Random tensors of any shape."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float | None = None, kind: Any = np.float32) -> Any:
        return (self.rng.standard_normal(shape) * (scale or shape[-1] ** (-0.5))).astype(kind)


def ones(n: int, value: float = 1.0) -> Any:
    return np.full(n, value, np.float32)


def zeros(n: int) -> Any:
    return np.zeros(n, np.float32)


def vocab(out: Any) -> None:
    tokens, scores, kinds = ([b"<unk>", b"<s>", b"</s>"], [0.0] * 3, [2, 3, 3])
    for i in range(256):
        tokens.append(f"<0x{i:02X}>".encode())
        scores.append(0.0)
        kinds.append(6)
    for text in SPECIAL:
        tokens.append(text.encode())
        scores.append(0.0)
        kinds.append(3)
    tokens.append(b"\n\n")
    scores.append(-1.0)
    kinds.append(1)
    for i in range(V - len(tokens)):
        tokens.append(f"▁w{i}".encode())
        scores.append(-float(i + 2))
        kinds.append(1)
    out.add_tokenizer_model("llama")
    out.add_token_list(tokens)
    out.add_token_scores(scores)
    out.add_token_types(kinds)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_add_bos_token(True)
    out.add_chat_template(CHATML)


def done(out: Any) -> None:
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def text(path: Path, arch: str, seed: int = 0) -> None:
    out, weights = (gguf.GGUFWriter(str(path), arch), Weights(seed))
    out.add_context_length(8192)
    out.add_embedding_length(D)
    out.add_block_count(L)
    out.add_feed_forward_length(F)
    out.add_head_count(H)
    out.add_head_count_kv(KV)
    out.add_layer_norm_rms_eps(1e-06)
    out.add_rope_freq_base(10000.0)
    vocab(out)
    gemma, qwen3 = (arch == "gemma3", arch == "qwen3vl")
    if arch == "qwen2vl":
        out.add_array("qwen2vl.rope.dimension_sections", [2, 3, 3, 0])
    if qwen3:
        out.add_array("qwen3vl.rope.dimension_sections", [4, 2, 2, 0])
        out.add_uint32("qwen3vl.n_deepstack_layers", 2)
    if gemma or qwen3:
        out.add_key_length(HD)
        out.add_value_length(HD)
    else:
        out.add_rope_dimension_count(HD)
    if gemma:
        out.add_sliding_window(32)
    out.add_tensor("token_embd.weight", weights(V, D, scale=0.5))
    out.add_tensor("output_norm.weight", ones(D))
    out.add_tensor("output.weight", weights(V, D))
    for i in range(6 if gemma else L):
        b = f"blk.{i}."
        out.add_tensor(b + "attn_norm.weight", ones(D))
        for name, rows in (("q", H * HD), ("k", KV * HD), ("v", KV * HD)):
            out.add_tensor(b + f"attn_{name}.weight", weights(rows, D, scale=0.4))
            if arch == "qwen2vl":
                out.add_tensor(b + f"attn_{name}.bias", weights(rows, scale=0.1))
        out.add_tensor(b + "attn_output.weight", weights(D, H * HD, scale=0.4))
        if gemma or qwen3:
            out.add_tensor(b + "attn_q_norm.weight", ones(HD, 1.5))
            out.add_tensor(b + "attn_k_norm.weight", ones(HD, 1.5))
        if gemma:
            out.add_tensor(b + "post_attention_norm.weight", ones(D))
            out.add_tensor(b + "post_ffw_norm.weight", ones(D))
        out.add_tensor(b + "ffn_norm.weight", ones(D))
        out.add_tensor(b + "ffn_gate.weight", weights(F, D))
        out.add_tensor(b + "ffn_up.weight", weights(F, D))
        out.add_tensor(b + "ffn_down.weight", weights(D, F))
    if gemma:
        out.kv_data[0].get("gemma3.block_count").value = 6
    done(out)


def hybrid(
    path: Path,
    seed: int = 0,
    layers: int = 4,
    groups: int = 2,
    heads: int = 4,
    state: int = 16,
    conv: int = 4,
) -> None:
    """qwen35: three layers with a recurrent state, one with attention and interleaved M-RoPE."""
    out, weights = (gguf.GGUFWriter(str(path), "qwen35"), Weights(seed))
    out.add_context_length(8192)
    out.add_embedding_length(D)
    out.add_block_count(layers)
    out.add_feed_forward_length(F)
    out.add_head_count(H)
    out.add_head_count_kv(KV)
    out.add_layer_norm_rms_eps(1e-06)
    out.add_rope_freq_base(10000.0)
    vocab(out)
    out.add_key_length(HD)
    out.add_value_length(HD)
    out.add_rope_dimension_count(HD)
    out.add_array("qwen35.rope.dimension_sections", [4, 2, 2, 0])
    out.add_ssm_conv_kernel(conv)
    out.add_ssm_inner_size(state * heads)
    out.add_ssm_state_size(state)
    out.add_ssm_time_step_rank(heads)
    out.add_ssm_group_count(groups)
    out.add_uint32("qwen35.full_attention_interval", 4)
    out.add_tensor("token_embd.weight", weights(V, D, scale=0.5))
    out.add_tensor("output_norm.weight", ones(D))
    out.add_tensor("output.weight", weights(V, D))
    width, inner = (2 * groups * state + heads * state, heads * state)
    for i in range(layers):
        b = f"blk.{i}."
        out.add_tensor(b + "attn_norm.weight", ones(D))
        out.add_tensor(b + "post_attention_norm.weight", ones(D))
        if i % 4 == 3:
            out.add_tensor(b + "attn_q.weight", weights(2 * H * HD, D, scale=0.4))
            out.add_tensor(b + "attn_k.weight", weights(KV * HD, D, scale=0.4))
            out.add_tensor(b + "attn_v.weight", weights(KV * HD, D, scale=0.4))
            out.add_tensor(b + "attn_output.weight", weights(D, H * HD, scale=0.4))
            out.add_tensor(b + "attn_q_norm.weight", ones(HD, 1.5))
            out.add_tensor(b + "attn_k_norm.weight", ones(HD, 1.5))
        else:
            out.add_tensor(b + "attn_qkv.weight", weights(width, D))
            out.add_tensor(b + "attn_gate.weight", weights(inner, D))
            out.add_tensor(b + "ssm_conv1d.weight", weights(width, conv))
            out.add_tensor(b + "ssm_dt.bias", weights(heads, scale=0.1))
            out.add_tensor(b + "ssm_a", -np.exp(weights(heads, scale=0.5)))
            out.add_tensor(b + "ssm_beta.weight", weights(heads, D))
            out.add_tensor(b + "ssm_alpha.weight", weights(heads, D))
            out.add_tensor(b + "ssm_norm.weight", ones(state))
            out.add_tensor(b + "ssm_out.weight", weights(D, inner))
        out.add_tensor(b + "ffn_gate.weight", weights(F, D))
        out.add_tensor(b + "ffn_up.weight", weights(F, D))
        out.add_tensor(b + "ffn_down.weight", weights(D, F))
    done(out)


def tower(
    path: Path,
    kind: str,
    seed: int = 1,
    wide: int = 64,
    heads: int = 4,
    ff: int = 128,
    layers: int = 2,
    size: int = 64,
    patch: int = 8,
) -> None:
    """The encoder's file of one kind."""
    out, weights = (gguf.GGUFWriter(str(path), "clip"), Weights(seed))
    audio = kind == "qwen2a"
    place = "audio" if audio else "vision"
    out.add_bool(f"clip.has_{place}_encoder", True)
    name = {
        "llava": "mlp",
        "qwen2vl": "qwen2vl_merger",
        "qwen3vl": "qwen3vl_merger",
        "qwen35": "qwen3vl_merger",
    }.get(kind, kind)
    out.add_string("clip.projector_type", name)
    out.add_uint32(f"clip.{place}.embedding_length", wide)
    out.add_uint32(f"clip.{place}.attention.head_count", heads)
    out.add_uint32(f"clip.{place}.feed_forward_length", ff)
    out.add_uint32(f"clip.{place}.block_count", layers)
    out.add_uint32(f"clip.{place}.projection_dim", D)
    out.add_float32(f"clip.{place}.attention.layer_norm_epsilon", 1e-06)
    out.add_bool("clip.use_gelu", True)
    p = "a" if audio else "v"
    if audio:
        out.add_uint32("clip.audio.num_mel_bins", 80)
        out.add_tensor("a.conv1d.1.weight", weights(wide, 80, 3, kind=np.float16, scale=0.1))
        out.add_tensor("a.conv1d.1.bias", weights(wide, 1))
        out.add_tensor("a.conv1d.2.weight", weights(wide, wide, 3, kind=np.float16, scale=0.1))
        out.add_tensor("a.conv1d.2.bias", weights(wide, 1))
        out.add_tensor("a.position_embd.weight", weights(1500, wide))
        out.add_tensor("mm.a.fc.weight", weights(D, wide))
        out.add_tensor("mm.a.fc.bias", zeros(D))
    else:
        out.add_uint32("clip.vision.image_size", size)
        out.add_uint32("clip.vision.patch_size", patch)
        out.add_array("clip.vision.image_mean", [0.5] * 3)
        out.add_array("clip.vision.image_std", [0.5] * 3)
        out.add_tensor("v.patch_embd.weight", weights(wide, 3, patch, patch, scale=0.1))
        patches = (size // patch) ** 2
    if kind in ("idefics3", "gemma3", "llava"):
        out.add_tensor("v.patch_embd.bias", weights(wide, scale=0.1))
        out.add_tensor("v.position_embd.weight", weights(patches + (kind == "llava"), wide))
    if kind == "idefics3":
        out.add_uint32("clip.vision.projector.scale_factor", 2)
        out.add_uint32("clip.vision.preproc_image_size", 128)
        out.add_tensor("mm.model.fc.weight", weights(D, 4 * wide))
    if kind == "gemma3":
        out.add_uint32("clip.vision.projector.scale_factor", 2)
        out.add_tensor("mm.input_projection.weight", weights(wide, D))
        out.add_tensor("mm.soft_emb_norm.weight", ones(wide))
    if kind == "llava":
        out.add_tensor("v.class_embd", weights(wide))
        out.add_tensor("v.pre_ln.weight", ones(wide))
        out.add_tensor("v.pre_ln.bias", zeros(wide))
        out.add_tensor("mm.0.weight", weights(D, wide))
        out.add_tensor("mm.0.bias", zeros(D))
        out.add_tensor("mm.2.weight", weights(D, D))
        out.add_tensor("mm.2.bias", zeros(D))
    if kind in ("qwen2vl", "qwen3vl", "qwen35"):
        out.add_tensor("v.patch_embd.weight.1", weights(wide, 3, patch, patch, scale=0.1))
        out.add_tensor("mm.0.weight", weights(4 * wide, 4 * wide))
        out.add_tensor("mm.0.bias", zeros(4 * wide))
        out.add_tensor("mm.2.weight", weights(D, 4 * wide))
        out.add_tensor("mm.2.bias", zeros(D))
    if kind in ("qwen3vl", "qwen35"):
        out.add_uint32("clip.vision.spatial_merge_size", 2)
        out.add_tensor("v.patch_embd.bias", weights(wide, scale=0.1))
        out.add_tensor("v.position_embd.weight", weights(patches, wide))
        out.add_array("clip.vision.is_deepstack_layers", [kind == "qwen3vl"] * layers)
    for i in range(layers):
        b = f"{p}.blk.{i}."
        if kind in ("qwen3vl", "qwen35"):
            out.add_tensor(b + "attn_qkv.weight", weights(3 * wide, wide))
            out.add_tensor(b + "attn_qkv.bias", zeros(3 * wide))
        if kind == "qwen3vl":
            d = f"v.deepstack.{i}."
            out.add_tensor(d + "norm.weight", ones(4 * wide))
            out.add_tensor(d + "norm.bias", zeros(4 * wide))
            out.add_tensor(d + "fc1.weight", weights(4 * wide, 4 * wide))
            out.add_tensor(d + "fc1.bias", zeros(4 * wide))
            out.add_tensor(d + "fc2.weight", weights(D, 4 * wide))
            out.add_tensor(d + "fc2.bias", zeros(D))
        if kind not in ("qwen3vl", "qwen35"):
            for n in "qkv":
                out.add_tensor(b + f"attn_{n}.weight", weights(wide, wide))
                if not (audio and n == "k"):
                    out.add_tensor(b + f"attn_{n}.bias", zeros(wide))
        out.add_tensor(b + "attn_out.weight", weights(wide, wide))
        out.add_tensor(b + "attn_out.bias", zeros(wide))
        for n in ("ln1", "ln2"):
            out.add_tensor(b + n + ".weight", ones(wide))
            out.add_tensor(b + n + ".bias", zeros(wide))
        out.add_tensor(b + "ffn_up.weight", weights(ff, wide))
        out.add_tensor(b + "ffn_up.bias", zeros(ff))
        out.add_tensor(b + "ffn_down.weight", weights(wide, ff))
        out.add_tensor(b + "ffn_down.bias", zeros(wide))
    out.add_tensor(f"{p}.post_ln.weight", ones(wide))
    out.add_tensor(f"{p}.post_ln.bias", zeros(wide))
    done(out)


KINDS = {
    "idefics3": "llama",
    "llava": "llama",
    "gemma3": "gemma3",
    "qwen2vl": "qwen2vl",
    "qwen3vl": "qwen3vl",
    "qwen2a": "llama",
    "qwen35": "qwen35",
}


def write(folder: Path, kind: str) -> tuple[Path, Path]:
    """A model and its projector."""
    model, projector = folder / f"{kind}.gguf", folder / f"{kind}-mmproj.gguf"
    hybrid(model) if kind == "qwen35" else text(model, KINDS[kind])
    tower(projector, kind)
    return model, projector
