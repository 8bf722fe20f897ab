"""Models whose layers all attend: over everything, or over a window."""

from __future__ import annotations

from .sheet import Sheet

WIDTH = 64
HEADS = 4
KV_HEADS = 2
# Quantised K and V come in blocks of 32 values, and a head must be a whole number of them.
HEAD = 32
FEED_FORWARD = 128

# Sharp attention: with the usual gain of 1 every position would weigh about the same, and one token among
# hundreds would hardly move a logit.
FOCUS = 2.0
LOGITS = 3.0


def ends(sheet: Sheet, vocabulary: int) -> None:
    sheet.matrix("token_embd.weight", vocabulary, WIDTH, gain=4.0)
    sheet.vector("output_norm.weight", WIDTH)
    sheet.matrix("output.weight", vocabulary, WIDTH, gain=LOGITS)


def sizes(sheet: Sheet, layers: int) -> None:
    sheet.set(
        block_count=layers,
        embedding_length=WIDTH,
        feed_forward_length=FEED_FORWARD,
        attention__head_count=HEADS,
        attention__head_count_kv=KV_HEADS,
        attention__key_length=HEAD,
        attention__value_length=HEAD,
        attention__layer_norm_rms_epsilon=1e-5,
        rope__dimension_count=HEAD,
        rope__freq_base=10000.0,
    )


def attend(sheet: Sheet, block: str, *, norms: bool = False) -> None:
    sheet.vector(f"{block}.attn_norm.weight", WIDTH)
    if norms:
        sheet.vector(f"{block}.attn_q_norm.weight", HEAD, around=FOCUS)
        sheet.vector(f"{block}.attn_k_norm.weight", HEAD)
    sheet.matrix(f"{block}.attn_q.weight", HEADS * HEAD, WIDTH, gain=FOCUS)
    sheet.matrix(f"{block}.attn_k.weight", KV_HEADS * HEAD, WIDTH)
    sheet.matrix(f"{block}.attn_v.weight", KV_HEADS * HEAD, WIDTH)
    sheet.matrix(f"{block}.attn_output.weight", WIDTH, HEADS * HEAD, gain=2.0)


def feed_forward(sheet: Sheet, block: str) -> None:
    sheet.vector(f"{block}.ffn_norm.weight", WIDTH)
    sheet.matrix(f"{block}.ffn_gate.weight", FEED_FORWARD, WIDTH)
    sheet.matrix(f"{block}.ffn_up.weight", FEED_FORWARD, WIDTH)
    sheet.matrix(f"{block}.ffn_down.weight", WIDTH, FEED_FORWARD)


def llama(sheet: Sheet, vocabulary: int) -> None:
    layers = 3
    sizes(sheet, layers)
    ends(sheet, vocabulary)
    for layer in range(layers):
        attend(sheet, f"blk.{layer}")
        feed_forward(sheet, f"blk.{layer}")


GEMMA3_WINDOW = 32


def gemma3(sheet: Sheet, vocabulary: int) -> None:
    # The engine makes every sixth layer a global one: five local, one global, one local.
    layers = 7
    sizes(sheet, layers)
    sheet.set(attention__sliding_window=GEMMA3_WINDOW)
    ends(sheet, vocabulary)
    for layer in range(layers):
        block = f"blk.{layer}"
        attend(sheet, block, norms=True)
        sheet.vector(f"{block}.post_attention_norm.weight", WIDTH)
        feed_forward(sheet, block)
        sheet.vector(f"{block}.post_ffw_norm.weight", WIDTH)
