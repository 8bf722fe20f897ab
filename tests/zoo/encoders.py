"""Encoders: models whose tokens look both ways, for vectors and for scores of pairs."""

from __future__ import annotations

from .attention import FEED_FORWARD, HEADS, WIDTH
from .recipe import TRAINED_CONTEXT
from .sheet import Sheet

LAYERS = 2


def _sizes(sheet: Sheet, **more: int | float | bool) -> None:
    sheet.set(
        block_count=LAYERS,
        embedding_length=WIDTH,
        feed_forward_length=FEED_FORWARD,
        attention__head_count=HEADS,
        attention__layer_norm_epsilon=1e-5,
        attention__causal=False,
        **more,
    )


def _norm(sheet: Sheet, name: str, *, bias: bool = True) -> None:
    sheet.vector(f"{name}.weight", WIDTH)
    if bias:
        sheet.vector(f"{name}.bias", WIDTH, around=0.0)


def _linear(sheet: Sheet, name: str, outputs: int, inputs: int, *, gain: float = 1.0) -> None:
    sheet.matrix(f"{name}.weight", outputs, inputs, gain=gain)
    sheet.vector(f"{name}.bias", outputs, around=0.0)


def bert(sheet: Sheet, vocabulary: int) -> None:
    """BERT: learnt positions, biases, norms behind each part."""
    _sizes(sheet)
    sheet.matrix("token_embd.weight", vocabulary, WIDTH, gain=8.0)
    sheet.token_types(2)
    sheet.matrix("token_types.weight", 2, WIDTH)
    sheet.matrix("position_embd.weight", TRAINED_CONTEXT, WIDTH, gain=4.0)
    _norm(sheet, "token_embd_norm")
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            _linear(sheet, f"{block}.{part}", WIDTH, WIDTH)
        _norm(sheet, f"{block}.attn_output_norm")
        _linear(sheet, f"{block}.ffn_up", FEED_FORWARD, WIDTH)
        _linear(sheet, f"{block}.ffn_down", WIDTH, FEED_FORWARD)
        _norm(sheet, f"{block}.layer_output_norm")


def bert_ranker(sheet: Sheet, vocabulary: int) -> None:
    """BERT with the two layers that make a score of its first token."""
    bert(sheet, vocabulary)
    sheet.set(pooling_type=4)
    _linear(sheet, "cls", WIDTH, WIDTH)
    _linear(sheet, "cls.output", 1, WIDTH, gain=4.0)


def nomic_bert(sheet: Sheet, vocabulary: int) -> None:
    """nomic-bert: rotated positions, Q, K and V in one matrix, gates."""
    _sizes(sheet, pooling_type=1, rope__freq_base=1000.0)
    sheet.matrix("token_embd.weight", vocabulary, WIDTH, gain=8.0)
    sheet.token_types(1)
    sheet.matrix("token_types.weight", 1, WIDTH)
    _norm(sheet, "token_embd_norm")
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        sheet.matrix(f"{block}.attn_qkv.weight", 3 * WIDTH, WIDTH)
        sheet.matrix(f"{block}.attn_output.weight", WIDTH, WIDTH)
        _norm(sheet, f"{block}.attn_output_norm")
        sheet.matrix(f"{block}.ffn_up.weight", FEED_FORWARD, WIDTH)
        sheet.matrix(f"{block}.ffn_gate.weight", FEED_FORWARD, WIDTH)
        sheet.matrix(f"{block}.ffn_down.weight", WIDTH, FEED_FORWARD)
        _norm(sheet, f"{block}.layer_output_norm")


def modern_bert(sheet: Sheet, vocabulary: int) -> None:
    """ModernBERT: windows in most layers, norms before each part, no biases."""
    _sizes(
        sheet,
        pooling_type=2,
        rope__freq_base=160000.0,
        rope__freq_base_swa=10000.0,
        attention__sliding_window=32,
    )
    sheet.matrix("token_embd.weight", vocabulary, WIDTH, gain=8.0)
    _norm(sheet, "token_embd_norm", bias=False)
    _norm(sheet, "output_norm", bias=False)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        if layer:
            _norm(sheet, f"{block}.attn_norm", bias=False)
        sheet.matrix(f"{block}.attn_qkv.weight", 3 * WIDTH, WIDTH)
        sheet.matrix(f"{block}.attn_output.weight", WIDTH, WIDTH)
        _norm(sheet, f"{block}.ffn_norm", bias=False)
        sheet.matrix(f"{block}.ffn_up.weight", 2 * FEED_FORWARD, WIDTH)
        sheet.matrix(f"{block}.ffn_down.weight", WIDTH, FEED_FORWARD)
