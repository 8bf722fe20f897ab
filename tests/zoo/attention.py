"""Models whose layers all attend: over everything, or over a window."""

from __future__ import annotations

from .sheet import Sheet

WIDTH = 64
HEADS = 4
KV_HEADS = 2
# Quantised K and V come in blocks of 32 values, and a head must be a whole number of them.
HEAD = 32
FEED_FORWARD = 128

# How far attention scores spread. A mild spread lets every token count, also one of hundreds.
FOCUS = 1.5
# An average over many tokens is small; this brings it back to the size of the stream it is added to.
MIXED = 2.0
LOGITS = 3.0


def ends(sheet: Sheet, vocabulary: int, *, embedding: float = 8.0) -> None:
    sheet.matrix("token_embd.weight", vocabulary, WIDTH, gain=embedding)
    sheet.vector("output_norm.weight", WIDTH)
    sheet.matrix("output.weight", vocabulary, WIDTH, gain=LOGITS)


def sizes(
    sheet: Sheet,
    layers: int,
    *,
    heads: int = HEADS,
    kv_heads: int | list[int] = KV_HEADS,
    key: int = HEAD,
    value: int = HEAD,
    rotated: int = HEAD,
) -> None:
    sheet.set(
        block_count=layers,
        embedding_length=WIDTH,
        feed_forward_length=FEED_FORWARD,
        attention__head_count=heads,
        attention__head_count_kv=kv_heads,
        attention__key_length=key,
        attention__value_length=value,
        attention__layer_norm_rms_epsilon=1e-5,
        rope__dimension_count=rotated,
        rope__freq_base=10000.0,
    )


def attend(
    sheet: Sheet,
    block: str,
    *,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    norms: bool = False,
    queries: int | None = None,
) -> None:
    """`queries` is how many heads the matrix of queries has, where it has more than are used for them."""
    sheet.vector(f"{block}.attn_norm.weight", WIDTH)
    sheet.matrix(f"{block}.attn_q.weight", (queries or heads) * HEAD, WIDTH, gain=FOCUS)
    sheet.matrix(f"{block}.attn_k.weight", kv_heads * HEAD, WIDTH)
    sheet.matrix(f"{block}.attn_v.weight", kv_heads * HEAD, WIDTH)
    sheet.matrix(f"{block}.attn_output.weight", WIDTH, heads * HEAD, gain=MIXED)
    if norms:
        sheet.vector(f"{block}.attn_q_norm.weight", HEAD, around=FOCUS)
        sheet.vector(f"{block}.attn_k_norm.weight", HEAD)


def feed_forward(sheet: Sheet, block: str, *, width: int = WIDTH, norm: str = "ffn_norm") -> None:
    sheet.vector(f"{block}.{norm}.weight", width)
    sheet.matrix(f"{block}.ffn_gate.weight", FEED_FORWARD, width)
    sheet.matrix(f"{block}.ffn_up.weight", FEED_FORWARD, width)
    sheet.matrix(f"{block}.ffn_down.weight", width, FEED_FORWARD)


LLAMA_LAYERS = 3


def llama(sheet: Sheet, vocabulary: int) -> None:
    sizes(sheet, LLAMA_LAYERS)
    ends(sheet, vocabulary)
    for layer in range(LLAMA_LAYERS):
        attend(sheet, f"blk.{layer}")
        feed_forward(sheet, f"blk.{layer}")


LORA_RANK = 4


def llama_lora(sheet: Sheet) -> None:
    for layer in range(LLAMA_LAYERS):
        for part, size in (("attn_q", HEADS * HEAD), ("attn_v", KV_HEADS * HEAD)):
            sheet.matrix(f"blk.{layer}.{part}.weight.lora_a", LORA_RANK, WIDTH)
            sheet.matrix(f"blk.{layer}.{part}.weight.lora_b", size, LORA_RANK)


INVOCATION = (17, 29)
"""The tokens that switch the activated LoRA on."""


def llama_vector(sheet: Sheet) -> None:
    for layer in range(1, LLAMA_LAYERS):
        sheet.vector(f"direction.{layer}", WIDTH, around=1.0)


def qwen3(sheet: Sheet, vocabulary: int) -> None:
    layers = 3
    sizes(sheet, layers)
    ends(sheet, vocabulary)
    for layer in range(layers):
        attend(sheet, f"blk.{layer}", norms=True)
        feed_forward(sheet, f"blk.{layer}")


GEMMA3_WINDOW = 32
# The engine makes every sixth layer a global one.
GEMMA3_GLOBAL = 5


def gemma3(sheet: Sheet, vocabulary: int) -> None:
    layers = GEMMA3_GLOBAL + 2
    sizes(sheet, layers)
    sheet.set(attention__sliding_window=GEMMA3_WINDOW)
    # The engine multiplies the embedding by the root of its width.
    ends(sheet, vocabulary, embedding=2.0)
    for layer in range(layers):
        block = f"blk.{layer}"
        attend(sheet, block, norms=True)
        # The one global layer speaks up, so that what lies behind the window still shows.
        loudness = 3.0 if layer == GEMMA3_GLOBAL else 1.0
        sheet.vector(f"{block}.post_attention_norm.weight", WIDTH, around=loudness)
        feed_forward(sheet, block)
        sheet.vector(f"{block}.post_ffw_norm.weight", WIDTH)
