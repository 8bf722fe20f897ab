"""Models that have next-token layers (MTP) behind their own."""

from __future__ import annotations

from .attention import WIDTH, ends, feed_forward, sizes
from .experts import (
    EXPERT_FEED_FORWARD,
    LATENT,
    PLAIN,
    QUERY_RANK,
    ROTATED,
    VALUE,
    attend_to_latents,
    expert_sizes,
    route,
)
from .sheet import Sheet


def deepseek2(sheet: Sheet, vocabulary: int) -> None:
    layers, dense = 4, 1
    sheet.set(nextn_predict_layers=1)
    sizes(sheet, layers, kv_heads=1, key=LATENT + ROTATED, value=LATENT, rotated=ROTATED)
    expert_sizes(sheet)
    sheet.set(
        leading_dense_block_count=dense,
        expert_shared_count=1,
        expert_weights_scale=1.0,
        attention__q_lora_rank=QUERY_RANK,
        attention__kv_lora_rank=LATENT,
        attention__key_length_mla=PLAIN + ROTATED,
        attention__value_length_mla=VALUE,
    )
    ends(sheet, vocabulary)
    for layer in range(layers):
        block = f"blk.{layer}"
        attend_to_latents(sheet, block)
        if layer < dense:
            feed_forward(sheet, block)
        else:
            route(sheet, block)
            sheet.matrix(f"{block}.ffn_gate_shexp.weight", EXPERT_FEED_FORWARD, WIDTH)
            sheet.matrix(f"{block}.ffn_up_shexp.weight", EXPERT_FEED_FORWARD, WIDTH)
            sheet.matrix(f"{block}.ffn_down_shexp.weight", WIDTH, EXPERT_FEED_FORWARD)
    nextn = f"blk.{layers - 1}.nextn"
    sheet.matrix(f"{nextn}.eh_proj.weight", WIDTH, 2 * WIDTH)
    sheet.vector(f"{nextn}.enorm.weight", WIDTH)
    sheet.vector(f"{nextn}.hnorm.weight", WIDTH)
