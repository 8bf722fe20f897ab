"""The k largest of rows: the compiled part against a stable sort."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import perdure.engine.top_k
from perdure.engine.top_k import top_k
from perdure.errors import EngineError

FILE = Path(perdure.engine.top_k.__file__)


def check(rows: NDArray[np.float32], k: int) -> None:
    ids, values = top_k(rows, k)
    for row, found, logits in zip(rows, ids, values, strict=True):
        expected = np.argsort(-row, kind="stable")[:k]
        assert found.tolist() == expected.tolist()
        assert logits.tolist() == row[expected].tolist()


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 32),
    count=st.integers(1, 5),
    size=st.one_of(st.integers(1, 700), st.sampled_from([128, 256, 4096, 49_152, 70_001])),
    share=st.floats(0.0, 1.0),
    digits=st.sampled_from([None, 0, 1]),
    lost=st.floats(0.0, 1.0),
    stride=st.integers(0, 3),
)
def test_they_are_those_of_a_stable_sort(
    seed: int, count: int, size: int, share: float, digits: int | None, lost: float, stride: int
) -> None:
    """Whatever is equal or ruled out, where the rows do not lie side by side, and for every k."""
    dice = np.random.default_rng(seed)
    rows = dice.normal(0, 3, (count, size + stride)).astype(np.float32)
    rows = rows if digits is None else np.round(rows, digits)
    rows[dice.random(rows.shape) < lost * dice.integers(0, 2)] = -np.inf
    rows = rows[:, stride:]
    check(rows, max(1, round(size * share**4)))


@pytest.mark.parametrize("kind", ["rising", "falling", "equal", "infinite"])
def test_rows_that_are_sorted_or_all_alike(kind: str) -> None:
    size = 10_000
    row = {
        "rising": np.arange(size),
        "falling": -np.arange(size),
        "equal": np.zeros(size),
        "infinite": np.where(np.arange(size) % 3, np.inf, -np.inf),
    }[kind].astype(np.float32)
    for k in (1, 40, 5000, size):
        check(np.stack([row, row]), k)


def test_many_rows_in_several_threads_are_each_their_own() -> None:
    rows = np.random.default_rng(1).normal(0, 3, (33, 49_152)).astype(np.float32)
    check(rows, 40)


@pytest.mark.parametrize("size", [5, 300, 49_152, 70_001])
@pytest.mark.parametrize("value", [np.nan, -np.nan], ids=["nan", "-nan"])
def test_a_number_that_is_none_is_found_wherever_it_stands(size: int, value: float) -> None:
    rows = np.random.default_rng(1).normal(0, 3, (3, size)).astype(np.float32)
    for at in {0, 1, 3, size // 2, size - 2, size - 1}:
        strange = rows.copy()
        strange[1, at] = value
        with pytest.raises(EngineError, match="no numbers"):
            top_k(strange, 3)
    check(rows, 3)


@pytest.mark.parametrize("k", [0, -1, 11, 1 << 40])
def test_what_would_lead_beside_the_memory_is_refused(k: int) -> None:
    rows = np.zeros((2, 10), np.float32)
    with pytest.raises(ValueError, match="rows of shape"):
        top_k(rows, k)
    others: list[Any] = [rows.astype(np.float64), rows[:, ::2], rows.T]
    for strange in others:
        with pytest.raises(ValueError, match="rows of shape"):
            top_k(strange, 1)


@pytest.mark.parametrize("state", ["missing", "broken", "old"])
def test_a_part_that_does_not_fit_says_what_to_do(state: str, tmp_path: Path) -> None:
    """In a checkout that was updated and not installed again."""
    folder = tmp_path / "top_k"
    shutil.copytree(FILE.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    made = folder / "libtop_k.so"
    if state == "old":
        source = folder / "__init__.py"
        source.write_text(source.read_text().replace("_VERSION = 1", "_VERSION = 2"))
    else:
        made.unlink()
    if state == "broken":
        made.write_bytes(b"\x7fELF and no more")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import top_k"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "EngineError: perdure's compiled part" in done.stderr
    assert "pip install -e ." in done.stderr


def test_everything_is_ruled_out_but_three() -> None:
    rows = np.full((3, 49_152), -np.inf, np.float32)
    rows[:, [7, 300, 49_151]] = [1.0, 3.0, 2.0]
    ids, values = top_k(rows, 40)
    assert ids[:, :3].tolist() == [[300, 49_151, 7]] * 3
    assert ids[:, 3:].tolist() == [list(range(7)) + list(range(8, 38))] * 3
    assert values[:, :4].tolist() == [[3.0, 2.0, 1.0, -math.inf]] * 3
