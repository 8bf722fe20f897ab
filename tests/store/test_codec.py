"""A store that is encrypted, where the extension that reads it is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.cache.tiers.codec import MARK
from perdure.cache.tiers.disk import DiskTier
from perdure.errors import StoreKeyError

HIDING = Path(__file__).parents[1] / "hiding"
OPEN = """
import sys
import perdure
from perdure.testing.toy import ToyModel
try:
    perdure.open(ToyModel(), store=sys.argv[1], encrypt=sys.argv[2] or None).close()
except perdure.PerdureError as error:
    print(type(error).__name__, error)
"""


def without_the_extension(*command: str) -> str:
    environment = {**os.environ, "PERDURE_HIDDEN": "encryption", "PYTHONPATH": str(HIDING)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.extension("upkeep")
def test_what_cannot_be_read_is_an_error_with_advice_and_can_be_deleted(tmp_path: Path) -> None:
    said = without_the_extension("-c", OPEN, str(tmp_path), "/a/key")
    assert "InvalidInputError encrypt needs the extension `encryption`" in said
    assert not list(tmp_path.rglob("blocks"))
    DiskTier(tmp_path, budget=1 << 20).close()
    (tmp_path / MARK).write_text("{}")
    (tmp_path / "blocks" / "ab").mkdir()
    (tmp_path / "blocks" / "ab" / ("ab" * 32)).write_bytes(b"x" * 100)
    for key in ("", "/a/key"):
        said = without_the_extension("-c", OPEN, str(tmp_path), key)
        assert "StoreKeyError" in said
        assert "not installed" in said
        assert "perdure cache clear --all" in said
    with pytest.raises(StoreKeyError, match="no key was given"):
        DiskTier(tmp_path, budget=1 << 20)
    clear = ("-m", "perdure.cli", "cache", "clear", "--all", "-y", "--store", str(tmp_path))
    assert "dropped 0 records" in without_the_extension(*clear)
    assert not (tmp_path / MARK).exists()
    assert "Error" not in without_the_extension("-c", OPEN, str(tmp_path), "")
