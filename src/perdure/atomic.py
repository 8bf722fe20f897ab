"""Files that are there whole or not at all, written beside their place and then renamed into it; and bounds
on what is read of files, and of anything else from outside."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from perdure import system
from perdure.errors import StoreError, StoreFullError, StoreReadOnlyError, TooLargeError

TEMPORARY = ".tmp"
"""What the names of unfinished files end with."""
PRIVATE = 0o600
"""What others may do with a private file: nothing."""


@contextmanager
def atomic_write(path: Path, *, private: bool = False, durable: bool = True) -> Iterator[BinaryIO]:
    """Write to a file that becomes `path` when the block ends well. After a crash it is whole, or as it was.

    A `private` one only its owner may read. What is not `durable` may be gone after a power cut; the new
    name of what is lasts once its folder was synced.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}{TEMPORARY}")
    try:
        with open_private(temporary) if private else temporary.open("wb") as file:
            yield file
            file.flush()
            if durable:
                system.sync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


# Reading: everything from outside has a bound before it is read.

TABLE_BYTES = 16 << 20
"""Of a table, a manifest or settings: no such file of ours or of other programs is near it."""
TEXT_BYTES = 64 << 20
"""Of a text that a person gives: more than any model reads."""
_PIECE = 1 << 20


class Readable(Protocol):
    """A pipe, a body, an open file."""

    def read(self, size: int, /) -> bytes: ...


class Lines(Protocol):
    """The same, line by line."""

    def readline(self, size: int, /) -> bytes: ...


def read_file(path: Path, limit: int, *, links: bool = True, regular: bool = True) -> bytes:
    """All bytes of a file; `TooLargeError`, and nothing read, where it has more than `limit`.

    OSError where it is no regular file; without `regular` a pipe will do, for what a person names. Without
    `links`, for a folder that others may write to, a link is an OSError too.
    """
    extra = (system.NO_WAIT if regular else 0) | (0 if links else system.NO_LINKS)
    if not links and path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(path))
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | extra)) as file:
        status = os.fstat(file.fileno())
        if regular and not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return read_stream(file, limit, str(path), size=status.st_size)


def read_text(path: Path, limit: int = TABLE_BYTES, *, errors: str = "strict", regular: bool = True) -> str:
    """The same as text in UTF-8, its lines ended by a line feed."""
    text = read_file(path, limit, regular=regular).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_stream(source: Readable, limit: int, name: str, *, size: int = 0) -> bytes:
    """All that comes; `TooLargeError` once it is more than `limit` bytes, or before, by the `size` that is
    announced."""
    check_size(size, limit, name)
    pieces: list[bytes] = []
    left, piece_size = limit + 1, size + 1 if size else _PIECE
    while left and (piece := source.read(min(left, piece_size))):
        pieces.append(piece)
        left -= len(piece)
        piece_size = _PIECE
    if not left:
        raise TooLargeError(f"{name} has more than the {limit} bytes that are read of it", limit=limit)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_lines(source: Lines, limit: int, name: str) -> Iterator[bytes]:
    """Each line, as it comes; `TooLargeError` at one of more than `limit` bytes."""
    while line := source.readline(limit + 1):
        if len(line) > limit:
            raise TooLargeError(f"a line of {name} has more than {limit} bytes", limit=limit)
        yield line


def check_size(size: int, limit: int, name: str) -> None:
    """Refuse what is announced to be larger than `limit` bytes, before it is read."""
    if size > limit:
        raise TooLargeError(f"{name} has {size} bytes, and no more than {limit} are read of it", limit=limit)


def read_table(path: Path) -> dict[str, Any]:
    """A table of JSON that saves work to do again. Empty where there is none, or no whole one."""
    try:
        content = json.loads(read_file(path, TABLE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    """Write such a table. In a folder of another user, or on a full disk, it is not written, and the work is
    done again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, durable=False) as file:
            file.write(json.dumps(table, indent=1).encode())


def open_private(path: Path) -> io.BufferedWriter:
    """A new file to write to, or an emptied one, that only its owner may read. It has a buffer: a bare file
    writes a part and says nothing where the disk is almost full."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | system.BINARY, PRIVATE)
    try:
        system.make_private(handle, PRIVATE)
        return io.BufferedWriter(io.FileIO(handle, "wb"))
    except BaseException:
        os.close(handle)
        raise


# Files that are there whole or not at all, whatever happens.

_FOLDER = 0o700
"""What others may do with a folder of ours: nothing."""


def write_file(path: Path, parts: Sequence[bytes | memoryview], *, keep_access: bool = False) -> None:
    """Write `path` through a temporary file beside it. After a crash it is whole, or as it was.

    Only its owner may read it; with `keep_access`, those who may read the file that it replaces. The name is
    durable only once `sync_folder` was called for its folder.
    """
    with (
        translate_os_errors(path, sum(len(part) for part in parts)),
        atomic_write(path, private=True) as file,
    ):
        for part in parts:
            write_all(file.fileno(), part)
        if keep_access:
            system.copy_access(path, file.fileno())


def make_private(path: Path) -> None:
    """Have a file that only its owner may read; what is in it stays.

    One that is there is not opened: to close it would drop the locks that SQLite has on it in this process.
    """
    with translate_os_errors(path):
        real = Path(os.path.realpath(path))
        if not real.exists():
            with suppress(FileExistsError):
                os.close(os.open(real, os.O_WRONLY | os.O_CREAT | os.O_EXCL | system.BINARY, PRIVATE))
        system.make_path_private(real, PRIVATE)


def make_folder(path: Path, *, ours: bool = False) -> None:
    """Have a folder. One that is made here, or that is `ours` alone, only its owner may enter."""
    with translate_os_errors(path):
        if not path.is_dir():
            for missing in reversed([each for each in (path, *path.parents) if not each.exists()]):
                # Another process may have been faster.
                missing.mkdir(_FOLDER, exist_ok=True)
        if ours:
            system.make_path_private(path, _FOLDER)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    with translate_os_errors(folder):
        system.sync_folder(folder)


@contextmanager
def translate_os_errors(path: Path, needed: int = 0) -> Iterator[None]:
    """Say what the system's errors mean for a store."""
    try:
        yield
    except OSError as error:
        raise _meaning(error, path, needed) from error


def _meaning(error: OSError, path: Path, needed: int) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StoreFullError(
            f"the disk is full: {path} has no room for {needed or 'more'} bytes ({error.strerror}). "
            "Free some space, or give the store a smaller budget",
            needed=needed,
        )
    if error.errno == errno.EROFS:
        return StoreReadOnlyError(
            f"{path} is on a read-only file system: mount it for writing. A disk that fails "
            "is made so by the system, whose log then says why"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return StoreReadOnlyError(
            f"{path} cannot be read or written: {error.strerror}. Check who owns it, and its permissions"
        )
    return StoreError(f"{path} cannot be used: {error.strerror or error}")


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of `data` to an open file."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]
