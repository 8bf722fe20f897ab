"""The header of a GGUF file: metadata and tensor infos, checked before anything is believed."""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from perdure.atomic import Readable
from perdure.checks import is_whole
from perdure.errors import ModelFileError, ModelNotFoundError

FIRST_READ = 4 << 20
# Real headers stay below 40 MiB. Past this, a count in the file is lying about its own metadata.
LONGEST_HEADER = 512 << 20


class Buffer:
    """The first `len(data)` bytes of a file of `size` bytes.

    Nothing past the end of the file is ever promised, and memory grows with bytes that were
    really there, never with a number that the file claims. The file is read, not mapped: a
    file that shrinks meanwhile must be an error here and not a signal.
    """

    __slots__ = ("_file", "data", "path", "size")

    def __init__(self, file: Readable, path: Path, size: int) -> None:
        self._file = file
        self.path = path
        self.size = size
        self.data = file.read(min(size, FIRST_READ))

    def need(self, end: int, what: str) -> None:
        """Have the bytes up to `end`, or say what they were needed for."""
        if end <= len(self.data):
            return
        if end > self.size:
            raise ModelFileError(
                f"{self.path} is truncated or damaged: {what} needs {end} bytes, the file has {self.size}"
            )
        if end > LONGEST_HEADER:
            raise ModelFileError(
                f"{self.path} is damaged: {what} puts the header past {LONGEST_HEADER} bytes ({end})"
            )
        # Doubling keeps the copies of what was read already below the length of the header.
        more = max(end, 2 * len(self.data)) - len(self.data)
        self.data += self._file.read(more)
        if end > len(self.data):
            raise ModelFileError(
                f"{self.path} shrank while it was read: {what} needs {end} bytes, {len(self.data)} are left"
            )


Offsets: TypeAlias = NDArray[np.int64]

_PREFIX = 8
_WINDOW = 1 << 20
# A run of guesses shorter than this did not pay for its search.
_SHORT_RUN = 16
_LONGEST_STRIDE = 1 << 14
_length_at = struct.Struct("<Q").unpack_from


class Strings(Sequence[str]):
    """The strings of one metadata array. Each is decoded when it is asked for, not before.

    Bytes that are not UTF-8 read as U+FFFD; `raw` gives the bytes themselves.
    """

    __slots__ = ("_data", "_ends", "_starts")

    def __init__(self, data: bytes, starts: Offsets, ends: Offsets) -> None:
        self._data = data
        self._starts = starts
        self._ends = ends

    def raw(self, index: int) -> bytes:
        """The bytes of one string."""
        return self._data[self._starts[index] : self._ends[index]]

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Strings: ...
    def __getitem__(self, index: int | slice) -> str | Strings:
        if isinstance(index, slice):
            return Strings(self._data, self._starts[index], self._ends[index])
        return self.raw(index).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        data = self._data
        for start, end in zip(self._starts.tolist(), self._ends.tolist(), strict=True):
            yield data[start:end].decode("utf-8", "replace")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) or not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(repr(self[i]) for i in range(min(3, len(self))))
        return f"Strings([{shown}{', …' if len(self) > 3 else ''}], len={len(self)})"


def read_strings(buffer: Buffer, start: int, count: int, what: str) -> tuple[Strings, int]:
    """The `count` strings that begin at `start`, and where they end."""
    room = (min(buffer.size, LONGEST_HEADER) - start) // _PREFIX
    if count > room:
        raise ModelFileError(
            f"{buffer.path} is truncated or damaged: {what} claims {count} strings, "
            f"at most {room} fit into its {buffer.size} bytes"
        )
    begins = _walk(buffer, start, count, what)
    if not count:
        return Strings(b"", begins, begins), start
    end = _after(buffer, int(begins[-1]), what)
    buffer.need(end, what)
    ends = np.empty_like(begins)
    ends[:-1] = begins[1:]
    ends[-1] = end
    return Strings(buffer.data[start:end], begins + (_PREFIX - start), ends - start), end


def _after(buffer: Buffer, at: int, what: str) -> int:
    """Where the string whose length stands at `at` ends."""
    buffer.need(at + _PREFIX, what)
    length: int = _length_at(buffer.data, at)[0]
    if length > buffer.size - at - _PREFIX:
        raise ModelFileError(
            f"{buffer.path} is truncated or damaged: a string of {what} claims {length} bytes, "
            f"{buffer.size - at - _PREFIX} are left of {buffer.size}"
        )
    return at + _PREFIX + length


def _walk(buffer: Buffer, start: int, count: int, what: str) -> Offsets:
    """Where each of `count` strings begins (its length prefix).

    Every string must be walked to find the next one. So we guess all of them at once and prove the
    guess: a string below 256 bytes begins where seven zero bytes follow a byte, and a run of
    guesses is right if the first is and each next one stands where the one before it ends.
    Where that breaks (an empty or long string, zeros inside one) we step singly, in strides that
    double while the guesses stay bad, so that no file can make it slower than single steps.
    """
    begins = np.empty(count, np.int64)
    done = 0
    at = start
    while done < count:
        buffer.need(at + _PREFIX, what)
        end = min(at + _WINDOW, buffer.size)
        buffer.need(end, what)
        guess, follow, breaks = _guesses(buffer.data, at, end)
        stride = 1
        while done < count and at + _PREFIX <= end:
            first = int(np.searchsorted(guess, at))
            run = 0
            if first < len(guess) and guess[first] == at:
                last = int(breaks[np.searchsorted(breaks, first)])
                run = min(last + 1 - first, count - done)
                begins[done : done + run] = guess[first : first + run]
                done += run
                at = int(follow[first + run - 1])
            stride = 1 if run >= _SHORT_RUN else min(2 * stride, _LONGEST_STRIDE)
            for _ in range(min(stride, count - done)):
                if at + _PREFIX > end:
                    break
                begins[done] = at
                done += 1
                at = _after(buffer, at, what)
    return begins


def _guesses(data: bytes, at: int, end: int) -> tuple[Offsets, Offsets, Offsets]:
    """Where strings seem to begin in a window, where each would end, and the last of each run."""
    window = np.frombuffer(data, np.uint8, end - at, at)
    zero = window == 0
    two = zero[1:-1] & zero[2:]
    four = two[:-2] & two[2:]
    seven = four[:-3] & four[3:]
    offsets = np.flatnonzero(seven)
    guess = offsets + at
    follow = guess + _PREFIX + window[offsets]
    broken = np.ones(len(guess), bool)
    if len(guess):
        broken[:-1] = follow[:-1] != guess[1:]
    return guess, follow, np.flatnonzero(broken)


class TensorType(NamedTuple):
    """One type: `size` bytes hold `block` elements."""

    name: str
    block: int
    size: int


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    # The engine's block is 36 bytes (two half floats); nothing stores this type in files.
    9: TensorType("Q8_1", 32, 36),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}

# general.file_type of a file, in the words that people use for it.
FILE_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
    41: "Q2_0",
}


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
    kinds: Mapping[str, str]
    """The types of its metadata values, in short: u32, f32, string."""
    tensors: tuple[Tensor, ...]
    spans: Mapping[str, tuple[int, int]]
    """Where each metadata pair lies in the file, name and type included: to be copied unchanged."""

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
            return parse_header(file, place, os.fstat(file.fileno()).st_size)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(f"there is no file {place}") from None
    except OSError as error:
        raise ModelFileError(f"{place} cannot be read: {error.strerror or error}") from error


def parse_header(file: Readable, path: Path, size: int) -> Header:
    """The checked header of a GGUF file of so many bytes, of which only the first ones can be read here."""
    return _Reader(Buffer(file, path, size)).header()


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
        metadata, kinds, spans = self._metadata(n_pairs)
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
            kinds=MappingProxyType({key: _TYPE_NAMES[kind] for key, kind in kinds.items()}),
            tensors=self._place(infos, data_offset, alignment),
            spans=MappingProxyType(spans),
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

    def _metadata(self, count: int) -> tuple[dict[str, Value], dict[str, int], dict[str, tuple[int, int]]]:
        values: dict[str, Value] = {}
        kinds: dict[str, int] = {}
        spans: dict[str, tuple[int, int]] = {}
        for number in range(count):
            start = self._at
            key = self._name(f"the name of metadata value {number}")
            if key in values:
                raise self._bad(f"the metadata key {key!r} appears twice")
            self._buffer.need(self._at + 4, f"the type of {key!r}")
            kind: int = _u32(self._buffer.data, self._at)[0]
            self._at += 4
            values[key] = self._value(key, kind)
            kinds[key] = kind
            spans[key] = (start, self._at)
        return values, kinds, spans

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
