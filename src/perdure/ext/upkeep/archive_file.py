"""Archive file: plain files in one tar, each with a digest. Exports and backups are written and read by it.

    header 512 | content | zeros up to a multiple of 512      for each file
    zeros 1024                                                at the end

Nothing is believed before it was checked: sizes against the file, contents against digests. Sparse files,
links, long names and whatever else a tar can hold are refused.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from perdure import CorruptStateError
from perdure.spi.base import translate_os_errors

_UNIT = 512
"""Everything starts at a multiple of it."""
_READ = 1 << 20
_USTAR_BYTES = 8 << 30
"""A file of as many bytes has its size in a form that USTAR does not have."""
_PAX_SIZE = b" size="
"""How tarfile writes the size of a file of 8 GiB and more, in a PAX header; older backups have it."""


@dataclass(frozen=True, slots=True)
class ArchivePart:
    """A file in an archive, as its manifest names it."""

    name: str
    nbytes: int
    sha256: str


class ArchiveReader:
    """An archive, read from its beginning to its end."""

    def __init__(self, file: io.BufferedReader, what: str) -> None:
        """`what` is what errors call it."""
        self._file = file
        self._what = what
        self._left = os.fstat(file.fileno()).st_size

    def next(self, name: str, size: int, *, exactly: bool = False) -> int:
        """Go to the next file, which must have that name and at most, or exactly, that size. Its size."""
        member = self.member()
        fits = member is not None and (member[1] == size if exactly else member[1] <= size)
        if member is None or member[0] != name or not fits:
            raise CorruptStateError(f"this {self._what} lacks {name}, or has something else in its place")
        return member[1]

    def member(self) -> tuple[str, int] | None:
        """Go to the next file: its name and its size; None at the end."""
        head = self._file.read(_UNIT)
        self._left -= len(head)
        if not head.strip(b"\0"):
            return None
        member = tarfile.TarInfo.frombuf(head, "utf-8", "strict")
        if member.type == tarfile.XHDTYPE and member.size < _UNIT:
            length, found, size = self.take(member.size).strip().partition(_PAX_SIZE)
            following = self.member() if found and length.isdigit() and size.isdigit() else None
            if following is not None and int(size) >= _USTAR_BYTES:
                return self._fitting(following[0], int(size))
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.size < 0:
            raise CorruptStateError(f"{member.name[:100]!r} in this {self._what} is no plain file")
        return self._fitting(member.name, member.size)

    def _fitting(self, name: str, size: int) -> tuple[str, int]:
        if size > self._left:
            raise CorruptStateError(
                f"{name[:100]!r} in this {self._what} is cut short: {self._left} of {size} bytes"
            )
        return name, size

    def take(self, size: int) -> bytes:
        """The next `size` bytes, and what fills them up."""
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[bytes]:
        """The next `size` bytes, not all at a time, and what fills them up."""
        left = size
        while left:
            data = self._file.read(min(left, _READ))
            if not data:
                raise CorruptStateError(f"this {self._what} is cut short by {left} bytes")
            left -= len(data)
            yield data
        self._fill(size)

    def skip(self, size: int) -> None:
        self._file.seek(size, os.SEEK_CUR)
        self._fill(size)

    def read(self, part: ArchivePart) -> bytes:
        data = self.take(part.nbytes)
        self._compare(part, hashlib.sha256(data))
        return data

    def check(self, part: ArchivePart) -> None:
        """Compare a part with its digest, without holding it in memory."""
        digest = hashlib.sha256()
        for data in self.pieces(part.nbytes):
            digest.update(data)
        self._compare(part, digest)

    def lines(self, part: ArchivePart, limit: int) -> Iterator[bytes]:
        """The lines of a part, of at most `limit` bytes, one at a time; behind the last one it is compared
        with its digest."""
        digest, left = hashlib.sha256(), part.nbytes
        while left:
            # By line feeds alone: texts may hold what Unicode calls the end of a line.
            line = self._file.readline(min(left, limit))
            digest.update(line)
            left -= len(line)
            if not line or (left and not line.endswith(b"\n")):
                raise CorruptStateError(
                    f"{part.name} in this {self._what} is cut short, or has a turn of more than {limit} bytes"
                )
            yield line
        self._fill(part.nbytes)
        self._compare(part, digest)

    def _compare(self, part: ArchivePart, digest: hashlib._Hash) -> None:
        if digest.hexdigest() != part.sha256:
            raise CorruptStateError(f"{part.name} in this {self._what} is damaged: its digest does not match")

    def _fill(self, size: int) -> None:
        rest = -size % _UNIT
        self._file.seek(rest, os.SEEK_CUR)
        self._left -= size + rest


@contextmanager
def read_archive(path: Path, what: str) -> Iterator[ArchiveReader]:
    """An archive, open for reading. `what` is what errors call it; they are `CorruptStateError`s."""
    with translate_os_errors(path):
        try:
            with path.open("rb") as file:
                yield ArchiveReader(file, what)
        except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:
            raise CorruptStateError(f"{path.name} is no {what}, or is damaged: {error}") from error


def digest_of(name: str, content: Iterable[bytes | memoryview]) -> ArchivePart:
    digest, size = hashlib.sha256(), 0
    for each in content:
        digest.update(each)
        size += len(each)
    return ArchivePart(name, size, digest.hexdigest())


def write_member(file: IO[bytes], name: str, size: int, content: Iterable[bytes | memoryview]) -> str:
    """Write a file into an archive; its digest. `CorruptStateError` unless `content` has `size` bytes."""
    member, digest, left = tarfile.TarInfo(name), hashlib.sha256(), size
    member.size = size
    member.mode = 0o600
    file.write(member.tobuf(tarfile.USTAR_FORMAT if size < _USTAR_BYTES else tarfile.GNU_FORMAT))
    for each in content:
        left -= len(each)
        digest.update(each)
        file.write(each)
    if left:
        raise CorruptStateError(f"{name} changed while it was written: do it again")
    file.write(bytes(-size % _UNIT))
    return digest.hexdigest()


def end_archive(file: IO[bytes]) -> None:
    file.write(bytes(2 * _UNIT))
