"""Names of options that are not ours: what was probably meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable

from perdure.errors import InvalidInputError

PEERS = {
    "n_threads": "threads",
    "num_thread": "threads",
    "n_gpu_layers": "gpu_layers",
    "num_gpu": "gpu_layers",
    "num_ctx": "n_ctx",
    "context_length": "n_ctx",
    "ctx": "n_ctx",
    "ctx_size": "n_ctx",
    "n_parallel": "slots",
    "num_parallel": "slots",
    "type_k": "k_type",
    "type_v": "v_type",
    "cache_type_k": "k_type",
    "cache_type_v": "v_type",
    "flash_attn": "flash",
    "chat_format": "template",
    "chat_template": "template",
    "kv_unified": "shared",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "temp": "temperature",
    "repetition_penalty": "repeat_penalty",
    "repeat_last_n": "penalty_last_n",
    "stop_sequences": "stop",
    "json_schema": "schema",
    "top_logprobs": "logprobs",
    "mirostat_mode": "mirostat",
    "num_return_sequences": "n",
}
"""Options of llama-cpp-python, Ollama, llama-server and Transformers, by our names."""


def refuse_unknown(given: Collection[str], function: Callable[..., object]) -> None:
    """Refuse keywords that `function` does not name: those that it has in its `**unknown`."""
    if not given:
        return
    names = set(inspect.signature(function).parameters) - {"self", "model", "source", "unknown"}
    if (error := unknown_options(given, names)) is not None:
        raise error


def unknown_options(given: Iterable[str], known: Collection[str]) -> InvalidInputError | None:
    """An error that names each option that is not among `known`, and the one that was probably meant."""
    said = []
    for name in given:
        if name in known:
            continue
        ours = PEERS.get(name.lower())
        if ours is not None and ours in known:
            said.append(f"{name!r} is called {ours!r} here")
        elif near := difflib.get_close_matches(name, known, n=1):
            said.append(f"there is no option {name!r}; did you mean {near[0]!r}?")
        else:
            said.append(f"there is no option {name!r}; there are {', '.join(sorted(known))}")
    return InvalidInputError("; ".join(said)) if said else None
