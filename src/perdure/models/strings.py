"""Arrays of strings in a header, found in bulk and decoded one by one."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from perdure.errors import ModelFileError
from perdure.models.buffer import LONGEST_HEADER, Buffer

Offsets: TypeAlias = NDArray[np.int64]

_PREFIX = 8
_WINDOW = 1 << 20
# A run of guesses shorter than this did not pay for its search.
_SHORT_RUN = 16
_LONGEST_STRIDE = 1 << 14
_length_at = struct.Struct("<Q").unpack_from


class Strings(Sequence[str]):
    """The strings of one metadata array. Each is decoded when it is asked for, not before.

    Bytes that are not UTF-8 read as U+FFFD; `raw` gives them as they are.
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
    found = np.flatnonzero(seven)
    guess = found + at
    follow = guess + _PREFIX + window[found]
    broken = np.ones(len(guess), bool)
    if len(guess):
        broken[:-1] = follow[:-1] != guess[1:]
    return guess, follow, np.flatnonzero(broken)
