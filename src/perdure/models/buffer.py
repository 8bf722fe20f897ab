"""The front of a file, read as far as it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from perdure.errors import ModelFileError

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

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
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
