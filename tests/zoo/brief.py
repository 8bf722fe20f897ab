"""A llama that answers everything by the same word and ends: for what only a finished reply can do."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from . import tokenizer
from .attention import FEED_FORWARD, HEAD, HEADS, KV_HEADS, WIDTH, sizes
from .sheet import Sheet

ANSWER = "Fine"
# The logit of what follows; all others are far below, whatever rounding does.
SURE = 40.0


def llama(sheet: Sheet, vocabulary: int) -> None:
    """The next token depends on the last one alone: its layers add nothing."""
    sizes(sheet, 1)
    embedding = sheet.noise("token_embd.weight", vocabulary, WIDTH)
    # A prompt ends with a new line; the ids of bytes are the bytes.
    chain = [*f"\n{ANSWER}".encode(), tokenizer.vocabulary().id(tokenizer.TURN_END)]
    output = np.zeros_like(embedding)
    for last, following in pairwise(chain):
        output[following] = embedding[last] * np.float32(SURE / WIDTH)
    sheet.put("token_embd.weight", embedding)
    sheet.put("output.weight", output)
    sheet.vector("output_norm.weight", WIDTH, spread=0.0)
    for name in ("attn_norm", "ffn_norm"):
        sheet.vector(f"blk.0.{name}.weight", WIDTH)
    for name, outputs, inputs in (
        ("attn_q", HEADS * HEAD, WIDTH),
        ("attn_k", KV_HEADS * HEAD, WIDTH),
        ("attn_v", KV_HEADS * HEAD, WIDTH),
        ("attn_output", WIDTH, HEADS * HEAD),
        ("ffn_gate", FEED_FORWARD, WIDTH),
        ("ffn_up", FEED_FORWARD, WIDTH),
        ("ffn_down", WIDTH, FEED_FORWARD),
    ):
        sheet.matrix(f"blk.0.{name}.weight", outputs, inputs, gain=0.0)
