"""What one person has to own stays small: kernel, server and command have a bound in lines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import perdure

SOURCE = Path(perdure.__file__).parent
BOUNDS = {"kernel": 44_740, "server": 10_500, "cli": 6_000}
"""Lines, at most."""


@pytest.fixture(scope="module")
def sizes() -> Counter[str]:
    """Lines of each part. The kernel is what is not an extension, the server or the command."""
    found: Counter[str] = Counter()
    for file in SOURCE.rglob("*.py"):
        folder = file.relative_to(SOURCE).parts[0]
        part = folder if folder in {"ext", "server", "cli"} else "kernel"
        found[part] += len(file.read_text(encoding="utf-8").splitlines())
    return found


@pytest.mark.parametrize("part", BOUNDS)
def test_it_stays_small(part: str, sizes: Counter[str]) -> None:
    assert 0 < sizes[part] <= BOUNDS[part], sizes
