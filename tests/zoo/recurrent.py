"""Models with layers that carry a state along instead of looking back."""

from __future__ import annotations

import numpy as np

from .attention import HEAD, WIDTH, attend, ends, feed_forward, sizes
from .sheet import Sheet

INNER = 2 * WIDTH
STATE = 8
KERNEL = 4
RANK = 8

# The time step sets how fast a channel forgets: these keep traces of a token for a hundred to thousands more.
FASTEST, SLOWEST = 0.01, 0.0005


def state_sizes(sheet: Sheet) -> None:
    sheet.set(
        ssm__conv_kernel=KERNEL,
        ssm__inner_size=INNER,
        ssm__state_size=STATE,
        ssm__time_step_rank=RANK,
    )


def remember(sheet: Sheet, block: str, *, gain: float = 2.0) -> None:
    sheet.vector(f"{block}.attn_norm.weight", WIDTH)
    sheet.matrix(f"{block}.ssm_in.weight", 2 * INNER, WIDTH, gain=2.0)
    sheet.matrix(f"{block}.ssm_conv1d.weight", INNER, KERNEL)
    sheet.vector(f"{block}.ssm_conv1d.bias", INNER, around=0.0)
    sheet.matrix(f"{block}.ssm_x.weight", RANK + 2 * STATE, INNER, gain=8.0)
    sheet.matrix(f"{block}.ssm_dt.weight", INNER, RANK, gain=0.05)
    steps = SLOWEST * (FASTEST / SLOWEST) ** sheet.uniform(f"{block}.steps", INNER)
    # The engine takes softplus of this bias, so that the steps come out as drawn.
    sheet.put(f"{block}.ssm_dt.bias", np.log(np.expm1(steps)).astype(np.float32))
    # As in trained models: -exp(log n) for the n-th state, so that every state decays.
    decay = -np.arange(1, STATE + 1, dtype=np.float32)
    sheet.put(f"{block}.ssm_a", np.tile(decay, (INNER, 1)))
    sheet.vector(f"{block}.ssm_d", INNER, around=0.2)
    sheet.matrix(f"{block}.ssm_out.weight", WIDTH, INNER, gain=gain)


def mamba(sheet: Sheet, vocabulary: int) -> None:
    layers = 3
    sheet.set(
        block_count=layers,
        embedding_length=WIDTH,
        feed_forward_length=0,
        attention__head_count=0,
        attention__layer_norm_rms_epsilon=1e-5,
    )
    state_sizes(sheet)
    ends(sheet, vocabulary)
    for layer in range(layers):
        remember(sheet, f"blk.{layer}")


JAMBA_HEADS = WIDTH // HEAD
JAMBA_KV_HEADS = 1
# A layer without K/V heads is a recurrent one.
JAMBA_LAYERS = (0, JAMBA_KV_HEADS, 0, JAMBA_KV_HEADS)


def jamba(sheet: Sheet, vocabulary: int) -> None:
    sizes(sheet, len(JAMBA_LAYERS), heads=JAMBA_HEADS, kv_heads=list(JAMBA_LAYERS))
    state_sizes(sheet)
    ends(sheet, vocabulary)
    for layer, kv_heads in enumerate(JAMBA_LAYERS):
        block = f"blk.{layer}"
        if kv_heads:
            attend(sheet, block, heads=JAMBA_HEADS, kv_heads=kv_heads)
        else:
            # Softer than in mamba, or the states would drown what the attention layers say.
            remember(sheet, block, gain=0.5)
            sheet.vector(f"{block}.ssm_dt_norm.weight", RANK)
            sheet.vector(f"{block}.ssm_b_norm.weight", STATE, around=2.0)
            sheet.vector(f"{block}.ssm_c_norm.weight", STATE, around=2.0)
        feed_forward(sheet, block)
