"""The examples run, with a toy model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(path: Path, model: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(path), "--model", str(model), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py") if path.stem != "resume"))
def test_an_example_runs(name: str, zoo_path: Callable[[str], Path]) -> None:
    assert run(EXAMPLES / name, zoo_path("llama"))


@pytest.mark.parametrize("model", ["llama", "mamba"])
def test_resume_gives_valid_json_and_does_not_grow(model: str, zoo_path: Callable[[str], Path]) -> None:
    shown = run(
        EXAMPLES / "resume.py", zoo_path(model), "--quick", "--runs", "7", "--seed", "22"
    ).splitlines()
    assert len(shown) == 8
    assert "cancelled" in "".join(shown[:-1])
    assert re.fullmatch(r"7 runs: \d+ whole with valid JSON, \d+ cancelled; .* at the end: ok", shown[-1])
