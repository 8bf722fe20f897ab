"""The keywords of loading a model and opening a context, typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class LoadingKeywords(TypedDict, total=False):
    """Where a model is loaded to."""

    gpu_layers: int | Literal["auto"]
    devices: Sequence[str] | None
    tensor_split: Sequence[float] | None
    kv_offload: bool


class ContextKeywords(TypedDict, total=False):
    """What `Model.context` takes besides how many sequences of how many tokens it has."""

    threads: int | None
    n_batch: int
    shared: bool
    k_type: str
    v_type: str
    flash: bool
    swa_full: bool
    rope_freq_base: float
    rope_freq_scale: float
