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
