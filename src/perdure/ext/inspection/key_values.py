"""Comparisons of keys and values: sequences, a branch with its parent, a stored block with a fresh one.

compare(ctx.kv(0), ctx.kv(1)).drift        # by (layer, token, head)
compare(ctx.kv_of(block.rows, start=block.start), ctx.kv(0, None, block.start, block.end))
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perdure import InvalidInputError, KeyValues
from perdure.spi.engine import Floats

_TINY = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvComparison:
    """How keys and values of the same tokens differ, by (layer, token, head)."""

    k_similarity: Floats
    """Cosine: 1 for the same direction."""
    v_similarity: Floats
    k_drift: Floats
    """The length of the difference by the length of the first: 0 for equals."""
    v_drift: Floats

    @property
    def drift_by_layer(self) -> Floats:
        """The larger of both drifts, as its middle over tokens and heads."""
        drift: Floats = np.maximum(self.k_drift, self.v_drift).mean(axis=(1, 2))
        return drift

    @property
    def equal(self) -> bool:
        """Whether not one number differs."""
        return not self.k_drift.any() and not self.v_drift.any()


def norms(numbers: Floats) -> Floats:
    """The length of each key or value, by (layer, token, head)."""
    return np.asarray(np.linalg.norm(numbers, axis=-1), np.float32)


def effective_rank(numbers: Floats) -> Floats:
    """In how many directions keys or values lie, by (layer, head): the exponential of the entropy of their
    singular values. 1 where all lie in one, at most as many as a key has numbers or there are tokens."""
    values = np.linalg.svd(np.moveaxis(numbers, 1, 2).astype(np.float64), compute_uv=False)
    shares = values / np.maximum(values.sum(axis=-1, keepdims=True), _TINY)
    entropy = -np.sum(np.where(shares > 0, shares * np.log(np.maximum(shares, _TINY)), 0.0), axis=-1)
    return np.asarray(np.exp(entropy), np.float32)


def similarity(one: Floats, other: Floats) -> Floats:
    """The cosine of each pair of keys or values, by (layer, token, head)."""
    dot = np.sum(one.astype(np.float64) * other, axis=-1)
    both = np.linalg.norm(one.astype(np.float64), axis=-1) * np.linalg.norm(other.astype(np.float64), axis=-1)
    # Two that are nothing are alike.
    return np.where(both > _TINY, dot / np.maximum(both, _TINY), 1.0).astype(np.float32)


def drift(one: Floats, other: Floats) -> Floats:
    """The length of each difference by the length of the first, by (layer, token, head)."""
    away = np.linalg.norm(one.astype(np.float64) - other, axis=-1)
    return np.asarray(away / np.maximum(np.linalg.norm(one.astype(np.float64), axis=-1), _TINY), np.float32)


def compare(one: KeyValues, other: KeyValues) -> KvComparison:
    """How two readings of the same positions and layers differ; the longer is cut to the shorter."""
    if one.layers != other.layers or one.start != other.start or one.rotated != other.rotated:
        raise InvalidInputError(
            f"layers {list(one.layers)} from token {one.start} cannot be compared with layers "
            f"{list(other.layers)} from token {other.start}: read the same of both, both with or without RoPE"
        )
    count = min(one.tokens, other.tokens)
    pairs = [(a[:, :count], b[:, :count]) for a, b in ((one.k, other.k), (one.v, other.v))]
    return KvComparison(
        k_similarity=similarity(*pairs[0]),
        v_similarity=similarity(*pairs[1]),
        k_drift=drift(*pairs[0]),
        v_drift=drift(*pairs[1]),
    )
