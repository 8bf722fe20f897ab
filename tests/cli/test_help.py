"""`perdure --help`, which is answered without building the commands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tools import command_help

from perdure.cli import HELP


def asked(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-X", "importtime", "-m", "perdure.cli", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=True)
    assert ("typer" in ended.stderr) is ("COLUMNS" in environment and int(environment["COLUMNS"]) < 80)
    return ended.stdout


def test_it_is_what_the_commands_say() -> None:
    assert HELP.read_text(encoding="utf-8") == command_help.text(), "run `make api`"


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_it_takes_no_import_of_the_commands(option: str) -> None:
    assert asked(option, COLUMNS="80") == HELP.read_text(encoding="utf-8")


def test_neither_does_the_version() -> None:
    from perdure import __version__

    assert asked("--version") == f"perdure {__version__}\n"


def test_a_narrow_terminal_has_it_wrapped() -> None:
    lines = asked("--help", COLUMNS="60").splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.startswith("  run       Ask a model one question") for line in lines)
