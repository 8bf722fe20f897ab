"""Several models into one, and a LoRA adapter into its base: tensor by tensor, a few rows at a time.

linear  the weighted mean
slerp   two models: along the arc between their tensors rather than the line, `t` of the way
ties    TIES: what each model changed about a base, the largest changes of each, with the sign that most of
        the weight agrees on

A tensor is written in the type that the first model has it in, unless another one is chosen.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from perdure import InvalidInputError, ModelFileError
from perdure.ext.weights.tensors import (
    Planned,
    Progress,
    Rows,
    TensorFile,
    TensorInfo,
    chunks,
    copied,
    from_floats,
    write_model,
)
from perdure.spi.base import content_digest, is_number

Method = Literal["linear", "slerp", "ties"]
METHODS: tuple[Method, ...] = ("linear", "slerp", "ties")
_PARALLEL = 0.9995
"""From this cosine on the arc is a line."""
_LORA_A, _LORA_B = ".lora_a", ".lora_b"

Part = Callable[[int, int], Rows]
"""Rows of a tensor that is made, by the first and their number."""


def merge(
    models: Mapping[str, float] | Mapping[Path, float],
    target: str | os.PathLike[str],
    *,
    method: Method = "linear",
    base: str | os.PathLike[str] | None = None,
    t: float = 0.5,
    density: float = 0.2,
    kind: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write one model out of several, each with its weight.

    `t` is how far `slerp` goes from the first to the second. `base` is what the models of `ties` were made
    from, and `density` the share of each one's changes that counts. `kind` is the type of the matrices that
    are written, such as F16.
    """
    _check(models, method, base, t, density)
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(path)) for path in models]
        origin = stack.enter_context(TensorFile(base)) if base is not None else None
        first = files[0]
        for other in [*files[1:], *([origin] if origin else [])]:
            _same_shape(first, other)
        weights = [float(weight) for weight in models.values()]

        def planned(tensor: TensorInfo) -> Planned:
            if not tensor.is_float:
                return copied(first, tensor)
            infos = [file.tensors[tensor.name] for file in files]
            of = len(files) + 2

            def part() -> Part:
                if method == "linear":
                    return _linear(files, infos, weights)
                if method == "slerp":
                    return _slerp(files, infos, t)
                assert origin is not None
                return _ties(origin, files, infos, weights, density)

            return _written(tensor, kind, part, of)

        about = {
            "perdure.version": version("perdure"),
            "perdure.merge.method": method,
            "perdure.merge.sources": ", ".join(
                f"{file.path.name} x {weight:g} {content_digest(file.path)}"
                for file, weight in zip(files, weights, strict=True)
            ),
        }
        tensors = [planned(tensor) for tensor in first.tensors.values()]
        write_model(Path(target), tensors, like=first, texts=about, progress=progress)
    return Path(target)


def fuse(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    scale: float = 1.0,
    kind: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a model with a LoRA adapter added to its weights: what the two would compute together."""
    if not is_number(scale) or not math.isfinite(scale):
        raise InvalidInputError(f"scale is a number, got {scale!r}")
    with TensorFile(base) as model, TensorFile(adapter) as lora:
        changes = _changes(model, lora, float(scale))

        def planned(tensor: TensorInfo) -> Planned:
            change = changes.get(tensor.name)
            if change is None:
                return copied(model, tensor)

            def part() -> Part:
                return lambda start, count: model.floats(tensor, start, count) + change(start, count)

            return _written(tensor, kind, part, 3)

        about = {
            "perdure.version": version("perdure"),
            "perdure.fuse.base_sha256": content_digest(model.path),
            "perdure.fuse.adapter": f"{lora.path.name} x {scale:g} {content_digest(lora.path)}",
        }
        tensors = [planned(tensor) for tensor in model.tensors.values()]
        write_model(Path(target), tensors, like=model, texts=about, progress=progress)
    return Path(target)


def _check(
    models: Mapping[str, float] | Mapping[Path, float],
    method: str,
    base: object,
    t: float,
    density: float,
) -> None:
    if method not in METHODS:
        raise InvalidInputError(f"there is no way to merge {method!r}; there are {', '.join(METHODS)}")
    if len(models) < (1 if method == "ties" else 2) or (method == "slerp" and len(models) != 2):
        raise InvalidInputError(
            f"{method} needs {'two models' if method != 'ties' else 'models'}, got {len(models)}"
        )
    if (method == "ties") != (base is not None):
        raise InvalidInputError("ties needs the base that the models were made from; the others take none")
    for path, weight in models.items():
        if not is_number(weight) or not math.isfinite(weight):
            raise InvalidInputError(f"the weight of {path} is a number, got {weight!r}")
    if method == "linear" and not sum(models.values()):
        raise InvalidInputError("the weights sum to 0")
    if not is_number(t) or not 0 <= t <= 1 or not is_number(density) or not 0 < density <= 1:
        raise InvalidInputError(f"t is from 0 to 1 and density above 0 to 1, got {t!r} and {density!r}")


def _same_shape(first: TensorFile, other: TensorFile) -> None:
    ours = {name: tensor.shape for name, tensor in first.tensors.items()}
    theirs = {name: tensor.shape for name, tensor in other.tensors.items()}
    if ours != theirs:
        apart = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
        raise InvalidInputError(
            f"{first.path.name} and {other.path.name} differ in {len(apart)} tensors or shapes, such as "
            f"{apart[0]}: only models of one architecture and size can be merged"
        )
    if (first.gguf is None) != (other.gguf is None):
        raise InvalidInputError(f"{first.path.name} and {other.path.name} are files of different formats")
    key = "tokenizer.ggml.tokens"
    if first.metadata.get(key) != other.metadata.get(key):
        raise InvalidInputError(f"{first.path.name} and {other.path.name} have different tokens")


def _written(tensor: TensorInfo, kind: str | None, part: Callable[[], Part], of: int) -> Planned:
    """A tensor out of rows that are made as they are written, in its own type or another."""
    # Norms and biases are small, and read by the engine as they are.
    target = kind.upper() if kind is not None and len(tensor.shape) > 1 else tensor.type

    def pieces() -> Iterator[NDArray[np.uint8]]:
        rows = part()
        for start, count in chunks(tensor, of):
            yield from_floats(target, rows(start, count))

    return Planned(name=tensor.name, type=target, shape=tensor.shape, pieces=pieces)


def _linear(files: Sequence[TensorFile], infos: Sequence[TensorInfo], weights: Sequence[float]) -> Part:
    total = sum(weights)

    def rows(start: int, count: int) -> Rows:
        out = np.zeros((count, infos[0].width), np.float64)
        for file, info, weight in zip(files, infos, weights, strict=True):
            out += (weight / total) * file.floats(info, start, count).astype(np.float64)
        return out.astype(np.float32)

    return rows


def _slerp(files: Sequence[TensorFile], infos: Sequence[TensorInfo], t: float) -> Part:
    dot = ours = theirs = 0.0
    for start, count in chunks(infos[0], 4):
        a, b = (
            file.floats(info, start, count).astype(np.float64)
            for file, info in zip(files, infos, strict=True)
        )
        dot, ours, theirs = dot + (a * b).sum(), ours + (a * a).sum(), theirs + (b * b).sum()
    lengths = math.sqrt(ours * theirs)
    cosine = min(1.0, max(-1.0, dot / lengths)) if lengths else 1.0
    if abs(cosine) > _PARALLEL:
        first, second = 1 - t, t
    else:
        angle = math.acos(cosine)
        first, second = (math.sin(x * angle) / math.sin(angle) for x in (1 - t, t))

    def rows(start: int, count: int) -> Rows:
        a, b = (
            file.floats(info, start, count).astype(np.float64)
            for file, info in zip(files, infos, strict=True)
        )
        return (first * a + second * b).astype(np.float32)

    return rows


def _ties(
    base: TensorFile,
    files: Sequence[TensorFile],
    infos: Sequence[TensorInfo],
    weights: Sequence[float],
    density: float,
) -> Part:
    origin = base.tensors[infos[0].name]

    def change(index: int, start: int, count: int) -> Rows:
        return files[index].floats(infos[index], start, count) - base.floats(origin, start, count)

    limits = []
    for index, info in enumerate(infos):
        count = max(1, round(density * info.width * info.rows))
        limits.append(_largest(lambda start, n, index=index: change(index, start, n), info, count))  # type: ignore[misc]

    def rows(start: int, count: int) -> Rows:
        changes = []
        for index, weight in enumerate(weights):
            moved = change(index, start, count)
            moved[np.abs(moved) < limits[index]] = 0.0
            changes.append(weight * moved.astype(np.float64))
        sign = np.sign(sum(changes))
        total = np.zeros_like(changes[0])
        shares = np.zeros_like(changes[0])
        for weight, weighted in zip(weights, changes, strict=True):
            agrees = (np.sign(weighted) == sign) & (weighted != 0)
            total += np.where(agrees, weighted, 0.0)
            shares += np.where(agrees, weight, 0.0)
        mean = np.divide(total, shares, out=np.zeros_like(total), where=shares != 0)
        return (base.floats(origin, start, count) + mean).astype(np.float32)

    return rows


def _largest(rows: Part, tensor: TensorInfo, count: int) -> np.float32:
    """The `count`-th largest magnitude, exactly: the bits of a float without its sign sort as it does, so two
    passes count the upper half of them and then, within one value of that, the lower."""

    def table(select: Callable[[NDArray[np.uint32]], NDArray[Any]]) -> NDArray[np.int64]:
        counts = np.zeros(1 << 16, np.int64)
        for start, n in chunks(tensor, 4):
            bits = np.abs(rows(start, n)).reshape(-1).view(np.uint32)
            counts += np.bincount(select(bits), minlength=1 << 16)
        return counts

    def place(counts: NDArray[np.int64], rank: int) -> tuple[int, int]:
        above = np.cumsum(counts[::-1])
        at = int(np.searchsorted(above, rank))
        return len(counts) - 1 - at, rank - int(above[at - 1] if at else 0)

    upper, left = place(table(lambda bits: bits >> 16), count)
    lower, _ = place(table(lambda bits: bits[bits >> 16 == upper] & 0xFFFF), left)
    limit: np.float32 = np.array([upper << 16 | lower], np.uint32).view(np.float32)[0]
    return limit


def _changes(model: TensorFile, lora: TensorFile, scale: float) -> dict[str, Part]:
    """What an adapter adds to each tensor."""
    about = lora.metadata
    if about.get("general.type") != "adapter" or about.get("adapter.type") != "lora":
        raise ModelFileError(f"{lora.path} is no LoRA adapter; `perdure convert` makes one of a PEFT folder")
    if about.get("general.architecture") != model.metadata.get("general.architecture"):
        raise InvalidInputError(
            f"{lora.path.name} is for {about.get('general.architecture')}, "
            f"{model.path.name} is {model.metadata.get('general.architecture')}"
        )
    alpha = about.get("adapter.lora.alpha")
    changes: dict[str, Part] = {}
    for name, first in lora.tensors.items():
        if not name.endswith(_LORA_A):
            continue
        of = name.removesuffix(_LORA_A)
        second, tensor = lora.tensors.get(of + _LORA_B), model.tensors.get(of)
        if second is None or tensor is None:
            raise InvalidInputError(f"{lora.path.name} changes {of}, which the model or the adapter lacks")
        rank = second.width
        factor = scale * float(alpha) / rank if is_number(alpha) and alpha else scale
        changes[of] = _product(lora, first, second, tensor, factor)
    if not changes:
        raise ModelFileError(f"{lora.path} changes no tensor")
    return changes


def _product(lora: TensorFile, a: TensorInfo, b: TensorInfo, tensor: TensorInfo, factor: float) -> Part:
    rank = b.width
    first, second = lora.floats(a), lora.floats(b)
    if tensor.name == "token_embd.weight" and first.shape == (tensor.rows, rank):
        # Tables: a row a token, and no product with what follows.
        return lambda start, count: factor * (first[start : start + count] @ second.T)
    experts = math.prod(tensor.shape[2:])
    out = tensor.rows // max(experts, 1)
    if first.shape != (rank * experts, tensor.width) or second.shape != (out * experts, rank):
        raise InvalidInputError(
            f"the adapter's {tensor.name} has shapes {a.shape} and {b.shape}, the model's has {tensor.shape}"
        )

    def rows(start: int, count: int) -> Rows:
        made = np.empty((count, tensor.width), np.float32)
        at = start
        while at < start + count:
            expert = at // out
            end = min((expert + 1) * out, start + count)
            own = first[expert * rank : (expert + 1) * rank]
            made[at - start : end - start] = factor * (second[at:end] @ own)
            at = end
        return made

    return rows
