"""The header of a GGUF file: metadata and tensor infos, checked before anything is believed."""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perdure.checks import is_whole
from perdure.errors import ModelFileError, ModelNotFoundError
from perdure.models.buffer import LONGEST_HEADER, Buffer
from perdure.models.quants import TENSOR_TYPES, TensorType
from perdure.models.strings import Strings, read_strings

Value: TypeAlias = int | float | bool | str | NDArray[Any] | Strings

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# The engine's own limits: it refuses a file beyond them, so we do it first, with a reason.
_MOST_DIMENSIONS = 4
_LONGEST_TENSOR_NAME = 63
_MOST_ELEMENTS = 2**63 - 1
# The fewest bytes that one entry can take: a name's length, a type, and what follows it.
_SMALLEST_PAIR = 13
_SMALLEST_TENSOR = 24

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, tuple[struct.Struct, np.dtype[Any]]] = {
    kind: (struct.Struct("<" + code), np.dtype(dtype))
    for kind, code, dtype in [
        (0, "B", "u1"),
        (1, "b", "i1"),
        (2, "H", "<u2"),
        (3, "h", "<i2"),
        (4, "I", "<u4"),
        (5, "i", "<i4"),
        (6, "f", "<f4"),
        (_BOOL, "B", "?"),
        (10, "Q", "<u8"),
        (11, "q", "<i8"),
        (12, "d", "<f8"),
    ]
}
_TYPE_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")

_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from
_array_head = struct.Struct("<IQ").unpack_from
_dimensions = [struct.Struct(f"<{n}Q").unpack_from for n in range(_MOST_DIMENSIONS + 1)]
_tensor_tail = struct.Struct("<IQ").unpack_from


class Tensor(NamedTuple):
    """One tensor: `shape` as the file has it (fastest dimension first), `offset` from the file's start."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a GGUF file says about itself. Every tensor lies wholly inside the file."""

    path: Path
    size: int
    version: int
    alignment: int
    data_offset: int
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]

    def integer(self, key: str) -> int | None:
        """The metadata value if it is one whole number."""
        value = self.metadata.get(key)
        return value if is_whole(value) else None

    def text(self, key: str) -> str | None:
        """The metadata value if it is one string."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of one GGUF file. The weights are not read, only measured."""
    place = Path(path)
    if "\0" in str(place):
        raise ModelNotFoundError(f"there is no file {str(place)!r}: a name cannot hold NUL")
    try:
        # Opening a pipe would wait for a writer, and a device has no size to check against.
        if not stat.S_ISREG(os.stat(place).st_mode):
            raise ModelFileError(f"{place} is not a file; name the .gguf file itself")
        with open(place, "rb", buffering=0) as file:
            return _Reader(Buffer(file, place, os.fstat(file.fileno()).st_size)).header()
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(f"there is no file {place}") from None
    except OSError as error:
        raise ModelFileError(f"{place} cannot be read: {error.strerror or error}") from error


class _Reader:
    """One pass over a header, front to back."""

    __slots__ = ("_at", "_buffer")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._at = 0

    def header(self) -> Header:
        buffer = self._buffer
        version = self._version()
        buffer.need(24, "the header")
        (n_tensors,) = _u64(buffer.data, 8)
        (n_pairs,) = _u64(buffer.data, 16)
        self._at = 24
        self._fits(n_pairs, _SMALLEST_PAIR, "metadata values")
        self._fits(n_tensors, _SMALLEST_TENSOR, "tensors")
        metadata, kinds = self._metadata(n_pairs)
        alignment = self._alignment(metadata, kinds)
        infos = [self._tensor_info() for _ in range(n_tensors)]
        data_offset = -(-self._at // alignment) * alignment
        return Header(
            path=buffer.path,
            size=buffer.size,
            version=version,
            alignment=alignment,
            data_offset=data_offset,
            metadata=MappingProxyType(metadata),
            tensors=self._place(infos, data_offset, alignment),
        )

    def _bad(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self._buffer.path} is not a usable GGUF file: {reason}")

    def _version(self) -> int:
        buffer = self._buffer
        if not buffer.size:
            raise self._bad("it is empty")
        if buffer.data[:4] != b"GGUF":
            raise self._bad(f"it begins with {buffer.data[:4]!r} and not with b'GGUF'")
        buffer.need(8, "the header")
        version: int = _u32(buffer.data, 4)[0]
        if version in _VERSIONS:
            return version
        if int.from_bytes(buffer.data[4:8], "big") <= 0xFFFF and version > 0xFFFF:
            raise self._bad("it is big-endian; convert it to little-endian first")
        raise self._bad(f"its format version is {version}; versions 2 and 3 can be read")

    def _fits(self, count: int, smallest: int, what: str) -> None:
        room = (min(self._buffer.size, LONGEST_HEADER) - self._at) // smallest
        if count > room:
            raise self._bad(f"it claims {count} {what}, at most {room} fit into {self._buffer.size} bytes")

    def _string(self, what: str) -> bytes:
        buffer, at = self._buffer, self._at
        buffer.need(at + 8, what)
        length: int = _u64(buffer.data, at)[0]
        end = at + 8 + length
        buffer.need(end, what)
        self._at = end
        return buffer.data[at + 8 : end]

    def _name(self, what: str) -> str:
        raw = self._string(what)
        if not raw:
            raise self._bad(f"{what} is empty")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._bad(f"{what} is not UTF-8: {raw[:40]!r}") from None

    def _metadata(self, count: int) -> tuple[dict[str, Value], dict[str, int]]:
        values: dict[str, Value] = {}
        kinds: dict[str, int] = {}
        for number in range(count):
            key = self._name(f"the name of metadata value {number}")
            if key in values:
                raise self._bad(f"the metadata key {key!r} appears twice")
            self._buffer.need(self._at + 4, f"the type of {key!r}")
            kind: int = _u32(self._buffer.data, self._at)[0]
            self._at += 4
            values[key] = self._value(key, kind)
            kinds[key] = kind
        return values, kinds

    def _value(self, key: str, kind: int) -> Value:
        if kind == _STRING:
            return self._string(repr(key)).decode("utf-8", "replace")
        if kind == _ARRAY:
            return self._array(key)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self._bad(f"the metadata value {key!r} has the unknown type {kind}")
        reader = scalar[0]
        end = self._at + reader.size
        self._buffer.need(end, repr(key))
        value: int | float = reader.unpack_from(self._buffer.data, self._at)[0]
        self._at = end
        return self._truth(key, value) if kind == _BOOL else value

    def _truth(self, key: str, value: int | float) -> bool:
        if value not in (0, 1):
            raise self._bad(f"the truth value {key!r} is {value}, not 0 or 1")
        return bool(value)

    def _array(self, key: str) -> NDArray[Any] | Strings:
        buffer = self._buffer
        what = f"the array {key!r}"
        buffer.need(self._at + 12, what)
        kind, count = _array_head(buffer.data, self._at)
        self._at += 12
        if kind == _STRING:
            strings, self._at = read_strings(buffer, self._at, count, what)
            return strings
        scalar = _SCALARS.get(kind)
        if scalar is None:
            nested = "an array of arrays" if kind == _ARRAY else f"of the unknown type {kind}"
            raise self._bad(f"the metadata value {key!r} is {nested}")
        dtype = scalar[1]
        end = self._at + count * dtype.itemsize
        buffer.need(end, f"{what} of {count} {_TYPE_NAMES[kind]}")
        raw = buffer.data[self._at : end]
        self._at = end
        if kind == _BOOL and raw.translate(None, b"\0\1"):
            raise self._bad(f"the truth values of {key!r} are not all 0 or 1")
        return np.frombuffer(raw, dtype)

    def _alignment(self, metadata: Mapping[str, Value], kinds: Mapping[str, int]) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if kinds.get("general.alignment", 4) != 4 or not isinstance(value, int):
            raise self._bad("general.alignment is not a u32")
        if value <= 0 or value & (value - 1):
            raise self._bad(f"general.alignment is {value}, not a power of two")
        return value

    def _tensor_info(self) -> tuple[str, TensorType, tuple[int, ...], int]:
        buffer = self._buffer
        name = self._name("the name of a tensor")
        if len(name.encode()) > _LONGEST_TENSOR_NAME:
            raise self._bad(f"a tensor's name has more than {_LONGEST_TENSOR_NAME} bytes: {name[:80]!r}")
        at = self._at
        what = f"the info of tensor {name!r}"
        buffer.need(at + 4, what)
        rank: int = _u32(buffer.data, at)[0]
        if rank > _MOST_DIMENSIONS:
            raise self._bad(f"tensor {name!r} has {rank} dimensions, more than {_MOST_DIMENSIONS}")
        tail = at + 4 + 8 * rank
        buffer.need(tail + 12, what)
        shape = _dimensions[rank](buffer.data, at + 4)
        kind, offset = _tensor_tail(buffer.data, tail)
        self._at = tail + 12
        tensor_type = TENSOR_TYPES.get(kind)
        if tensor_type is None:
            raise self._bad(f"tensor {name!r} has the unknown type {kind}")
        return name, tensor_type, shape, offset

    def _place(
        self, infos: list[tuple[str, TensorType, tuple[int, ...], int]], data_offset: int, alignment: int
    ) -> tuple[Tensor, ...]:
        """Put the tensors where the file has them: one after the other, none past the end."""
        tensors = []
        seen = set()
        expected = 0
        for name, kind, shape, offset in infos:
            if name in seen:
                raise self._bad(f"the tensor {name!r} appears twice")
            seen.add(name)
            elements = math.prod(shape)
            if elements > _MOST_ELEMENTS:
                raise self._bad(f"tensor {name!r} has an impossible shape {shape}")
            if (shape[0] if shape else 1) % kind.block:
                raise self._bad(
                    f"tensor {name!r} of type {kind.name} has rows of {shape[0] if shape else 1} elements, "
                    f"not a multiple of {kind.block}"
                )
            if offset != expected:
                raise self._bad(f"tensor {name!r} is at offset {offset}, expected {expected}")
            size = elements // kind.block * kind.size
            tensors.append(Tensor(name, kind, shape, data_offset + offset, size))
            expected += -(-size // alignment) * alignment
        if tensors and tensors[-1].offset + tensors[-1].size > self._buffer.size:
            raise ModelFileError(
                f"{self._buffer.path} is truncated: its {len(tensors)} tensors need "
                f"{tensors[-1].offset + tensors[-1].size} bytes, the file has {self._buffer.size}. "
                "Fetch or copy it again"
            )
        return tuple(tensors)
