"""Files that are there whole or not at all, whatever happens."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from perdure import system
from perdure.errors import StoreError, StoreFullError, StoreReadOnlyError

TEMPORARY = ".tmp"


def write_file(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write `path` through a temporary file beside it. After a crash it is whole, or as it was.

    The name is durable only once `sync_folder` was called for its folder.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    with explained(path, sum(len(part) for part in parts)):
        try:
            with temporary.open("wb", buffering=0) as file:
                for part in parts:
                    _write_all(file.fileno(), part)
                system.sync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    with explained(folder):
        system.sync_folder(folder)


@contextmanager
def explained(path: Path, needed: int = 0) -> Iterator[None]:
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


def _write_all(handle: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]
