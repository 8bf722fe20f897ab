"""Two model files compared, as a user does it and as the library gives it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gguf_bytes as g
from cli.pty_user import piped
from perdure.errors import ModelFileError
from perdure.ext.weights.compare import compare
from perdure.ext.weights.tensors import Planned, TensorFile, copied, write_model

ZooPath = Callable[[str], Path]


def changed(source: Path, target: Path, name: str, by: float) -> Path:
    """A copy of a model with one number of one tensor moved."""
    with TensorFile(source) as file:

        def pieces(tensor: str) -> list[np.ndarray]:
            numbers = file.floats(file.tensors[tensor]).copy()
            numbers[0, 0] += by
            return [numbers.reshape(-1).view(np.uint8)]

        planned = [
            Planned(name=t.name, type=t.type, shape=t.shape, pieces=lambda t=t: pieces(t.name))  # type: ignore[misc]
            if t.name == name
            else copied(file, t)
            for t in file.tensors.values()
        ]
        write_model(target, planned, like=file, texts={"general.name": "changed"})
    return target


def test_a_copy_has_the_same_bytes_as_a_whole(zoo_path: ZooPath, tmp_path: Path) -> None:
    source = zoo_path("gemma3")
    with TensorFile(source) as file:
        write_model(tmp_path / "copy.gguf", [copied(file, t) for t in file.tensors.values()], like=file)
    assert (tmp_path / "copy.gguf").read_bytes() == source.read_bytes()
    assert compare(source, tmp_path / "copy.gguf").same_tensors


def test_one_number_is_found(zoo_path: ZooPath, tmp_path: Path) -> None:
    source, name = zoo_path("llama"), "blk.1.ffn_up.weight"
    found = compare(source, changed(source, tmp_path / "b.gguf", name, 0.25))
    (apart,) = [each for each in found.tensors if not each.same_bytes]
    assert apart.name == name
    assert apart.largest == pytest.approx(0.25)
    assert 0.0 < apart.relative < 0.1
    assert 0.9 < apart.cosine < 1.0
    assert found.metadata == {"general.name": ("toy llama", "changed")}
    assert not found.same_tensors


def test_what_only_one_file_has_is_named(zoo_path: ZooPath) -> None:
    found = compare(zoo_path("llama"), zoo_path("qwen3"))
    assert found.only_first == ()
    assert "blk.0.attn_q_norm.weight" in found.only_second
    assert found.metadata["general.architecture"] == ("llama", "qwen3")


def test_the_command_shows_it_and_says_by_its_exit_code_that_files_differ(
    zoo_path: ZooPath, tmp_path: Path
) -> None:
    source = zoo_path("llama")
    other = changed(source, tmp_path / "b.gguf", "output.weight", 1.0)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return piped(os.environ, None, "compare", *arguments)

    shown = run(str(source), str(other))
    assert shown.returncode == 1, shown.stderr
    assert "29 tensors have the same bytes, 1 differ" in shown.stdout
    assert shown.stdout.splitlines()[-1].endswith("output.weight")
    same = run(str(source), str(source), "--json")
    assert same.returncode == 0
    assert json.loads(same.stdout)["same_tensors"]


def test_a_file_that_is_cut_off_is_an_error(tmp_path: Path, zoo_path: ZooPath) -> None:
    (tmp_path / "bad.gguf").write_bytes(g.tiny()[:100])
    with pytest.raises(ModelFileError, match=r"bad\.gguf is not a usable"):
        compare(zoo_path("llama"), tmp_path / "bad.gguf")
