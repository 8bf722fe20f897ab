"""A chain of the library's own samplers, built from stages that were checked before."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from perdure.engine.contract import Stage
from perdure.engine.llama import library
from perdure.engine.llama.declarations import LogitBias
from perdure.engine.llama.weights import Weights
from perdure.errors import SamplingError


class LlamaSampler:
    """Owns one native chain. Its state is what it has accepted; it is never shared."""

    def __init__(self, weights: Weights, stages: Sequence[Stage]) -> None:
        self._lib = lib = library.load()
        self._weights = weights
        params = lib.llama_sampler_chain_default_params()
        params.no_perf = True
        self.handle: Any = lib.llama_sampler_chain_init(params)
        for stage in stages:
            native = self._make(stage)
            # Adding NULL to a chain crashes later, so it must not get that far.
            if not native:
                raise SamplingError(f"the engine refused the sampler stage {stage.name}{stage.args}")
            lib.llama_sampler_chain_add(self.handle, native)

    def accept(self, token: int) -> None:
        """Count a token that was not sampled here, such as one of the prompt."""
        self._lib.llama_sampler_accept(self.handle, token)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._lib.llama_sampler_free(self.handle)
            self.handle = None

    def _make(self, stage: Stage) -> Any:
        lib, n_vocab, args = self._lib, self._weights.n_vocab, stage.args
        match stage.name:
            case "bias":
                pairs = (LogitBias * len(args))(*(LogitBias(token, bias) for token, bias in args))
                return lib.llama_sampler_init_logit_bias(n_vocab, len(args), pairs)
            case "penalties":
                return lib.llama_sampler_init_penalties(n_vocab, *args)
            case "dry":
                *numbers, breakers = args
                texts = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
                return lib.llama_sampler_init_dry(self._weights.vocab, *numbers, texts, len(breakers))
            case "top_k" | "temp" | "top_n_sigma" | "dist" | "greedy" | "mirostat_v2":
                return getattr(lib, f"llama_sampler_init_{stage.name}")(*args)
            case "top_p" | "min_p" | "typical":
                return getattr(lib, f"llama_sampler_init_{stage.name}")(*args, 1)
            case "xtc":
                probability, threshold, seed = args
                return lib.llama_sampler_init_xtc(probability, threshold, 1, seed)
            case "mirostat":
                return lib.llama_sampler_init_mirostat(n_vocab, *args, 100)
            case _:
                return None
