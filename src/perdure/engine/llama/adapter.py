"""A LoRA adapter: a small change of the weights, chosen for each context."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from perdure.engine.llama.native import library
from perdure.engine.llama.native.log_sink import captured_errors
from perdure.engine.llama.weights import Weights
from perdure.errors import ModelLoadError
from perdure.identity import content_digest


class LlamaAdapter:
    """An adapter loaded onto one model's weights; the library frees it with them."""

    def __init__(self, weights: Weights, path: Path) -> None:
        self.path = path
        self.digest = content_digest(path)
        self.weights = weights
        with captured_errors() as reasons:
            self.handle: Any = library.load().llama_adapter_lora_init(weights.handle, os.fsencode(path))
        if not self.handle:
            raise ModelLoadError(
                f"{path.name} is no adapter for this model: {reasons}. "
                "An adapter fits only the model that it was trained on"
            )

    def __repr__(self) -> str:
        return f"<Adapter {self.path.name}>"
