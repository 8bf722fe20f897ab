"""`perdure engine` and what `perdure doctor` says of the library, as a person runs them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.pty_user import piped
from engine.shims import empty_library, needs_compiler, shim
from homes import new_home
from perdure.engine.llama.native import library
from perdure.engine.llama.native.backends import BUILT_IN
from perdure.ext.builds.package import package_for

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run("list")` is `perdure engine list` in a home that nothing is installed in, without a network."""

    def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
        home = {"PERDURE_HOME": str(tmp_path / "home"), "npm_config_registry": "http://127.0.0.1:9"}
        return piped({**kept, **home, **environment}, None, *arguments)

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


@needs_compiler
def test_t4_a_gpu_library_that_fails_is_told_of_in_one_line_once(
    run: Run, tmp_path: Path, zoo_path: Callable[[str], Path]
) -> None:
    if library.loaded().variant == BUILT_IN:
        pytest.skip("the backends of this library are built in")
    words = '"CUDA error: the provided PTX was compiled with an unsupported toolchain"'
    folder = shim(tmp_path / "cuda", WITH_BACKEND='"ggml-cuda"', AT_STEP=1, DEATH="SIGABRT", WORDS=words)
    empty_library(folder / "libggml-cuda.so")
    environment = {"PERDURE_LLAMA": str(folder), "PERDURE_LLAMA_VARIANT": library.loaded().variant}
    ask = ("run", "--raw", "Once", "-m", str(zoo_path("llama")), "--max-tokens", "2", "--no-keep")
    first, second = (run(*ask, COLUMNS="1000", **environment) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    [line] = first.stderr.splitlines()
    assert "newer CUDA than the driver knows" in line
    assert second.stderr == ""
    asked = run(*ask, "--gpu-layers", "9", COLUMNS="1000", **environment)
    [line] = asked.stderr.splitlines()
    assert "newer CUDA than the driver knows" in line
    assert "leave --gpu-layers out" in line


def test_a_report_has_what_an_issue_needs_and_no_secrets(run: Run, real: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = run(
        *("doctor", "--report", str(report)),
        PERDURE_LLAMA=str(real),
        HOME=str(tmp_path),
        CUDA_VISIBLE_DEVICES="3",
        PERDURE_ADMIN_KEY="sk-secret-1",
        NVIDIA_API_TOKEN="sk-secret-2",
        PERDURE_HOST="my-machine.example",
        PERDURE_MODEL=str(tmp_path / "private-secret-3.gguf"),
        PERDURE_SHARED="redis://me:sk-secret-4@there/0",
        PERDURE_THREADS="2",
        UNRELATED="sk-secret-5",
    )
    assert f"wrote {report}" in done.stderr.replace("\n", " ")
    text = report.read_text(encoding="utf-8")
    for title in ("Findings", "GPUs", "Libraries", "Machine", "Python packages", "Environment", "Settings"):
        assert f"\n## {title}\n" in text
    assert library.loaded().version in text
    assert "CPU variant" in text
    assert "CUDA_VISIBLE_DEVICES=3\n" in text
    assert "PERDURE_ADMIN_KEY=(set)\n" in text
    assert "PERDURE_SHARED=redis://(left out)@there/0\n" in text
    assert "threads = 2 (PERDURE_THREADS)\n" in text
    assert not [word for word in ("sk-secret", "my-machine", "UNRELATED", str(tmp_path)) if word in text]
    again = run("doctor", "--report", str(report))
    assert again.returncode == 2
    assert "is there already" in again.stderr
    assert report.read_text(encoding="utf-8") == text
    nowhere = run("doctor", "--report", str(tmp_path / "no" / "folder.md"))
    assert nowhere.returncode == 2
    assert "Traceback" not in nowhere.stderr


def test_a_home_of_a_test_has_the_library(tmp_path: Path, run: Run) -> None:
    home = new_home(tmp_path / "other")
    assert rows(run, PERDURE_HOME=str(home))[0]["used"]


def test_a_file_that_killed_the_engine_is_named_and_tried_once_more(run: Run, tmp_path: Path) -> None:
    """`doctor` names it with the command that has it tried again, which forgets it."""
    home = tmp_path / "home"
    home.mkdir()
    record = {"files": ["bad.gguf"], "sizes": [3], "death": "SIGSEGV", "when": 1.0e9}
    (home / "deadly.json").write_text(json.dumps({"0" * 64: record, "damaged": {"files": 3}}))
    shown = run("doctor", "--json", "--store", str(tmp_path / "store"))
    [finding] = [each for each in json.loads(shown.stdout) if "bad.gguf" in each["found"]]
    assert (finding["state"], "by SIGSEGV" in finding["found"]) == ("warn", True)
    assert "perdure engine retry bad.gguf" in finding["advice"]
    assert run("engine", "retry", "other.gguf").stdout == "no such file is remembered\n"
    assert "bad.gguf ended the process" in run("engine", "retry", "bad.gguf").stdout
    assert run("engine", "retry").stdout == "no file is remembered\n"
