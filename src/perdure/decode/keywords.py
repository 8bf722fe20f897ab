"""The keywords of a request, typed: an editor completes them, and a type checker finds a misspelt one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from perdure.decode.sampling.grammar import Grammar
from perdure.decode.slots import KeptPrefix
from perdure.engine.logits import LogitsView
from perdure.request_options import Sampling

Processor: TypeAlias = Callable[[Sequence[int], LogitsView], NDArray[np.float32]]
"""Called with the tokens so far and the live logits; returns the logits to draw from."""


class SamplingKeywords(TypedDict, total=False):
    """The fields of `Sampling`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_last_n: int
    dry_breakers: tuple[str, ...]
    xtc_probability: float
    xtc_threshold: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    seed: int | None
    logit_bias: Mapping[int, float]


class ReplyKeywords(SamplingKeywords, total=False):
    """How a reply is made, whoever asks for it."""

    max_tokens: int | None
    stop: str | Sequence[str] | None
    sampling: Sampling | None
    grammar: Grammar | None
    schema: Any
    regex: str | None
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    ignore_eos: bool
    processors: Sequence[Processor]
    checkpoint_at: Sequence[int]
    pins: Sequence[KeptPrefix]
    visible_tokens: frozenset[int]
    timeout: float | None
    deadline: float | None


class RequestKeywords(ReplyKeywords, total=False):
    """What `generate` and its like take besides the prompt."""

    namespace: str
