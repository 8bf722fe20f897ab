"""The tensors of a model file as floats, a few rows at a time, whatever the file's format and types.

A row is the fastest dimension. `TensorFile` reads GGUF (in one file or several) and safetensors;
`write_model` writes either. Numbers become other types by llama.cpp's own functions, so that a tensor
that is written has the bytes that the library would give it.
"""

from __future__ import annotations

import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perdure import InvalidInputError, ModelFileError, StoreFullError
from perdure.ext.weights.safetensors import FLOATS, read_safetensors, safetensors_header
from perdure.spi.base import Closing, atomic_write, system
from perdure.spi.llama import library
from perdure.spi.models import TENSOR_TYPES, Header, read_parts

Rows: TypeAlias = NDArray[np.float32]
CHUNK = 4 << 20
"""Numbers that are held of a tensor at once, in each file that is read."""

_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
_STRING, _UINT32, _ARRAY = 8, 4, 9
_ALIGNMENT = 32
Progress: TypeAlias = Callable[[int, int], None]
"""Called with how many bytes are done, and of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a file: `shape` has the fastest dimension first, as GGUF has it."""

    name: str
    type: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    size: int

    @property
    def width(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def rows(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def is_float(self) -> bool:
        """Whether it holds numbers that can be computed with: integers are copied."""
        return self.type not in ("I8", "I16", "I32", "I64", "F64", "BOOL") and self.size > 0


class TensorFile(Closing):
    """A model file whose tensors are read. Always holds: every tensor lies inside of its file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._files: dict[Path, BinaryIO] = {}
        self.gguf: Header | None = None
        """The header of a GGUF file (of its first part)."""
        self.metadata: Mapping[str, object]
        if self.path.suffix == ".safetensors":
            header = read_safetensors(self.path)
            self.metadata = header.metadata
            infos = [
                TensorInfo(
                    name=each.name,
                    type=each.dtype,
                    shape=each.shape[::-1],
                    path=self.path,
                    offset=each.offset,
                    size=each.size,
                )
                for each in header.tensors
            ]
        else:
            parts = read_parts(self.path)
            self.gguf = parts[0]
            self.metadata = parts[0].metadata
            infos = [
                TensorInfo(
                    name=each.name,
                    type=each.type.name,
                    shape=each.shape,
                    path=part.path,
                    offset=each.offset,
                    size=each.size,
                )
                for part in parts
                for each in part.tensors
            ]
        self.tensors: Mapping[str, TensorInfo] = {each.name: each for each in infos}

    def raw(self, tensor: TensorInfo, start: int = 0, count: int | None = None) -> NDArray[np.uint8]:
        """The bytes of rows of a tensor, from row `start`."""
        rows = tensor.rows if count is None else count
        row = tensor.size // max(tensor.rows, 1)
        data = np.empty(rows * row, np.uint8)
        file = self._file(tensor.path)
        file.seek(tensor.offset + start * row)
        at = 0
        while at < len(data):
            got = file.readinto(data[at:].data)  # type: ignore[attr-defined]
            if not got:
                raise ModelFileError(f"{tensor.path} shrank while {tensor.name} was read")
            at += got
        return data

    def floats(self, tensor: TensorInfo, start: int = 0, count: int | None = None) -> Rows:
        """Rows of a tensor as floats."""
        rows = tensor.rows if count is None else count
        return to_floats(tensor.type, self.raw(tensor, start, rows)).reshape(rows, tensor.width)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = open(path, "rb", buffering=0)  # noqa: SIM115
        return self._files[path]


def chunks(tensor: TensorInfo, of: int = 1) -> Iterator[tuple[int, int]]:
    """Rows of a tensor as (first, count), so many that `of` files' stay within `CHUNK` numbers."""
    step = max(1, CHUNK // max(1, tensor.width * of))
    for start in range(0, tensor.rows, step):
        yield start, min(step, tensor.rows - start)


def to_floats(kind: str, raw: NDArray[np.uint8]) -> Rows:
    """Bytes of a tensor type as floats."""
    if kind == "F32":
        return raw.view("<f4")
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    if kind == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if kind not in _NUMBERS:
        raise InvalidInputError(f"tensors of type {kind} cannot be read as numbers; F32, F16 and BF16 can")
    traits = library.load().ggml_get_type_traits(_NUMBERS[kind]).contents
    known = TENSOR_TYPES[_NUMBERS[kind]]
    if (traits.block, traits.size) != (known.block, known.size) or not traits.to_float:
        raise InvalidInputError(f"the llama.cpp library in use cannot read tensors of type {kind}")
    numbers = np.empty(len(raw) // known.size * known.block, np.float32)
    traits.to_float(raw.ctypes.data, numbers.ctypes.data, numbers.size)
    return numbers


def from_floats(kind: str, rows: Rows) -> NDArray[np.uint8]:
    """Rows as bytes of a tensor type, as llama.cpp writes them without an importance matrix."""
    rows = np.ascontiguousarray(rows, np.float32)
    if kind == "F32":
        return rows.reshape(-1).view(np.uint8)
    if kind not in _NUMBERS:
        raise InvalidInputError(f"there is no tensor type {kind}")
    lib, known = library.load(), TENSOR_TYPES[_NUMBERS[kind]]
    if lib.ggml_quantize_requires_imatrix(_NUMBERS[kind]):
        raise InvalidInputError(
            f"tensors of type {kind} are written with an importance matrix only: "
            "write F16, then `perdure quantize`"
        )
    count, width = rows.shape
    if width % known.block:
        raise InvalidInputError(f"type {kind} needs rows of a multiple of {known.block} numbers, not {width}")
    raw = np.empty(rows.size // known.block * known.size, np.uint8)
    done = lib.ggml_quantize_chunk(_NUMBERS[kind], rows.ctypes.data, raw.ctypes.data, 0, count, width, None)
    if done != len(raw):
        raise InvalidInputError(f"the llama.cpp library in use cannot write tensors of type {kind}")
    return raw


def byte_size(kind: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of a type and shape."""
    known = TENSOR_TYPES[_NUMBERS[kind]]
    return math.prod(shape) // known.block * known.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A tensor to be written: its bytes come in pieces, in order."""

    name: str
    type: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[NDArray[np.uint8]]]


def copied(source: TensorFile, tensor: TensorInfo) -> Planned:
    """A tensor copied unchanged from a file."""

    def pieces() -> Iterator[NDArray[np.uint8]]:
        for start, count in chunks(tensor):
            yield source.raw(tensor, start, count)

    return Planned(name=tensor.name, type=tensor.type, shape=tensor.shape, pieces=pieces)


def write_model(
    path: Path,
    tensors: Sequence[Planned],
    *,
    like: TensorFile | None = None,
    texts: Mapping[str, str | int | float | Sequence[str]] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a model file: GGUF, or safetensors where its name says so.

    `like` gives the metadata, copied unchanged but for `texts`, which are set on top. The file appears when
    it is whole; one that was there stays until then.
    """
    texts = dict(texts or {})
    if path.suffix == ".safetensors":
        metadata = {} if like is None or like.gguf else {k: str(v) for k, v in like.metadata.items()}
        metadata |= {key: str(value) for key, value in texts.items()}
        for tensor in tensors:
            if tensor.type not in FLOATS:
                raise InvalidInputError(f"safetensors holds F32, F16 and BF16 here, not {tensor.type}")
        head = safetensors_header([(t.name, t.type, t.shape[::-1]) for t in tensors], metadata)
        alignment = 1
    else:
        header = like.gguf if like is not None else None
        head = gguf_header(tensors, header, texts)
        alignment = header.alignment if header else _ALIGNMENT
    sizes = [byte_size(tensor.type, tensor.shape) for tensor in tensors]
    total = sum(sizes)
    with finished(path, len(head) + total + alignment * len(sizes)) as file:
        file.write(head)
        done = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            wrote = 0
            for piece in tensor.pieces():
                file.write(np.ascontiguousarray(piece).data)
                wrote += len(piece)
                done += len(piece)
                if progress:
                    progress(done, total)
            if wrote != size:
                raise InvalidInputError(f"tensor {tensor.name} gave {wrote} bytes of {size}")
            file.write(bytes(-size % alignment))


@contextmanager
def finished(path: Path, size: int) -> Iterator[BinaryIO]:
    """A file of about `size` bytes that becomes `path` when the block ends well."""
    check_free_space(path, size)
    with atomic_write(path) as file:
        yield file
    system.sync_folder(path.parent)


def check_free_space(path: Path, size: int) -> None:
    """Refuse a file that would not fit, before anything is written."""
    if not path.parent.is_dir():
        raise InvalidInputError(f"there is no folder {path.parent} to write {path.name} into")
    if path.is_dir():
        raise InvalidInputError(f"{path} is a folder; name the file to write")
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise StoreFullError(f"{path} needs {size} bytes, {free} are free", needed=size)


def gguf_header(
    tensors: Sequence[Planned],
    like: Header | None,
    texts: Mapping[str, str | int | float | Sequence[str]],
) -> bytes:
    """The bytes before the data of a GGUF file."""
    pairs = []
    alignment = like.alignment if like else _ALIGNMENT
    if like is not None:
        with open(like.path, "rb") as file:
            for key, (start, end) in like.spans.items():
                # The parts of a model become one file.
                if key in texts or key.startswith("split."):
                    continue
                file.seek(start)
                pairs.append(file.read(end - start))
    pairs += [_string(key.encode()) + _value(value) for key, value in texts.items()]
    infos, at = [], 0
    for tensor in tensors:
        infos.append(
            _string(tensor.name.encode())
            + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
            + struct.pack("<IQ", _NUMBERS[tensor.type], at)
        )
        size = byte_size(tensor.type, tensor.shape)
        at += size + -size % alignment
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % alignment)


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _value(value: str | int | float | Sequence[str]) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value.encode())
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(_string(v.encode()) for v in value)
