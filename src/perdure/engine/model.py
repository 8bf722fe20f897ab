"""What a model is, whichever engine it is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Unpack

from perdure.engine.context import Context
from perdure.engine.contract import Adapter, ContextKeywords, Tokenizer
from perdure.engine.embedder import Embedder


class Model(Tokenizer, Protocol):
    """Weights and a vocabulary. It outlives its contexts, whatever the order of deletion."""

    @property
    def context(self) -> Callable[..., Context]:
        """Opens a context; takes `n_ctx` and `n_seq`, and what else the engine knows."""
        ...

    @property
    def embedder(self) -> Callable[..., Embedder]:
        """Opens a context for embeddings; takes `n_ctx` and `threads`, and what else the engine knows."""
        ...

    def adapter(self, path: str, *, layers: tuple[int, int] | None = None) -> Adapter:
        """A LoRA or a control vector for this model. A file that does not fit is refused."""
        ...

    def spare_sequences(self, n_ctx: int, **context: Unpack[ContextKeywords]) -> int:
        """How many more sequences of so many tokens the device of the cache has ample room for; 0 where the
        cache is in the machine's own memory."""
        ...

    def fit_context(
        self, n_ctx: int | None, slots: int | None, **context: Unpack[ContextKeywords]
    ) -> tuple[int, int]:
        """Tokens of a request and requests at once that fit into what is free. None is for it to choose."""
        ...

    def close(self) -> None: ...
