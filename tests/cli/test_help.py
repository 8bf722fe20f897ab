"""`perdure --help`, which is answered without building the commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from tools import command_help

from perdure.cli import HELP
from perdure.cli.app import add_extensions, app


def asked(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-X", "importtime", "-m", "perdure.cli", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=True)
    assert ("typer" in ended.stderr) is ("COLUMNS" in environment and int(environment["COLUMNS"]) < 80)
    return ended.stdout


def test_it_is_what_the_commands_say() -> None:
    assert Path(HELP).read_text(encoding="utf-8") == command_help.text(), "run `make api`"


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_it_takes_no_import_of_the_commands(option: str) -> None:
    assert asked(option, COLUMNS="80") == Path(HELP).read_text(encoding="utf-8")


def pages() -> dict[str, str]:
    """The help of every command, by its name, in a terminal of 80 columns."""
    found = {}

    def read(command: Any, name: str) -> None:
        with command.make_context(name, [], resilient_parsing=True, terminal_width=78) as context:
            found[name] = command.get_help(context)
        for below, each in getattr(command, "commands", {}).items():
            read(each, f"{name} {below}")

    add_extensions()
    read(typer.main.get_command(app), "perdure")
    return found


def test_every_help_reads_well_at_80_columns() -> None:
    """No sentence is cut off, values are words in capitals, and no number or type is in Python's spelling."""
    for name, text in pages().items():
        assert max(map(len, text.splitlines())) <= 78, name
        for wrong in (
            r"[a-z]\.\.\.$",
            r"[{}<>]",
            r"default: \d+\.0\]",
            r"^Usage:.*(?<!perdure) [a-z]+\]",
            "None",
        ):
            assert not re.search(wrong, text, re.MULTILINE), (name, wrong, text)
        assert text.count("[") == text.count("]"), (name, text)


def test_the_defaults_of_sampling_are_shown_wherever_it_can_be_chosen() -> None:
    for name, text in pages().items():
        if "--temperature" in text:
            flat = " ".join(text.split())
            for option, default in (
                ("--temperature", "0.8"),
                ("--top-p", "0.95"),
                ("--top-k", "40"),
                ("--min-p", "0.05"),
                ("--repeat-penalty", "1"),
                ("--seed", "a new one each time"),
                ("--max-tokens", "until the model stops"),
            ):
                assert re.search(rf"{option} [NX] [^\[]*\[default: {default}\]", flat), (name, option)


def test_neither_does_the_version() -> None:
    from perdure import __version__

    assert asked("--version") == f"perdure {__version__}\n"


def test_a_narrow_terminal_has_it_wrapped() -> None:
    lines = asked("--help", COLUMNS="60").splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.startswith("  run       Ask a model one question") for line in lines)
