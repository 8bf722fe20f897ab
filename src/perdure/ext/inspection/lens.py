"""The logit lens: what each layer's hidden state would say, were it the last.

The head of the model (its last norm and its matrix of tokens) is read from the file and applied to the hidden
states of a trace. It is checked on the last layer, whose answer the engine has given too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from perdure import InvalidInputError, Trace
from perdure.ext.inspection.tracer import MOST_BYTES
from perdure.ext.weights.tensors import TensorFile
from perdure.spi.engine import Floats

_ROWS = 4096
"""Rows of the matrix that are held as floats at once."""
_CLOSE = 0.05
"""How far the head's answer may lie from the engine's, as a part of the range of logits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lens:
    """What layers say the next token is, by (layer, token of the text, place)."""

    layers: tuple[int, ...]
    tokens: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    """The likeliest tokens, best first."""
    probabilities: Floats
    """Theirs."""


def logit_lens(path: str | os.PathLike[str], trace: Trace, *, top: int = 3) -> Lens:
    """The likeliest next tokens by layer, of a trace with hidden states up to the last layer."""
    if trace.hidden is None:
        raise InvalidInputError("the lens reads hidden states: trace them with what=('hidden',)")
    with TensorFile(path) as file:
        normed = _normed(file, trace.hidden)
        layers, count, width = normed.shape
        flat = normed.reshape(-1, width)
        name = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        matrix = file.tensors[name]
        if matrix.width != width:
            raise InvalidInputError(f"the head of this model takes {matrix.width} numbers, not {width}")
        if (needed := 4 * len(flat) * matrix.rows) > MOST_BYTES:
            raise InvalidInputError(
                f"the lens would take {needed / 2**30:.1f} GiB: give it fewer tokens or layers"
            )
        logits = np.empty((len(flat), matrix.rows), np.float32)
        for start in range(0, matrix.rows, _ROWS):
            rows = min(_ROWS, matrix.rows - start)
            logits[:, start : start + rows] = flat @ file.floats(matrix, start, rows).T
    _check(logits[-1], trace.logits)
    best = np.argpartition(-logits, top, axis=1)[:, :top]
    values = np.take_along_axis(logits, best, axis=1)
    order = np.argsort(-values, axis=1)
    best, values = np.take_along_axis(best, order, axis=1), np.take_along_axis(values, order, axis=1)
    norm = np.log(np.exp(logits - values[:, :1]).sum(axis=1, keepdims=True)) + values[:, :1]
    shape = (layers, count, top)
    return Lens(
        layers=trace.layers,
        tokens=best.reshape(shape),
        probabilities=np.exp(values - norm).astype(np.float32).reshape(shape),
    )


def _normed(file: TensorFile, hidden: Floats) -> Floats:
    if "output_norm.weight" not in file.tensors or "output_norm.bias" in file.tensors:
        raise InvalidInputError("the head of this model is not one that the lens knows (an RMS norm)")
    architecture = file.metadata.get("general.architecture", "")
    epsilon = float(file.metadata.get(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5))  # type: ignore[arg-type]
    weight = file.floats(file.tensors["output_norm.weight"], 0, 1).reshape(-1)
    scale = np.sqrt(np.mean(hidden.astype(np.float64) ** 2, axis=-1, keepdims=True) + epsilon)
    return np.asarray(hidden / scale * weight, np.float32)


def _check(ours: Floats, theirs: Floats) -> None:
    span = float(np.ptp(theirs)) or 1.0
    if float(np.abs(ours - theirs).max()) > _CLOSE * span:
        raise InvalidInputError(
            "the lens cannot be used: this model's head does more than a norm and a matrix, or the trace "
            "does not end with its last layer"
        )
