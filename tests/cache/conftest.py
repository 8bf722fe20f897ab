"""The models that cache tests run over, each opened once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import subjects
import zoo
from subjects import Subject


@pytest.fixture(params=subjects.TOYS)
def toy(request: pytest.FixtureRequest, find_subject: Callable[[str], Subject]) -> Subject:
    """Every kind of memory on the toy engine."""
    return find_subject(request.param)


@pytest.fixture(params=zoo.names())
def real(request: pytest.FixtureRequest, find_subject: Callable[[str], Subject]) -> Subject:
    """Every model of the zoo on llama.cpp."""
    return find_subject(request.param)
