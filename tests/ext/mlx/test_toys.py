"""The toy folders are the same ones wherever and whenever they are written."""

from __future__ import annotations

import hashlib
from pathlib import Path

import mlx.core as mx
import pytest

from zoo import folders


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_a_toy_is_the_same_whenever_it_is_written(name: str, tmp_path: Path) -> None:
    """MLX's own dice are thrown by the clock: a toy of theirs was red on some days, and green on others."""
    found = set()
    for seed in range(2):
        mx.random.seed(seed)
        written = folders.write(name, tmp_path / str(seed)) / "model.safetensors"
        found.add(hashlib.sha256(written.read_bytes()).hexdigest())
    assert len(found) == 1
