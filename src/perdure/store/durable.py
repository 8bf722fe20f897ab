"""Files that are there whole or not at all, whatever happens."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from perdure.errors import StoreError, StoreFullError, StoreReadOnlyError

TEMPORARY = ".tmp"


def write_file(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write `path` through a temporary file beside it. After a crash it is whole, or as it was.

    The name is durable only once `sync_folder` was called for its folder.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("wb", buffering=0) as file:
            for part in parts:
                _write_all(file.fileno(), part)
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise explained(error, path, sum(len(part) for part in parts)) from error


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def explained(error: OSError, path: Path, needed: int) -> StoreError:
    """What the system's error means for a store."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(
            f"no room for {needed} bytes at {path}: free some space, or give the store a smaller budget",
            needed=needed,
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreReadOnlyError(f"cannot write {path}: {error.strerror}")
    return StoreError(f"cannot write {path}: {error.strerror or error}")


def _write_all(handle: int, data: bytes | memoryview) -> None:
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(handle, rest) :]
