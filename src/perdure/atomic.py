"""Files that are there whole or not at all: written beside their place, then renamed into it."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from perdure import system

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
        raw = open_private(temporary) if private else io.FileIO(temporary, "wb")
        with io.BufferedWriter(raw) as file:
            yield file
            file.flush()
            if durable:
                system.sync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def open_private(path: Path) -> io.FileIO:
    """A new file to write to, or an emptied one, that only its owner may read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | system.BINARY, PRIVATE)
    try:
        system.make_private(handle, PRIVATE)
        return io.FileIO(handle, "wb")
    except BaseException:
        os.close(handle)
        raise
