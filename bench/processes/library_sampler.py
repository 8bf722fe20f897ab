"""The library's own sampler chain: what our sampling is measured against and held to."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.engine.llama.native import library
from perdure.request_options import Sampling


class ChainParams(ctypes.Structure):
    """`llama_sampler_chain_params`."""

    _fields_ = (("no_perf", c_bool),)


class LogitBias(ctypes.Structure):
    """`llama_logit_bias`."""

    _fields_ = (("token", c_int32), ("bias", c_float))


class TokenDataArray(ctypes.Structure):
    """`llama_token_data_array`."""

    _fields_ = (("data", c_void_p), ("size", c_size_t), ("selected", c_int64), ("sorted", c_bool))


TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_sampler_chain_default_params": (ChainParams, []),
    "llama_sampler_chain_init": (c_void_p, [ChainParams]),
    "llama_sampler_chain_add": (None, [c_void_p, c_void_p]),
    "llama_sampler_free": (None, [c_void_p]),
    "llama_sampler_accept": (None, [c_void_p, c_int32]),
    "llama_sampler_apply": (None, [c_void_p, POINTER(TokenDataArray)]),
    "llama_sampler_sample": (c_int32, [c_void_p, c_void_p, c_int32]),
    "llama_sampler_init_greedy": (c_void_p, []),
    "llama_sampler_init_dist": (c_void_p, [c_uint32]),
    "llama_sampler_init_top_k": (c_void_p, [c_int32]),
    "llama_sampler_init_top_p": (c_void_p, [c_float, c_size_t]),
    "llama_sampler_init_min_p": (c_void_p, [c_float, c_size_t]),
    "llama_sampler_init_typical": (c_void_p, [c_float, c_size_t]),
    "llama_sampler_init_temp": (c_void_p, [c_float]),
    "llama_sampler_init_top_n_sigma": (c_void_p, [c_float]),
    "llama_sampler_init_xtc": (c_void_p, [c_float, c_float, c_size_t, c_uint32]),
    "llama_sampler_init_mirostat": (c_void_p, [c_int32, c_uint32, c_float, c_float, c_int32]),
    "llama_sampler_init_mirostat_v2": (c_void_p, [c_uint32, c_float, c_float]),
    "llama_sampler_init_penalties": (c_void_p, [c_int32, c_int32, c_float, c_float, c_float]),
    "llama_sampler_init_dry": (
        c_void_p,
        [c_void_p, c_float, c_float, c_int32, c_int32, POINTER(c_char_p), c_size_t],
    ),
    "llama_sampler_init_logit_bias": (c_void_p, [c_int32, c_int32, POINTER(LogitBias)]),
}


class LibrarySampler:
    """One native chain. Its state is what it has accepted; it is freed with this object."""

    def __init__(
        self,
        sampling: Sampling,
        *,
        n_vocab: int,
        n_ctx: int,
        vocab: Any = None,
        handles: Sequence[ctypes.CDLL] = (),
    ) -> None:
        self._n_vocab = n_vocab
        self._vocab = vocab
        handles = handles or library.loaded()._handles
        self._call = {name: _function(name, handles) for name in _FUNCTIONS}
        self._sample = self._call["llama_sampler_sample"]
        self.handle: Any = self._call["llama_sampler_chain_init"](ChainParams(True))
        for name, *arguments in self._stages(sampling, n_ctx):
            native = self._call[f"llama_sampler_init_{name}"](*arguments)
            assert native, f"the library refused {name}{arguments}"
            self._call["llama_sampler_chain_add"](self.handle, native)

    def accept(self, token: int) -> None:
        self._call["llama_sampler_accept"](self.handle, token)

    def apply(self, row: NDArray[np.float32]) -> tuple[dict[int, float], int]:
        """The tokens that a row leaves, with their probabilities, and the one that was drawn."""
        data = np.zeros(len(row), TOKEN_DATA)
        data["id"], data["logit"] = np.arange(len(row)), row
        array = TokenDataArray(data.ctypes.data, len(row), -1, False)
        self._call["llama_sampler_apply"](self.handle, ctypes.byref(array))
        # XTC moves the start.
        start = (array.data - data.ctypes.data) // TOKEN_DATA.itemsize
        left = data[start : start + array.size]
        return dict(zip(left["id"].tolist(), left["p"].tolist(), strict=True)), int(
            left["id"][array.selected]
        )

    def sample(self, context: Any, index: int) -> int:
        return int(self._sample(self.handle, context, index))

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self._call["llama_sampler_free"](handle)
            self.handle = None

    def _stages(self, sampling: Sampling, n_ctx: int) -> list[tuple[Any, ...]]:
        """The chain in the order of the library's own programs; a neutral stage is left out."""
        seed = sampling.seed or 0
        stages: list[tuple[Any, ...]] = []
        if bias := sorted(sampling.logit_bias.items()):
            pairs = (LogitBias * len(bias))(*(LogitBias(token, value) for token, value in bias))
            stages.append(("logit_bias", self._n_vocab, len(bias), pairs))
        penalties = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        if penalties != (1, 0, 0) and sampling.penalty_last_n:
            stages.append(("penalties", self._n_vocab, _span(sampling.penalty_last_n, n_ctx), *penalties))
        if sampling.dry_multiplier and sampling.dry_last_n:
            texts = [text.encode() for text in sampling.dry_breakers]
            numbers = (sampling.dry_multiplier, sampling.dry_base, sampling.dry_allowed_length)
            span = _span(sampling.dry_last_n, n_ctx)
            stages.append(("dry", self._vocab, *numbers, span, (c_char_p * len(texts))(*texts), len(texts)))
        if sampling.greedy:
            return [*stages, ("greedy",)]
        if sampling.mirostat:
            aims = (seed, sampling.mirostat_tau, sampling.mirostat_eta)
            last = (
                ("mirostat", self._n_vocab, *aims, 100) if sampling.mirostat == 1 else ("mirostat_v2", *aims)
            )
            return [*stages, ("temp", sampling.temperature), last]
        if sampling.top_n_sigma:
            stages.append(("top_n_sigma", sampling.top_n_sigma))
        if sampling.top_k:
            stages.append(("top_k", sampling.top_k))
        if sampling.typical_p < 1:
            stages.append(("typical", sampling.typical_p, 1))
        if sampling.top_p < 1:
            stages.append(("top_p", sampling.top_p, 1))
        if sampling.min_p:
            stages.append(("min_p", sampling.min_p, 1))
        if sampling.xtc_probability:
            stages.append(("xtc", sampling.xtc_probability, sampling.xtc_threshold, 1, seed))
        return [*stages, ("temp", sampling.temperature), ("dist", seed)]


def _function(name: str, handles: Sequence[ctypes.CDLL]) -> Any:
    result, arguments = _FUNCTIONS[name]
    for handle in handles:
        if hasattr(handle, name):
            found = handle[name]
            found.restype, found.argtypes = result, arguments
            return found
    raise AttributeError(f"this library has no {name}")


def _span(last_n: int, n_ctx: int) -> int:
    return n_ctx if last_n < 0 else min(last_n, n_ctx)
