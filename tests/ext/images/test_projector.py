"""Projectors beside models."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure import InvalidInputError, ModelFileError
from perdure.ext.images.projector import find_projector, read_projector

Toy = Callable[[str], tuple[Path, Path]]


def test_the_projector_beside_a_model_is_found(toy: Toy, tmp_path: Path) -> None:
    model, projector = toy("qwen2vl")
    found = find_projector(model)
    assert found is not None
    assert found.path == projector
    assert (found.kind, found.images, found.sounds) == ("qwen2vl_merger", True, False)
    alone = tmp_path / "model.gguf"
    shutil.copy(model, alone)
    assert find_projector(alone) is None


def test_of_several_the_one_with_the_models_name_is_taken(toy: Toy, tmp_path: Path) -> None:
    model, projector = toy("llava")
    ours = tmp_path / "Qwen2.5-VL-7B-Instruct-Q4_K_M.gguf"
    shutil.copy(model, ours)
    for name in (
        "mmproj-Qwen2.5-VL-7B-Instruct-f16.gguf",
        "mmproj-Qwen2.5-VL-3B-Instruct-f16.gguf",
        "gemma-mmproj.gguf",
    ):
        shutil.copy(projector, tmp_path / name)
    found = find_projector(ours)
    assert found is not None
    assert found.path.name == "mmproj-Qwen2.5-VL-7B-Instruct-f16.gguf"
    other = tmp_path / "SmolLM-Q8_0.gguf"
    shutil.copy(model, other)
    assert find_projector(other) is None


def test_what_is_no_projector_is_refused(toy: Toy, tmp_path: Path) -> None:
    model, _ = toy("llava")
    with pytest.raises(ModelFileError, match="no projector"):
        read_projector(model)
    with pytest.raises(InvalidInputError, match="there is no projector"):
        read_projector(tmp_path / "none.gguf")
    damaged = tmp_path / "mmproj.gguf"
    damaged.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError):
        read_projector(damaged)
