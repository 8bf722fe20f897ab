"""Texts as vectors: what requests for them give. An extension makes them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from perdure.engine.contract import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """Vectors of length 1, a row a text, and how many tokens each text had."""

    vectors: Floats
    tokens: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedText:
    """A document, by its place among those given, and how well it answers the query.

    A model that scores pairs gives any number, any other one the cosine of two vectors: from -1 to 1.
    """

    index: int
    score: float


def ranked(embeddings: Embeddings, *, scored: bool) -> list[RankedText]:
    """Documents, the best first, out of scores of pairs, or of vectors with the query's at the front."""
    # The vectors have length 1.
    cosines = np.clip(embeddings.vectors[1:] @ embeddings.vectors[0], -1.0, 1.0)
    scores = embeddings.vectors[:, 0] if scored else cosines
    return [RankedText(index=int(at), score=float(scores[at])) for at in np.argsort(-scores, kind="stable")]


def cut(embeddings: Embeddings, dimensions: int | None) -> Embeddings:
    """Vectors of the first so many numbers, at length 1 again: for models that were trained to be cut."""
    if dimensions is None or dimensions == embeddings.vectors.shape[1]:
        return embeddings
    vectors = embeddings.vectors[:, :dimensions].astype(np.float64)
    lengths = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    return Embeddings((vectors / np.where(lengths > 0, lengths, 1.0)).astype(np.float32), embeddings.tokens)


class EmbeddingFuture(Future[Embeddings]):
    """Vectors that are being made. Cancel it to have no more texts read."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens_read = 0
        """Tokens of the texts that were read so far, also of a future that was cancelled since."""

    def set_result(self, result: Embeddings) -> None:
        self.tokens_read = sum(result.tokens)
        super().set_result(result)
