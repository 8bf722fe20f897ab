"""`perdure engine` and what `perdure doctor` says of the library, as a person runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.shims import needs_compiler, shim
from homes import new_home
from perdure.engine.llama.native import library
from perdure.libraries import package_for

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run("list")` is `perdure engine list` in a home that nothing is installed in, without a network."""

    def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
        return subprocess.run(
            [sys.executable, "-m", "perdure.cli", *arguments],
            env={**kept, "PERDURE_HOME": str(tmp_path / "home"), "PATH": "/nowhere", "PIP_NO_INDEX": "1"}
            | environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    return start


@pytest.fixture
def real() -> Path:
    """The folder of the library that these tests run on."""
    return library.loaded().source.folder


def rows(run: Run, **environment: str) -> list[dict[str, Any]]:
    done = run("engine", "list", "--json", **environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


def test_a_build_is_installed_used_tested_and_removed(run: Run, real: Path, tmp_path: Path) -> None:
    done = run("engine", "install", "--from", str(real))
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[0])
    assert folder.parent == tmp_path / "home" / "engines"
    assert "runs" in done.stdout

    used, *others = rows(run)
    assert (used["used"], used["folder"], used["origin"]) == (True, str(folder), str(real))
    assert used["why"] == "the last one installed"
    assert used["version"] == library.loaded().version
    assert used["variant"] == library.loaded().variant
    assert any("CPU" in device for device in used["devices"])
    assert not any(row["used"] for row in others)

    assert run("engine", "test", used["name"]).returncode == 0
    next(folder.glob("libggml-base*")).write_bytes(b"not as it was")
    damaged = run("engine", "test", used["name"])
    assert damaged.returncode == 1
    assert "is not as it was installed" in damaged.stdout

    assert run("engine", "remove", used["name"]).returncode == 1, "nobody said yes"
    assert run("engine", "remove", used["name"], "--yes").returncode == 0
    assert not folder.exists()


def test_licences_are_told_of_what_is_here_and_of_what_can_be_fetched(run: Run, real: Path) -> None:
    for row in rows(run, PERDURE_LLAMA=str(real)):
        if row["origin"].startswith("@"):
            assert row["licence"] == "MIT"
    shown = run("engine", "list", PERDURE_LLAMA=str(real)).stdout
    assert package_for().spec in shown
    assert "licence MIT" in shown


def test_a_named_build_hides_what_is_installed(run: Run, real: Path) -> None:
    run("engine", "install", "--from", str(real))
    first, second, *_ = rows(run, PERDURE_LLAMA=str(real))
    assert (first["used"], first["why"]) == (True, "PERDURE_LLAMA names it")
    assert (second["used"], second["why"]) == (False, "PERDURE_LLAMA names another")


@pytest.mark.parametrize("arguments", [["nonsense"], ["cpu", "--from", "."]])
def test_wrong_usage_exits_with_2(arguments: list[str], run: Run) -> None:
    assert run("engine", "install", *arguments).returncode == 2


def test_without_a_network_one_line_names_the_other_ways(run: Run) -> None:
    done = run("engine", "install")
    assert done.returncode == 1
    assert done.stderr.startswith("perdure: ")
    for way in ("PERDURE_LLAMA", "perdure[compile]", "--from DIR"):
        assert way in done.stderr
    assert "Traceback" not in done.stderr


def findings(run: Run, name: str, **environment: str) -> list[dict[str, str]]:
    done = run("doctor", "--json", **environment)
    return [each for each in json.loads(done.stdout) if each["name"] == name]


def test_doctor_tells_which_library_is_used(run: Run, real: Path) -> None:
    [found] = findings(run, "engine", PERDURE_LLAMA=str(real))
    assert found["state"] == "ok"
    assert str(real) in found["found"]
    assert library.loaded().version in found["found"]
    assert library.loaded().variant in found["found"]


@needs_compiler
def test_doctor_tells_what_died_why_and_what_is_used_instead(run: Run, real: Path, tmp_path: Path) -> None:
    """M1: as on a Xeon with AMX and a library that gcc 12 compiled."""
    amx = shim(tmp_path / "amx", WITH_EXTRA_BUFFERS=1, AT_STEP=2)
    [found] = findings(run, "engine", PERDURE_LLAMA=str(amx))
    assert found["state"] == "warn"
    assert "SIGILL at" in found["found"]
    assert "used instead: " in found["found"]
    assert "no extra buffers: runs" in found["found"]
    assert found["advice"]


@needs_compiler
def test_doctor_names_a_library_that_cannot_run_and_the_next_one(
    run: Run, real: Path, tmp_path: Path
) -> None:
    run("engine", "install", "--from", str(real))
    run("engine", "install", "--from", str(shim(tmp_path / "dying", AT_STEP=1)))
    failed, used = findings(run, "engine")
    assert failed["state"] == "warn"
    assert "SIGILL at" in failed["found"]
    assert used["state"] == "ok"


@needs_compiler
def test_doctor_is_bad_where_none_runs(run: Run, tmp_path: Path) -> None:
    dying = shim(tmp_path / "dying", AT_STEP=1)
    [found] = findings(run, "engine", PERDURE_LLAMA=str(dying))
    assert found["state"] == "bad"
    assert "SIGILL" in found["found"]
    assert found["advice"]


def test_a_home_of_a_test_has_the_library(tmp_path: Path, run: Run) -> None:
    home = new_home(tmp_path / "other")
    assert rows(run, PERDURE_HOME=str(home))[0]["used"]
