"""What a model is, whichever engine it is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from perdure.engine.context import Context
from perdure.engine.contract import Vocabulary
from perdure.engine.embedder import Embedder


class Model(Vocabulary, Protocol):
    """Weights and a vocabulary. It outlives its contexts, whatever the order of deletion."""

    @property
    def context(self) -> Callable[..., Context]:
        """Opens a context; takes `n_ctx` and `n_seq`, and what else the engine knows."""
        ...

    @property
    def embedder(self) -> Callable[..., Embedder]:
        """Opens a context for embeddings; takes `n_ctx` and `threads`, and what else the engine knows."""
        ...

    def close(self) -> None: ...
