"""Files that are there whole or not at all, whatever happens."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from perdure import system
from perdure.atomic import PRIVATE, atomic_write
from perdure.errors import StoreError, StoreFullError, StoreReadOnlyError

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
            f"no room for {needed} bytes at {path} ({error.strerror}): free some space, or give the store a "
            "smaller budget",
            needed=needed,
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreReadOnlyError(f"{path} may not be used like this: {error.strerror}")
    return StoreError(f"{path} cannot be used: {error.strerror or error}")


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of `data` to an open file."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]
