"""Folders for the tests of durable bytes."""

from __future__ import annotations

import shutil
import subprocess
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


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("killing at every change needs a C compiler for the library that counts them")
    library, source = tmp_path_factory.mktemp("shim") / "shim.so", Path(__file__).with_name("shim.c")
    built = subprocess.run(
        [
            compiler,
            "-O1",
            "-shared",
            "-fPIC",
            "-o",
            str(library),
            str(source),
            "-ldl",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        pytest.skip(f"the library that counts changes does not compile here: {built.stderr[-300:]}")
    return library
