"""A llama with the vocabulary of a large model and next to nothing behind it: for timing logits."""

from __future__ import annotations

from .attention import LOGITS, MIXED
from .sheet import Sheet

VOCABULARY = 262_144
WIDTH = 32
LAYERS = 2


def llama(sheet: Sheet, vocabulary: int) -> None:
    sheet.set(
        block_count=LAYERS,
        embedding_length=WIDTH,
        feed_forward_length=WIDTH,
        attention__head_count=1,
        attention__head_count_kv=1,
        attention__layer_norm_rms_epsilon=1e-5,
        rope__dimension_count=WIDTH,
    )
    # There is no output matrix: the engine then uses the embedding again, which halves the file.
    sheet.matrix("token_embd.weight", vocabulary, WIDTH, gain=LOGITS, half=True)
    sheet.vector("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        sheet.vector(f"{block}.attn_norm.weight", WIDTH)
        sheet.vector(f"{block}.ffn_norm.weight", WIDTH)
        for part in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
            sheet.matrix(f"{block}.{part}.weight", WIDTH, WIDTH)
        for part in ("attn_output", "ffn_down"):
            sheet.matrix(f"{block}.{part}.weight", WIDTH, WIDTH, gain=MIXED)
