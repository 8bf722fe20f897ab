"""Folders and models for the tests of durable bytes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import subjects
from subjects import Subject

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
def find_subject(zoo_path: Callable[[str], Path]) -> Callable[[str], Subject]:
    """`find_subject("gemma3")` is that model, opened once."""
    known: dict[str, Subject] = {}

    def find(name: str) -> Subject:
        if name not in known:
            known[name] = subjects.find(name, zoo_path)
        return known[name]

    return find


@pytest.fixture(params=subjects.NAMES)
def subject(request: pytest.FixtureRequest, find_subject: Callable[[str], Subject]) -> Subject:
    """Every model in turn: the toy engine's kinds of memory, then the zoo on llama.cpp."""
    return find_subject(request.param)
