"""Fixtures for tests of several machines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from subjects import Subject


@pytest.fixture
def toy(find_subject: Callable[[str], Subject]) -> Subject:
    return find_subject("toy-full")
