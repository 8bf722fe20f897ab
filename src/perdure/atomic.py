"""Files that are there whole or not at all: written beside their place, then renamed into it."""

from __future__ import annotations

import errno
import io
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from perdure import system
from perdure.errors import StoreError, StoreFullError, StoreReadOnlyError

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


def read_table(path: Path) -> dict[str, Any]:
    """A table of JSON that saves work to do again. Empty where there is none, or no whole one."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    """Write such a table. In somebody else's folder, or on a full disk, it is not, and the work is done
    again."""
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
                # Somebody else may have been faster.
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
            f"{path} is on a file system that is read-only: have it mounted for writing. A disk that fails "
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
