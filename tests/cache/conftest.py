"""The models that cache tests run over, each opened once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import subjects
import zoo
from subjects import Subject


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


@pytest.fixture(params=subjects.TOYS)
def toy(request: pytest.FixtureRequest, find_subject: Callable[[str], Subject]) -> Subject:
    """Every kind of memory on the toy engine."""
    return find_subject(request.param)


@pytest.fixture(params=zoo.names())
def real(request: pytest.FixtureRequest, find_subject: Callable[[str], Subject]) -> Subject:
    """Every model of the zoo on llama.cpp."""
    return find_subject(request.param)
