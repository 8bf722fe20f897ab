"""safetensors files: a length, a JSON header, then the bytes of all tensors, one after the other.

    8 bytes      length of the header, little-endian
    header       {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {…}}
    data         offsets count from here

A header is believed only where every byte of the file is accounted for: no hole, no overlap, no name twice.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from perdure import InvalidInputError, ModelFileError, ModelNotFoundError
from perdure.spi.base import is_whole

LONGEST_HEADER = 100 << 20
"""The limit of the format's own library."""
_MOST_DIMENSIONS = 8
_METADATA = "__metadata__"

SIZES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes of an element, by type. `FLOATS` are those that can be read as numbers here."""
FLOATS = ("F32", "F16", "BF16")


class SafeTensor(NamedTuple):
    """One tensor: `shape` with the slowest dimension first, `offset` from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class SafetensorsHeader(NamedTuple):
    """What a safetensors file says about itself. Every tensor lies wholly inside the file."""

    path: Path
    metadata: Mapping[str, str]
    tensors: tuple[SafeTensor, ...]


def read_safetensors(path: str | os.PathLike[str]) -> SafetensorsHeader:
    """Read and check the header of a safetensors file. The tensors are not read, only measured."""
    place = Path(path)
    try:
        if not stat.S_ISREG(os.stat(place).st_mode):
            raise ModelFileError(f"{place} is not a file")
        with open(place, "rb", buffering=0) as file:
            return _HeaderReader(place, os.fstat(file.fileno()).st_size).read(file)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelNotFoundError(f"there is no file {place}") from None
    except OSError as error:
        raise ModelFileError(f"{place} cannot be read: {error.strerror or error}") from error


class _HeaderReader:
    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size

    def read(self, file: BinaryIO) -> SafetensorsHeader:
        start = file.read(8)
        if len(start) < 8:
            raise self._bad(f"it has {len(start)} bytes, a header needs 8 and more")
        length = int.from_bytes(start, "little")
        if length > LONGEST_HEADER or 8 + length > self._size:
            raise self._bad(
                f"its header claims {length} bytes; the file has {self._size}, "
                f"and a header {LONGEST_HEADER} at most"
            )
        raw = file.read(length)
        if len(raw) < length:
            raise self._bad(f"it shrank while it was read: {len(raw)} of {length} bytes of its header")
        header = self._parse(raw)
        metadata = self._metadata(header.pop(_METADATA, {}))
        tensors = [self._tensor(name, entry, 8 + length) for name, entry in header.items()]
        tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
        self._account(tensors, 8 + length)
        return SafetensorsHeader(self._path, metadata, tuple(tensors))

    def _bad(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self._path} is not a usable safetensors file: {reason}")

    def _parse(self, raw: bytes) -> dict[str, Any]:
        if not raw.startswith(b"{"):
            raise self._bad("its header is no JSON object")

        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            table = dict(pairs)
            if len(table) < len(pairs):
                names = [name for name, _ in pairs]
                twice = next(name for name in names if names.count(name) > 1)
                raise self._bad(f"its header names {twice[:80]!r} twice")
            return table

        try:
            header = json.loads(raw, object_pairs_hook=once)
        except RecursionError:
            raise self._bad("its header is nested too deeply") from None
        except ValueError as error:
            if isinstance(error, ModelFileError):
                raise
            raise self._bad(f"its header is no JSON: {error}") from None
        if not isinstance(header, dict):
            raise self._bad("its header is no JSON object")
        return header

    def _metadata(self, metadata: object) -> dict[str, str]:
        if metadata is None:
            # MLX writes it so where there is none.
            return {}
        if not isinstance(metadata, dict) or not all(isinstance(each, str) for each in metadata.values()):
            raise self._bad("its metadata is not a table of texts")
        return metadata

    def _tensor(self, name: str, entry: object, start: int) -> SafeTensor:
        shown = repr(name[:80])
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._bad(f"tensor {shown} needs dtype, shape and data_offsets, and nothing else")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in SIZES:
            raise self._bad(f"tensor {shown} has the unknown type {dtype!r}")
        if not _counts(shape) or len(shape) > _MOST_DIMENSIONS:
            raise self._bad(f"tensor {shown} has an impossible shape")
        if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._bad(f"tensor {shown} has impossible offsets")
        size = math.prod(shape) * SIZES[dtype]
        if offsets[1] - offsets[0] != size:
            raise self._bad(
                f"tensor {shown} of {dtype} and shape {shape} needs {size} bytes, "
                f"its offsets give {offsets[1] - offsets[0]}"
            )
        if start + offsets[1] > self._size:
            raise self._bad(
                f"tensor {shown} ends at byte {start + offsets[1]}, the file has {self._size}: "
                "fetch or copy it again"
            )
        return SafeTensor(name, dtype, tuple(shape), start + offsets[0], size)

    def _account(self, tensors: Sequence[SafeTensor], start: int) -> None:
        at = start
        for tensor in tensors:
            if tensor.offset != at:
                raise self._bad(f"tensor {tensor.name[:80]!r} is at byte {tensor.offset}, expected {at}")
            at += tensor.size
        if at != self._size:
            raise self._bad(f"its tensors end at byte {at}, the file has {self._size}")


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(is_whole(each) and 0 <= each < 1 << 63 for each in value)


def safetensors_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """The bytes before the data of a file with these tensors (name, type, shape), in this order."""
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        if name in header:
            raise InvalidInputError(f"the tensor {name!r} is given twice")
        end = at + math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The data begins at a multiple of 8 bytes, as the format's own library has it.
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw
