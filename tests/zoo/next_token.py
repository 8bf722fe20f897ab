"""Models that have next-token layers (MTP) behind their own."""

from __future__ import annotations

from . import experts
from .attention import (
    HEAD,
    HEADS,
    KV_HEADS,
    MIXED,
    WIDTH,
    attend,
    ends,
    feed_forward,
    sizes,
)
from .sheet import Sheet

WINDOW = 32
"""Of the models with a window."""


def guessing(sheet: Sheet, block: str) -> None:
    """What makes a layer guess."""
    sheet.matrix(f"{block}.nextn.eh_proj.weight", WIDTH, 2 * WIDTH)
    sheet.vector(f"{block}.nextn.enorm.weight", WIDTH)
    sheet.vector(f"{block}.nextn.hnorm.weight", WIDTH)


def deepseek2(sheet: Sheet, vocabulary: int) -> None:
    sheet.set(nextn_predict_layers=1)
    experts.deepseek2(sheet, vocabulary, layers=4)
    guessing(sheet, "blk.3")


def _windowed(sheet: Sheet, vocabulary: int, windows: list[bool], guessers: int) -> None:
    """A model with a window in these layers, of which the last guess."""
    sizes(sheet, len(windows))
    sheet.set(
        nextn_predict_layers=guessers,
        attention__sliding_window=WINDOW,
        attention__sliding_window_pattern=windows,
        rope__freq_base_swa=10000.0,
        expert_feed_forward_length=32,
    )
    ends(sheet, vocabulary)
    for layer in range(len(windows) - guessers, len(windows)):
        guessing(sheet, f"blk.{layer}")


def step35(sheet: Sheet, vocabulary: int) -> None:
    """Three next-token layers, all with the window, as Step 3.5 has."""
    windows = [True, False, True, False, True, True, True]
    _windowed(sheet, vocabulary, windows, guessers=3)
    for layer in range(len(windows)):
        attend(sheet, f"blk.{layer}", norms=True)
        feed_forward(sheet, f"blk.{layer}")


def mimo2(sheet: Sheet, vocabulary: int) -> None:
    """One next-token layer, without a window. Queries, keys and values of a layer are one matrix."""
    windows = [True, False, True, False, False]
    _windowed(sheet, vocabulary, windows, guessers=1)
    for layer in range(len(windows)):
        block = f"blk.{layer}"
        sheet.vector(f"{block}.attn_norm.weight", WIDTH)
        sheet.matrix(f"{block}.attn_qkv.weight", (HEADS + 2 * KV_HEADS) * HEAD, WIDTH, gain=1.2)
        sheet.matrix(f"{block}.attn_output.weight", WIDTH, HEADS * HEAD, gain=MIXED)
        feed_forward(sheet, block)


STATE, STATE_HEADS, STATE_GROUPS, CONVOLVED = 32, 4, 2, 4
"""Of the recurrent layers: values of a head, heads, heads of keys, tokens that a convolution sees."""


def qwen35(sheet: Sheet, vocabulary: int) -> None:
    """A hybrid: of recurrent layers (gated delta net) and others in turn; the one that guesses attends."""
    layers = 4
    sizes(sheet, layers + 1)
    sheet.set(
        nextn_predict_layers=1,
        full_attention_interval=2,
        ssm__conv_kernel=CONVOLVED,
        ssm__inner_size=STATE * STATE_HEADS,
        ssm__state_size=STATE,
        ssm__time_step_rank=STATE_HEADS,
        ssm__group_count=STATE_GROUPS,
        rope__dimension_sections=[8, 4, 4, 0],
    )
    ends(sheet, vocabulary)
    values = STATE * STATE_HEADS
    mixed = values + 2 * STATE * STATE_GROUPS
    for layer in range(layers + 1):
        block = f"blk.{layer}"
        feed_forward(sheet, block, norm="post_attention_norm")
        if layer == layers or layer % 2:
            # Half of what a query's matrix gives is a gate.
            attend(sheet, block, norms=True, queries=2 * HEADS)
            continue
        sheet.vector(f"{block}.attn_norm.weight", WIDTH)
        sheet.matrix(f"{block}.attn_qkv.weight", mixed, WIDTH)
        sheet.matrix(f"{block}.attn_gate.weight", values, WIDTH)
        sheet.matrix(f"{block}.ssm_conv1d.weight", mixed, CONVOLVED)
        sheet.vector(f"{block}.ssm_dt.bias", STATE_HEADS, around=-3.0)
        sheet.vector(f"{block}.ssm_a", STATE_HEADS, around=-0.5)
        for name in ("beta", "alpha"):
            sheet.matrix(f"{block}.ssm_{name}.weight", STATE_HEADS, WIDTH)
        sheet.vector(f"{block}.ssm_norm.weight", STATE)
        sheet.matrix(f"{block}.ssm_out.weight", WIDTH, values)
    guessing(sheet, f"blk.{layers}")
