"""Models that send each token through a few of many feed-forward networks."""

from __future__ import annotations

from .attention import FOCUS, HEADS, MIXED, WIDTH, attend, ends, feed_forward, sizes
from .sheet import Sheet

EXPERTS = 8
EXPERTS_USED = 4
EXPERT_FEED_FORWARD = 32
# Wide router scores keep ties rare: rounding must not send a token to another expert.
DECISION = 4.0


def expert_sizes(sheet: Sheet) -> None:
    sheet.set(
        expert_count=EXPERTS,
        expert_used_count=EXPERTS_USED,
        expert_feed_forward_length=EXPERT_FEED_FORWARD,
    )


def route(sheet: Sheet, block: str) -> None:
    sheet.vector(f"{block}.ffn_norm.weight", WIDTH)
    sheet.matrix(f"{block}.ffn_gate_inp.weight", EXPERTS, WIDTH, gain=DECISION)
    sheet.matrix(f"{block}.ffn_gate_exps.weight", EXPERTS, EXPERT_FEED_FORWARD, WIDTH)
    sheet.matrix(f"{block}.ffn_up_exps.weight", EXPERTS, EXPERT_FEED_FORWARD, WIDTH)
    sheet.matrix(f"{block}.ffn_down_exps.weight", EXPERTS, WIDTH, EXPERT_FEED_FORWARD)


def qwen3moe(sheet: Sheet, vocabulary: int) -> None:
    layers = 3
    sizes(sheet, layers)
    expert_sizes(sheet)
    ends(sheet, vocabulary)
    for layer in range(layers):
        attend(sheet, f"blk.{layer}", norms=True)
        route(sheet, f"blk.{layer}")


# Multi-head latent attention: a cell holds one compressed vector and one rotated key for all heads.
LATENT = 64
ROTATED = 32
PLAIN = 32
VALUE = 32
QUERY_RANK = 32


def deepseek2(sheet: Sheet, vocabulary: int, layers: int = 3) -> None:
    dense = 1
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


def attend_to_latents(sheet: Sheet, block: str) -> None:
    sheet.vector(f"{block}.attn_norm.weight", WIDTH)
    sheet.matrix(f"{block}.attn_q_a.weight", QUERY_RANK, WIDTH)
    sheet.vector(f"{block}.attn_q_a_norm.weight", QUERY_RANK)
    sheet.matrix(f"{block}.attn_q_b.weight", HEADS * (PLAIN + ROTATED), QUERY_RANK, gain=FOCUS)
    sheet.matrix(f"{block}.attn_kv_a_mqa.weight", LATENT + ROTATED, WIDTH)
    sheet.vector(f"{block}.attn_kv_a_norm.weight", LATENT)
    # Stored so that it takes a query into latent space: its inputs are the plain part of a head.
    sheet.matrix(f"{block}.attn_k_b.weight", HEADS, LATENT, PLAIN, gain=(PLAIN / LATENT) ** 0.5)
    sheet.matrix(f"{block}.attn_v_b.weight", HEADS, VALUE, LATENT)
    sheet.matrix(f"{block}.attn_output.weight", WIDTH, HEADS * VALUE, gain=MIXED)
