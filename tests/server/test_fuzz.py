"""Sequences of calls by two keys and a client that drops: no crash, no 500, nothing foreign read (H5, I2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from decode.observed import toy
from server.fuzzing import fuzz, fuzzed

SOAK_SECONDS = 3600.0


def test_sequences_of_calls_by_two_keys_cross_nowhere_h5(tmp_path: Path) -> None:
    """H5."""
    with fuzzed(toy(), tmp_path / "store") as fuzzer:
        fuzzer.run(12, start=1)
    assert fuzzer.counts.statuses[200] > 0
    assert fuzzer.counts.dropped > 0


@pytest.mark.soak
def test_sequences_of_calls_by_two_keys_for_long_h5(
    zoo_path: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """H5."""
    with fuzzed(zoo_path("llama"), tmp_path / "store", threads=1, isolated=True) as fuzzer:
        fuzz(fuzzer, seconds=SOAK_SECONDS, told=lambda line: None)
    with capsys.disabled():
        print(f"\nserver fuzzer: {fuzzer.counts}")
