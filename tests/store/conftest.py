"""Folders for the tests of durable bytes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of fsyncs would wait for a disk."""
    folder = Path(tempfile.mkdtemp(prefix="perdure-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture(scope="session")
def lasting_path() -> Iterator[Path]:
    """A folder for the whole run."""
    with folder_in_memory() as folder:
        yield folder
