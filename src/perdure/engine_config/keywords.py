"""Keywords of the engine's options with their types, written by `tools/engine_keywords.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypedDict


class LoadedModel(Protocol):
    """A model that is loaded already, of any engine."""

    @property
    def digest(self) -> str: ...


EXTENDED = {
    "draft": "speculation",
    "mtp": "speculation",
    "assistant": "speculation",
}
"""Options of extensions that come with perdure, and whose they are."""


class LoadingKeywords(TypedDict, total=False):
    """How a model is loaded: of `Model`."""

    gpu_layers: int | Literal["auto"] | None
    cpu_experts: int | Literal["all", "auto"] | None
    devices: Sequence[str] | None
    tensor_split: Sequence[float] | None
    kv_offload: bool | None
    mtp: bool | None


class ContextKeywords(TypedDict, total=False):
    """What a context has, besides how many sequences of how many tokens: of `Model.context`."""

    threads: int | None
    n_batch: int | None
    shared: bool | None
    kv_type: str | None
    k_type: str | None
    v_type: str | None
    flash: bool | None
    swa_full: bool | None
    rope_freq_base: float | None
    rope_freq_scale: float | None
    trace: str | Sequence[str] | None
    trace_layers: Sequence[int] | None
    mtp: bool | None
    assistant: LoadedModel | None


class EngineKeywords(TypedDict, total=False):
    """What a model is opened with: of `perdure.open`."""

    n_ctx: int | Literal["auto"] | None
    slots: int | Literal["auto"] | None
    swap_slots: int | None
    exact: bool | None
    queue: int | None
    stall: float | None
    cache: int | None
    store_bytes: int | None
    blocks: Sequence[str] | None
    force_kv: bool | None
    adapters: Mapping[str, float] | None
    adapter_names: Mapping[str, str | os.PathLike[str]] | None
    gpu_layers: int | Literal["auto"] | None
    cpu_experts: int | Literal["all", "auto"] | None
    devices: Sequence[str] | None
    tensor_split: Sequence[float] | None
    kv_offload: bool | None
    threads: int | None
    n_batch: int | None
    shared: bool | None
    kv_type: str | None
    k_type: str | None
    v_type: str | None
    flash: bool | None
    swa_full: bool | None
    rope_freq_base: float | None
    rope_freq_scale: float | None
    trace: str | Sequence[str] | None
    trace_layers: Sequence[int] | None
    draft: str | os.PathLike[str] | LoadedModel | None


class FitKeywords(TypedDict, total=False):
    """What you choose of how a model is opened, as far as its memory depends on it."""

    n_ctx: int | Literal["auto"] | None
    slots: int | Literal["auto"] | None
    gpu_layers: int | Literal["auto"] | None
    cpu_experts: int | Literal["all", "auto"] | None
    devices: Sequence[str] | None
    kv_offload: bool | None
    n_batch: int | None
    kv_type: str | None
    k_type: str | None
    v_type: str | None
    flash: bool | None


class FitOptions(TypedDict, total=False):
    """What a proposal chose, as keywords of `perdure.open`."""

    n_ctx: int | Literal["auto"] | None
    slots: int | Literal["auto"] | None
    k_type: str | None
    v_type: str | None
    gpu_layers: int | Literal["auto"] | None
    cpu_experts: int | Literal["all", "auto"] | None
