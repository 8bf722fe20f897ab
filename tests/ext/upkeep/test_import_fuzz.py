"""W3, I4, S5: no export, however it came about, fails otherwise than in words or leaves anything behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from ext.upkeep.import_fuzzing import fuzz
from subjects import Subject


def test_flipped_cut_spliced_and_made_up_exports(toy: Subject, tmp_path: Path) -> None:
    counts = fuzz(toy, tmp_path, trials=150)
    assert counts["trials"] == 150
    assert sum(count for name, count in counts.items() if "refused" in name) > 30


@pytest.mark.soak
def test_exports_of_every_kind_for_long(
    toy: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For 20 minutes, or so many trials."""
    counts = fuzz(toy, tmp_path, trials=200_000, seconds=1200, seed=1)
    with capsys.disabled():
        print("\nimport fuzzer:")
        for name, count in sorted(counts.items()):
            print(f"{count:7} {name}")
    assert counts["trials"] > 1000
