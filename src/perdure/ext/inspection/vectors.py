"""Control vectors from contrast pairs: the direction in which the hidden states of two kinds of texts differ.

    {"positive": "I am happy because", "negative": "I am sad because"}        # a line of a file of pairs

Each text is read once. What the layers hand on behind its last token is compared; the difference, by layer,
is written as a GGUF file that `adapters={"happy.gguf": 1.0}` adds to what the layers compute.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from perdure import InvalidInputError, Model, ModelFileError
from perdure.ext.weights.tensors import Planned, write_model
from perdure.spi.base import check_one_of
from perdure.spi.engine import Floats

MOST_PAIRS = 4096
_MOST_BYTES = 16 << 20
"""Of a file of pairs."""
METHODS = ("mean", "pca")
Method = Literal["mean", "pca"]


@dataclass(frozen=True, slots=True)
class ContrastPair:
    """Two texts that differ in what a vector is to stand for."""

    positive: str
    negative: str

    def __post_init__(self) -> None:
        if not self.positive or not self.negative:
            raise InvalidInputError("a contrast pair has two texts, and one is empty")
        if self.positive == self.negative:
            raise InvalidInputError(f"the texts of a contrast pair are the same: {self.positive[:60]!r}")


def read_pairs(path: str | os.PathLike[str]) -> list[ContrastPair]:
    """The pairs of a file of JSON lines."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise InvalidInputError(f"{path} has more than {_MOST_BYTES >> 20} MiB: give fewer pairs")
    pairs = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            texts = [record[key] for key in ("positive", "negative")]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InvalidInputError(
                f'{path}, line {number}: a pair is {{"positive": "…", "negative": "…"}}, got '
                f"{line[:60].decode('utf-8', 'replace')!r}"
            ) from None
        pairs.append(ContrastPair(*texts))
    return pairs


def directions(
    model: Model,
    pairs: Sequence[ContrastPair],
    *,
    method: Method = "mean",
    progress: Callable[[int, int], None] | None = None,
) -> Floats:
    """What separates the two kinds of texts, by (layer, number), from layer 1 on.

    `mean` is the average difference, so that a scale of 1 adds what the texts differ by; `pca` is the
    direction in which the differences vary together, as long as the average difference is along it.
    """
    check_one_of("method", method, METHODS)
    if not 1 <= len(pairs) <= MOST_PAIRS:
        raise InvalidInputError(f"a vector is made from 1 to {MOST_PAIRS} contrast pairs, got {len(pairs)}")
    texts = [text for pair in pairs for text in (pair.positive, pair.negative)]
    tokens = [model.tokenize(text) for text in texts]
    states = []
    for at, each in enumerate(tokens):
        hidden = model.trace(each, what="hidden").hidden
        if hidden is None or len(hidden) < 2:
            raise InvalidInputError("the layers of this model have no hidden states that can be traced")
        states.append(hidden[1:, -1].astype(np.float64))
        if progress is not None:
            progress(at + 1, len(tokens))
    apart = np.stack(states[0::2]) - np.stack(states[1::2])
    mean = apart.mean(axis=0)
    if method == "mean" or len(pairs) == 1:
        return np.asarray(mean, np.float32)
    vectors = np.empty_like(mean)
    for layer in range(mean.shape[0]):
        # Both signs of each difference: the first component then goes through the middle.
        both = np.concatenate([apart[:, layer], -apart[:, layer]])
        axis = np.linalg.svd(both, full_matrices=False)[2][0]
        vectors[layer] = axis * float(mean[layer] @ axis)
    return np.asarray(vectors, np.float32)


def write_vector(path: str | os.PathLike[str], vectors: Floats, architecture: str) -> None:
    """Write directions as a control vector in GGUF. The file appears when it is whole."""
    if not np.isfinite(vectors).all():
        raise InvalidInputError("a direction has values that are no numbers: it is not written")
    planned = [
        Planned(
            name=f"direction.{layer}",
            type="F32",
            shape=(vectors.shape[1],),
            pieces=lambda row=row: [np.ascontiguousarray(row, "<f4").view(np.uint8)],  # type: ignore[misc]
        )
        for layer, row in enumerate(vectors, 1)
    ]
    about: dict[str, str | int | float | Sequence[str]] = {
        "general.architecture": "controlvector",
        "controlvector.model_hint": architecture,
        "controlvector.layer_count": len(vectors),
    }
    write_model(Path(path), planned, texts=about)
