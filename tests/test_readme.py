"""The README stays true: its snippets run, its commands and links exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.split(" # ")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line.split(" | ")[-1] for line in lines if line]


@cache
def help_of(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command, "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    "code", blocks("python"), ids=lambda code: f"line-{README[: README.index(code)].count(chr(10))}"
)
def test_a_snippet_runs(
    code: str,
    zoo_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PERDURE_MODEL", str(zoo_path("llama")))
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", commands())
def test_a_command_and_its_options_exist(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        subprocess.run([*words, "--dry-run"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return
    if words[0] == "perdure":
        deep = 3 if words[1] in ("models", "config") else 2
        shown = help_of("-m", "perdure.cli", *words[1:deep])
    else:
        assert words[0] == "python"
        shown = help_of(*words[1 : 3 if words[1] == "-m" else 2])
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"{option}\b", shown), f"{command}: no {option}"


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_a_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_there_are_snippets_and_commands_to_check() -> None:
    assert len(blocks("python")) >= 5
    assert len(commands()) >= 10
