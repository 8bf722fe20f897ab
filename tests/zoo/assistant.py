"""A model and a drafter that reads its hidden states and its keys and values: Gemma 4 and its assistant."""

from __future__ import annotations

from .attention import FEED_FORWARD, HEADS, KV_HEADS, LOGITS, WIDTH, ends, feed_forward
from .sheet import Sheet

WINDOW = 32
LOCAL, GLOBAL = 32, 64
"""Values of a head, of layers with the window and of those without."""
PATTERN = [True, True, False, True, False]
"""Which layers have the window. The drafter reads the caches of the last of either kind."""
SHARED = 2
"""Layers at the end that have no cache of their own: each reads that of an earlier one of its kind."""
DRAFTER_WIDTH = 32
DRAFTER = [True, False]


def _sizes(sheet: Sheet, pattern: list[bool], width: int) -> None:
    sheet.set(
        block_count=len(pattern),
        embedding_length=width,
        feed_forward_length=FEED_FORWARD,
        attention__head_count=HEADS,
        attention__head_count_kv=KV_HEADS,
        attention__key_length=GLOBAL,
        attention__value_length=GLOBAL,
        attention__key_length_swa=LOCAL,
        attention__value_length_swa=LOCAL,
        attention__layer_norm_rms_epsilon=1e-5,
        attention__sliding_window=WINDOW,
        attention__sliding_window_pattern=pattern,
        rope__dimension_count=GLOBAL,
        rope__dimension_count_swa=LOCAL,
        rope__freq_base=10000.0,
        rope__freq_base_swa=10000.0,
    )
    sheet.put("rope_freqs.weight", 1 + sheet.uniform("rope_freqs.weight", GLOBAL // 2))


def _layer(sheet: Sheet, block: str, head: int, width: int, *, loud: float = 1.0) -> None:
    """What layers of both have."""
    sheet.vector(f"{block}.attn_norm.weight", width)
    sheet.matrix(f"{block}.attn_q.weight", HEADS * head, width)
    # Scores are not divided by the root of a head's size.
    sheet.vector(f"{block}.attn_q_norm.weight", head, around=1.5 / head**0.5, spread=0.02)
    sheet.matrix(f"{block}.attn_output.weight", width, HEADS * head)
    sheet.vector(f"{block}.post_attention_norm.weight", width, around=loud)
    feed_forward(sheet, block, width=width)
    sheet.vector(f"{block}.post_ffw_norm.weight", width)
    sheet.vector(f"{block}.layer_output_scale.weight", 1)


def gemma4(sheet: Sheet, vocabulary: int) -> None:
    _sizes(sheet, PATTERN, WIDTH)
    sheet.set(embedding_length_per_layer_input=0, attention__shared_kv_layers=SHARED)
    ends(sheet, vocabulary, embedding=2.0)
    for layer, local in enumerate(PATTERN):
        block, head = f"blk.{layer}", LOCAL if local else GLOBAL
        # Global layers speak up, so that what lies behind the window still shows.
        _layer(sheet, block, head, WIDTH, loud=1.0 if local else 3.0)
        if layer < len(PATTERN) - SHARED:
            sheet.matrix(f"{block}.attn_k.weight", KV_HEADS * head, WIDTH)
            sheet.matrix(f"{block}.attn_v.weight", KV_HEADS * head, WIDTH)
            sheet.vector(f"{block}.attn_k_norm.weight", head)


def gemma4_assistant(sheet: Sheet, vocabulary: int) -> None:
    _sizes(sheet, DRAFTER, DRAFTER_WIDTH)
    sheet.set(
        embedding_length_out=WIDTH,
        nextn_predict_layers=len(DRAFTER),
        attention__shared_kv_layers=len(DRAFTER),
    )
    sheet.matrix("token_embd.weight", vocabulary, DRAFTER_WIDTH, gain=LOGITS)
    sheet.vector("output_norm.weight", DRAFTER_WIDTH)
    sheet.matrix("nextn.pre_projection.weight", DRAFTER_WIDTH, 2 * WIDTH)
    sheet.matrix("nextn.post_projection.weight", WIDTH, DRAFTER_WIDTH)
    for layer, local in enumerate(DRAFTER):
        _layer(sheet, f"blk.{layer}", LOCAL if local else GLOBAL, DRAFTER_WIDTH, loud=3.0)
