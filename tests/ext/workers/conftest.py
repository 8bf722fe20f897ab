"""Fixtures for engines in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ext.workers.engines import Hold, isolated, meeting_place
from perdure import Runtime


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    with meeting_place(tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def shared() -> Iterator[Runtime]:
    """A plain toy in another process, for tests that leave it as it was."""
    with isolated("full") as rt:
        yield rt


@pytest.fixture
def rt(hold: Hold) -> Iterator[Runtime]:
    """A rigged toy in another process."""
    with isolated() as rt:
        yield rt
