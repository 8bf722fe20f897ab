"""LoRAs and control vectors on llama.cpp, loaded for one model's weights. Their files were judged before."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.engine.llama.native import library
from perdure.engine.llama.native.log_sink import captured_errors
from perdure.engine.llama.weights import LlamaWeights
from perdure.errors import InvalidInputError, ModelLoadError
from perdure.identity import content_digest
from perdure.models.adapter_file import AdapterFile

_loading = threading.Lock()


class LlamaAdapter:
    """A LoRA, loaded onto one model's weights; the library frees it with them."""

    def __init__(self, weights: LlamaWeights, file: AdapterFile) -> None:
        self.path = file.path
        self.digest = content_digest(file.path)
        self.invocation = file.invocation
        self.weights = weights
        # The library adds it to a list of the model's.
        with _loading, captured_errors() as reasons:
            self.handle: Any = library.load().llama_adapter_lora_init(weights.handle, os.fsencode(file.path))
        if not self.handle:
            raise ModelLoadError(
                f"{file.path.name} is no adapter for this model: {reasons}. "
                "An adapter fits only the model that it was trained on"
            )

    def __repr__(self) -> str:
        return f"<Adapter {self.path.name}>"


class ControlVector:
    """A direction for each of some layers, which is added to what they compute."""

    invocation: tuple[int, ...] = ()

    def __init__(self, weights: LlamaWeights, file: AdapterFile, layers: tuple[int, int] | None) -> None:
        lib = library.load()
        n_embd, n_layer = (
            int(ask(weights.handle)) for ask in (lib.llama_model_n_embd, lib.llama_model_n_layer)
        )
        first, last = (1, n_layer - 1) if layers is None else layers
        if not 1 <= first <= last < n_layer:
            raise InvalidInputError(
                f"the layers of {file.path.name} are FIRST-LAST from 1 to {n_layer - 1}, got {first}-{last}"
            )
        self.path = file.path
        self.weights = weights
        self.digest = f"{content_digest(file.path)}@{first}-{last}"
        self.rows: NDArray[np.float32] = file.read_vector(n_embd, n_layer)
        self.rows[: first - 1] = 0
        self.rows[last:] = 0

    def __repr__(self) -> str:
        return f"<ControlVector {self.path.name}>"
