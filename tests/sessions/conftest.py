"""Fixtures for tests of sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import subjects
from subjects import NAMES, Subject


@pytest.fixture(params=NAMES)
def subject(request: pytest.FixtureRequest, zoo_path: Callable[[str], Path]) -> Subject:
    return subjects.find(request.param, zoo_path)


@pytest.fixture
def toy(zoo_path: Callable[[str], Path]) -> Subject:
    return subjects.find("toy-full", zoo_path)
