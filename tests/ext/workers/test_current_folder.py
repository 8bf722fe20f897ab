"""Nothing is run out of the folder that somebody happens to stand in (S7)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ext.workers.engines import isolated

HOSTILE = ("perdure", "json", "pip", "numpy", "socket", "ctypes", "sitecustomize", "usercustomize")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, full of modules that leave a mark when they are imported."""
    marks = tmp_path / "marks"
    marks.mkdir()
    folder = tmp_path / "downloads"
    folder.mkdir()
    for name in HOSTILE:
        line = f"open({str(marks / name)!r}, 'w').close()\n"
        (folder / f"{name}.py").write_text(line)
    monkeypatch.chdir(folder)
    yield marks
    assert sorted(path.name for path in marks.iterdir()) == []


def test_an_engine_in_a_child_runs_none_of_it(hostile: Path) -> None:
    with isolated("full") as rt:
        assert rt.generate("Hello", max_tokens=2, ignore_eos=True).usage.completion_tokens


def test_the_command_runs_none_of_it(hostile: Path) -> None:
    """The console script, as a shell would find it, up to a model that is not there."""
    done = subprocess.run(
        [Path(sys.executable).with_name("perdure"), "serve", "./none.gguf"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PERDURE_HOME": str(hostile.parent / "home")},
    )
    assert "none.gguf" in done.stderr


def test_the_marks_are_left_by_a_plain_start(hostile: Path) -> None:
    """Planted: without -P the current folder's modules come first."""
    subprocess.run([sys.executable, "-m", "json"], capture_output=True, check=False)
    assert (hostile / "json").exists()
    for mark in hostile.iterdir():
        mark.unlink()
