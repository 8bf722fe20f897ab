"""Files that are fetched: whole or not there, by one process at a time, where there is room."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from perdure import atomic, system
from perdure.errors import FetchError


@contextmanager
def atomic_write(target: Path) -> Iterator[BinaryIO]:
    """Write to a temporary file that becomes `target`, on disk for good, when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic.atomic_write(target) as file:
            yield file
        system.sync_folder(target.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError(f"the disk is full at {target.parent}; make room and try again") from error
        raise


def publish(temporary: Path, target: Path) -> None:
    """Rename a file that was synced, and make the new name last."""
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(temporary, target)
    system.sync_folder(target.parent)


@contextmanager
def fetch_lock(models: Path, name: str) -> Iterator[None]:
    """Be the only process that fetches `name`; others wait here."""
    locks = models / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{name.replace('/', '--')}.lock"):
        yield


def check_free_space(folder: Path, needed: int) -> None:
    """Refuse before the work rather than after it."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise FetchError(f"{folder} needs {needed} bytes of free disk, it has {free}")
