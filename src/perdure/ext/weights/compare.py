"""Two model files, tensor by tensor: what only one has, and how far the numbers of the others lie apart."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from perdure.ext.weights.tensors import Progress, TensorFile, TensorInfo, chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How one tensor differs. `relative` is the error's root mean square, divided by that of the first."""

    name: str
    types: tuple[str, str]
    shape: tuple[int, ...]
    same_bytes: bool
    largest: float
    relative: float
    cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two files. `metadata` has the keys whose values differ, with both; None where a file lacks one."""

    tensors: tuple[TensorDifference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    other_shape: tuple[str, ...]
    metadata: Mapping[str, tuple[str | None, str | None]]

    @property
    def same_tensors(self) -> bool:
        """Whether both hold the same tensors with the same bytes; metadata may differ."""
        apart = self.only_first or self.only_second or self.other_shape
        return not apart and all(each.same_bytes for each in self.tensors)


def compare(
    first: str | os.PathLike[str], second: str | os.PathLike[str], *, progress: Progress | None = None
) -> Comparison:
    """Compare two model files, GGUF or safetensors, reading a few rows of both at a time."""
    with TensorFile(first) as ours, TensorFile(second) as theirs:
        both = [name for name in ours.tensors if name in theirs.tensors]
        alike = [name for name in both if ours.tensors[name].shape == theirs.tensors[name].shape]
        total = sum(ours.tensors[name].size for name in alike)
        differences, done = [], 0
        for name in alike:
            differences.append(_difference(ours, theirs, ours.tensors[name], theirs.tensors[name]))
            done += ours.tensors[name].size
            if progress:
                progress(done, total)
        return Comparison(
            tensors=tuple(differences),
            only_first=tuple(name for name in ours.tensors if name not in theirs.tensors),
            only_second=tuple(name for name in theirs.tensors if name not in ours.tensors),
            other_shape=tuple(name for name in both if name not in alike),
            metadata=dict(_metadata(ours.metadata, theirs.metadata)),
        )


def _difference(ours: TensorFile, theirs: TensorFile, a: TensorInfo, b: TensorInfo) -> TensorDifference:
    same, largest = a.type == b.type, 0.0
    error = square_a = square_b = product = 0.0
    numbers = a.is_float and b.is_float
    for start, count in chunks(a, of=2):
        if a.type == b.type and np.array_equal(ours.raw(a, start, count), theirs.raw(b, start, count)):
            if numbers:
                x = ours.floats(a, start, count).astype(np.float64)
                square = float(np.square(x).sum())
                square_a, square_b, product = square_a + square, square_b + square, product + square
            continue
        same = False
        if not numbers:
            error = largest = math.nan
            continue
        x, y = (file.floats(t, start, count).astype(np.float64) for file, t in ((ours, a), (theirs, b)))
        apart = x - y
        largest = max(largest, float(np.abs(apart).max(initial=0.0)))
        error += float(np.square(apart).sum())
        square_a += float(np.square(x).sum())
        square_b += float(np.square(y).sum())
        product += float((x * y).sum())
    lengths = math.sqrt(square_a * square_b)
    return TensorDifference(
        name=a.name,
        types=(a.type, b.type),
        shape=a.shape,
        same_bytes=same,
        largest=largest,
        relative=math.sqrt(error / square_a) if square_a else (0.0 if same else math.inf),
        cosine=product / lengths if lengths else (1.0 if same else 0.0),
    )


def _metadata(
    ours: Mapping[str, object], theirs: Mapping[str, object]
) -> Iterator[tuple[str, tuple[str | None, str | None]]]:
    for key in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(key), theirs.get(key)
        if not _equal(a, b):
            yield key, (_shown(a), _shown(b))


def _equal(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and np.array_equal(np.asarray(a), np.asarray(b))
    return type(a) is type(b) and a == b


def _shown(value: object) -> str | None:
    if value is None:
        return None
    text = str(value) if isinstance(value, str | int | float) else f"{len(value)} items"  # type: ignore[arg-type]
    return text if len(text) <= 60 else text[:59] + "…"
