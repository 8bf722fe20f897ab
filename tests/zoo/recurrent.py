"""Models with layers that carry a state along instead of looking back."""

from __future__ import annotations

import numpy as np

from .attention import WIDTH, ends
from .sheet import Sheet

INNER = 2 * WIDTH
STATE = 8
KERNEL = 4
RANK = 8

# The time step sets how fast a channel forgets: these keep traces of a token for tens to thousands more.
FASTEST, SLOWEST = 0.1, 0.002


def state_sizes(sheet: Sheet) -> None:
    sheet.set(
        ssm__conv_kernel=KERNEL,
        ssm__inner_size=INNER,
        ssm__state_size=STATE,
        ssm__time_step_rank=RANK,
    )


def remember(sheet: Sheet, block: str) -> None:
    sheet.vector(f"{block}.attn_norm.weight", WIDTH)
    sheet.matrix(f"{block}.ssm_in.weight", 2 * INNER, WIDTH, gain=2.0)
    sheet.matrix(f"{block}.ssm_conv1d.weight", INNER, KERNEL)
    sheet.vector(f"{block}.ssm_conv1d.bias", INNER, around=0.0)
    sheet.matrix(f"{block}.ssm_x.weight", RANK + 2 * STATE, INNER, gain=4.0)
    sheet.matrix(f"{block}.ssm_dt.weight", INNER, RANK, gain=0.5)
    steps = SLOWEST * (FASTEST / SLOWEST) ** sheet.uniform(f"{block}.steps", INNER)
    # The engine takes softplus of this bias, so that the steps come out as drawn.
    sheet.put(f"{block}.ssm_dt.bias", np.log(np.expm1(steps)).astype(np.float32))
    # As in trained models: -exp(log n) for the n-th state, so that every state decays.
    decay = -np.arange(1, STATE + 1, dtype=np.float32)
    sheet.put(f"{block}.ssm_a", np.tile(decay, (INNER, 1)))
    sheet.vector(f"{block}.ssm_d", INNER)
    sheet.matrix(f"{block}.ssm_out.weight", WIDTH, INNER, gain=2.0)


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
