"""docs/server.md stays true: what it says to run, runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from perdure import Model
from perdure.server.app import build
from server.live_server import LiveServer, live_server, opened

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
DEPLOYED = sorted(
    each for each in (Path(__file__).resolve().parents[2] / "deploy").rglob("*") if each.is_file()
)
ADDRESS = "http://127.0.0.1:8080"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture(scope="module")
def here(zoo_path: Callable[[str], Path]) -> Iterator[LiveServer]:
    with opened(Model(zoo_path("llama")), threads=1) as rt, live_server(rt) as server:
        yield server


@pytest.mark.parametrize("code", blocks("python"))
def test_a_snippet_runs(code: str, here: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code.replace(ADDRESS, here.url), "server.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("script", [block for block in blocks("sh") if "curl" in block])
def test_what_is_typed_works(script: str, here: LiveServer) -> None:
    command = script.replace(ADDRESS, here.url).replace("curl ", "curl -sS --noproxy '*' --fail ")
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@cache
def help_of_serve() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "perdure.cli", "serve", "--help"],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def commands() -> list[str]:
    lines = [line.split(" # ")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("perdure serve")]


def served(file: Path) -> str:
    """The lines of a file in deploy/ that start the server."""
    lines = [line for line in file.read_text().splitlines() if "serve" in line and not line.startswith("#")]
    return re.sub(r'[",\]]', " ", " ".join(lines)) + " "


def test_every_option_exists() -> None:
    named = {word for line in commands() for word in shlex.split(line) if word.startswith("--")}
    named |= set(re.findall(r"`(--[a-z-]+)", GUIDE))
    named |= {option for file in DEPLOYED for option in re.findall(r"(--[a-z]+) ", served(file))}
    assert named
    assert {option for option in named if not re.search(rf"{option}\b", help_of_serve())} == set()


def test_every_route_is_named(here: LiveServer) -> None:
    for path in build(here.state).openapi()["paths"]:
        last = path.replace("{name}", "").rstrip("/").rpartition("/")[2]
        assert path in GUIDE or f"…/{last}" in GUIDE or f"{path.rpartition('/')[0]}/{{id}}" in GUIDE, path


def test_every_figure_is_named(here: LiveServer) -> None:
    with here.client() as client:
        text = client.get("/metrics").text
    for name in set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)) - {"python_info"}:
        assert name.removesuffix("_created") in GUIDE, name
