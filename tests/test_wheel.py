"""What is shipped is what was tested: the wheel, installed into a new environment outside of this tree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tools.build_hook import own_compiler

import perdure
import perdure.ext.builds as libraries
from perdure import models

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as `make dist` builds it."""
    folder = tmp_path_factory.mktemp("dist")
    # Without a compiler the build needs one more package, which it installs for itself.
    alone = [] if own_compiler(ROOT) is None else ["--no-isolation"]
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", *alone, "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
    )
    [found] = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and what it depends on, the server's parts included."""
    folder = tmp_path_factory.mktemp("new")
    venv.create(folder)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", programs / "python"),
            *("install", "--quiet", "--no-compile", f"{wheel}[server]"),
        ],
        check=True,
        capture_output=True,
        cwd=folder,
    )
    return programs


def variables(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "PYTHON"))}
    return {**kept, "PERDURE_HOME": str(home), "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}


def test_the_wheel_has_the_licence_the_notice_and_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    source = ROOT / "src"
    here = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert {name for name in here if "__pycache__" not in name} <= names
    licences = {Path(name).name for name in names if ".dist-info/licenses/" in name}
    assert {"LICENSE", "NOTICE"} <= licences


def test_nothing_that_must_be_compiled_is_a_dependency(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if each.endswith("/METADATA")]
        text = archive.read(name).decode()
    needed = [
        line for line in text.splitlines() if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert needed
    assert not any("llama" in line for line in needed)
    assert f"Version: {perdure.__version__}" in text


def test_the_changelog_starts_with_what_is_not_released_or_with_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" or headings[0] == perdure.__version__


@pytest.mark.model
@pytest.mark.extension("machine")
def test_installed_elsewhere_it_fetches_the_engine_answers_and_finds_its_version(
    environment: Path, tmp_path: Path
) -> None:
    """The engine comes from npm's registry as for anybody; the model is the one that the tests fetched."""
    there = variables(tmp_path / "home") | {"PERDURE_MODEL": str(models.path())}
    done = run(environment, there, tmp_path, "--version")
    assert done == f"perdure {perdure.__version__}\n"
    reply = run(environment, there, tmp_path, "run", "--raw", "The sky is", "-n", "8", "-t", "0", "--json")
    assert json.loads(reply)["usage"]["completion_tokens"] == 8
    listed = json.loads(run(environment, there, tmp_path, "engine", "list", "--json"))
    assert listed[0]["used"]
    assert listed[0]["origin"] == libraries.package_for().spec
    assert listed[0]["licence"] == "MIT"
    where = subprocess.run(
        [environment / "python", "-c", "import perdure; print(perdure.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        env=there,
        cwd=tmp_path,
    ).stdout
    assert str(ROOT) not in where


@pytest.mark.model
def test_installed_elsewhere_it_serves_with_the_models_template(environment: Path, tmp_path: Path) -> None:
    there = variables(tmp_path / "home") | {"PERDURE_MODEL": str(models.path())}
    with serving(environment, there, tmp_path) as url:
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
            timeout=120,
        )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0


def run(programs: Path, there: dict[str, str], folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [programs / "perdure", *arguments], capture_output=True, text=True, check=False, env=there, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def serving(programs: Path, there: dict[str, str], folder: Path) -> Iterator[str]:
    """`perdure serve` on a free port while the block runs; the block gets its address."""
    with subprocess.Popen(
        [programs / "perdure", "serve", "--port", "0", "--ctx", "512"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=there,
        cwd=folder,
    ) as child:
        assert child.stdout is not None
        try:
            said = iter(child.stdout.readline, "")
            found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in said)
            yield next(match[0] for match in found if match)
        finally:
            child.terminate()
